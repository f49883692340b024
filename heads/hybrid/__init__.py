"""Targets with recurrent layers: their states, and how these follow a tree of tokens."""
