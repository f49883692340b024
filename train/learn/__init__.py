"""Learning from use: questions and answers train the head that drafts the answers."""
