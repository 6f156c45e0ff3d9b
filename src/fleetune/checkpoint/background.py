"""Saving while training goes on: the loop waits only for a copy, a thread writes it with the store's own protocol.

At most one save is on its way. Whoever calls must begin, poll and wait on all ranks in the same order; the thread's own turns
are taken at the store's barrier, which must not be one that the loop uses too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, final

from fleetune.checkpoint.store import SaveReport
from fleetune.spec.records import Shard

if TYPE_CHECKING:
    import torch


class Store(Protocol):
    """What saves, as `CheckpointStore.save` does."""

    def save(self, step: int, shards: Iterable[Shard], state: Mapping[str, Any], *, best: bool = False) -> SaveReport: ...


@final
class Saver:
    """Saves the checkpoints of one run, in the background where `in_background` says so.

    first: called before anything is written, by the thread that writes; it may be set between saves. The copies' memory is
    kept for the next save: to take it anew costs more than the copy itself.
    """

    def __init__(self, store: Store, *, in_background: bool) -> None:
        self._store = store
        self.first: Callable[[], object] = lambda: None
        self.in_background = in_background
        self._thread: threading.Thread | None = None
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._stall_s = 0.0
        self._copies: dict[tuple[str, str, tuple[int, ...]], torch.Tensor] = {}

    @property
    def busy(self) -> bool:
        """Whether this rank still writes. Other ranks may be done earlier or later: ask them before `take`."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def in_flight(self) -> bool:
        """Whether a save was begun whose report nobody has taken."""
        return self._thread is not None

    def begin(self, step: int, shards: Iterable[Shard], state: Mapping[str, Any], *, best: bool = False) -> SaveReport | None:
        """Save the checkpoint of `step`. All ranks, when no save is in flight.

        In the background: returns None as soon as everything is copied, and `take` gives the report. Else returns the report.
        """
        if self.in_flight:
            raise RuntimeError("a save is still on its way: wait for it first")
        started = time.monotonic()
        if not self.in_background:
            self.first()
            report = self._store.save(step, shards, state, best=best)
            return replace(report, stall_s=time.monotonic() - started)
        copies = self._copied(shards)
        self._thread = threading.Thread(target=self._write, args=(step, copies, dict(state), best), name="save", daemon=True)
        self._thread.start()
        self._stall_s = time.monotonic() - started
        return None

    def take(self) -> SaveReport | None:
        """The report of the save in flight, waiting for it where it must; None where there is none. Raises what it raised.

        The wait counts into the report's `stall_s`.
        """
        if self._thread is None:
            return None
        began = time.monotonic()
        self._thread.join()
        waited_s = time.monotonic() - began
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        report, self._report = self._report, None
        assert report is not None
        return replace(report, stall_s=self._stall_s + waited_s)

    def _write(self, step: int, copies: list[Shard], state: dict[str, Any], best: bool) -> None:
        began = time.thread_time()
        try:
            self.first()
            report = self._store.save(step, copies, state, best=best)
            self._report = replace(report, cpu_s=time.thread_time() - began)
        except BaseException as error:  # told to the loop at its next step
            self._error = error

    def _copied(self, shards: Iterable[Shard]) -> list[Shard]:
        """The shards with their bits of now, in memory that training does not touch."""
        import torch

        made: list[Shard] = []
        on_gpu = False
        for shard in shards:
            key = (shard.name, shard.role, shard.offset)
            copy = self._copies.get(key)
            is_cuda = shard.tensor.is_cuda
            if copy is None or copy.shape != shard.tensor.shape or copy.dtype != shard.tensor.dtype:
                copy = torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype, device="cpu", pin_memory=is_cuda)
                self._copies[key] = copy
            copy.copy_(shard.tensor.detach(), non_blocking=is_cuda)
            on_gpu = on_gpu or is_cuda
            made.append(replace(shard, tensor=copy))
        if on_gpu:
            torch.cuda.synchronize()
        return made
