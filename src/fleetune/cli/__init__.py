"""How do I say it? Floor 5."""
