"""The frozen causal LM: how it is loaded, tried and read."""
