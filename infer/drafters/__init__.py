"""Drafters other than heads: n-grams, draft models, and combinations of drafters."""
