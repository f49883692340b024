"""Learning from use: what was asked and answered trains the head that answers."""
