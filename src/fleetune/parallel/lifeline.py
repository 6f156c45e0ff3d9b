"""The workers' side of the supervisor's pipe: see `fleetune.launch.lifeline`."""

from fleetune.launch.lifeline import watch

__all__ = ["watch"]
