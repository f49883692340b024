"""Products and attention of the few tokens of a decoding step, as a CPU computes them fastest."""
