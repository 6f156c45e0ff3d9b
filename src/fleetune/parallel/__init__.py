"""How is it spread over ranks? Floor 3."""
