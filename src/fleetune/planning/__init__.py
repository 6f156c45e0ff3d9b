"""Will it fit, and how is it divided? Floor 2: pure arithmetic on plain values, never torch."""
