"""What can draft besides heads: n-grams, draft models, early exit, and combinations of drafters."""
