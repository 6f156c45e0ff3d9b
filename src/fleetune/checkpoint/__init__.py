"""What survives a crash? Floor 2."""
