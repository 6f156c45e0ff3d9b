"""fleetune fine-tunes a Hugging Face language model on whatever machines you have."""

__version__ = "0.1.0"
