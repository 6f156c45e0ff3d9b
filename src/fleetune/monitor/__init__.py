"""What happened? Floor 2."""
