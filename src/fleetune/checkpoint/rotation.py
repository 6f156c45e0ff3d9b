"""Which checkpoints go. Pure: the store reads and removes."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def surplus(verified: Mapping[int, bool], damaged: Collection[int], *, keep: int, saved: int) -> list[int]:
    """Steps of checkpoints to remove after the checkpoint of step `saved` was verified, the oldest first.

    verified: step -> whether it was the best when it was saved. Kept are the `keep` newest verified ones, the newest best
    one, and the one just saved. A damaged one counts for nothing: it keeps no good one from being kept, and goes when it
    is older than all the newest.
    """
    newest = sorted(verified, reverse=True)[:keep]
    best = [step for step in sorted(verified) if verified[step]][-1:]
    kept = {*newest, *best, saved}
    oldest = min(newest, default=saved)
    return sorted([step for step in verified if step not in kept] + [step for step in damaged if step < oldest])
