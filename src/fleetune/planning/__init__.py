"""Will it fit, how fast, and what is best? Floor 2. Never imports torch."""
