"""Steps whose shapes depend on no length of a text: compiled, or recorded and replayed."""
