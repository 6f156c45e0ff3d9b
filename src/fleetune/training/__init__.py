"""How does one rank run? Floor 4: the only room that knows all parts."""
