"""Words in, words out. Floor 5."""
