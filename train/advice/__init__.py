"""Advice: the needs of a run, a recipe for a target, the causes of low acceptance."""
