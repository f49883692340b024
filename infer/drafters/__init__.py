"""What can draft besides heads: n-grams, draft models, and combinations of drafters."""
