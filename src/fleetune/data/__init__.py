"""Where do batches come from? Floor 2."""
