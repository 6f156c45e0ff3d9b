"""What is the model on one device? Floor 2."""
