"""How fast is it, and how much memory does it take? Measurements, each of programs as a person starts them."""
