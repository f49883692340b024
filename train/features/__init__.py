"""States of the target that heads learn from: computed here, stored, or made by servers."""
