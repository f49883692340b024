"""The server: OpenAI's interface, and a page."""
