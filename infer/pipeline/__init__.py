"""Text in, text out: a target and its drafts, loaded by name, that answer prompts."""
