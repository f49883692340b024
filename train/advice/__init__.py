"""Predicts the needs of a run, suggests a recipe for a target, and finds out why acceptance is low."""
