"""Who starts it, watches it, restarts it? Floor 2. Never imports torch."""
