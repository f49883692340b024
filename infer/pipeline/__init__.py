"""Text in, text out: answers prompts with a target and drafts that are loaded by name."""
