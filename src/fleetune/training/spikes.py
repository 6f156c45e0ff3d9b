"""Telling a spike from a hard batch: a value is held against the middle and the spread of the recent ones.

Median and median absolute deviation (Leys et al. 2013, doi 10.1016/j.jesp.2013.03.013) are not moved by the outliers that are
looked for. The bounds are wide on purpose: batches of fine-tuning data differ, and a false alarm costs rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

#: So many steps are remembered; nothing is called a spike before there are so many.
MEMORY, MIN_MEMORY = 64, 16
#: Standard deviations (of a normal distribution with this spread) above the median.
DEVIATIONS = 8.0
#: And at least so far above it: nats per token of the loss, and of the natural logarithm of the gradient norm (times ten).
LOSS_ABOVE, LOG_NORM_ABOVE = 1.0, math.log(10.0)
_MAD_TO_DEVIATION = 1.4826


def bound(recent: Sequence[float], at_least: float) -> float:
    """The largest value that is still ordinary after `recent`; infinite while there are too few to tell."""
    if len(recent) < MIN_MEMORY:
        return math.inf
    middle = median(recent)
    spread = _MAD_TO_DEVIATION * median(abs(value - middle) for value in recent)
    return middle + max(DEVIATIONS * spread, at_least)


def find_spike(loss: float, gradient_norm: float, losses: Sequence[float], log_norms: Sequence[float]) -> str | None:
    """In words, what is far above the recent values; None where all is ordinary. All values finite."""
    highest = bound(losses, LOSS_ABOVE)
    if loss > highest:
        return f"loss {loss:.4g} is far above the recent ones (median {median(losses):.4g}, bound {highest:.4g})"
    highest = bound(log_norms, LOG_NORM_ABOVE)
    if log_norm(gradient_norm) > highest:
        return (
            f"gradient norm {gradient_norm:.4g} is far above the recent ones (median {math.exp(median(log_norms)):.4g}, bound "
            f"{math.exp(highest):.4g})"
        )
    return None


def log_norm(gradient_norm: float) -> float:
    """Natural logarithm; a norm of 0 counts as the smallest there is."""
    return math.log(max(gradient_norm, 1e-30))


def remember(values: list[float], value: float) -> None:
    """Append, and forget what is too old."""
    values.append(value)
    del values[:-MEMORY]
