"""The checkpoints of one run: saving by all ranks, finding the newest that is whole, and letting old ones go.

A checkpoint is complete or does not exist. Saving, with every rank taking each turn at the same barriers:

1. rank 0 removes leftovers and makes `step-000100.tmp-<token>/`;
2. every rank writes its tensors there as safetensors files, hashes them while writing, syncs them, reads them back, and
   lists them;
3. rank 0 joins the lists, checks that they cover every tensor exactly once, writes the manifest, syncs, renames the folder
   to `step-000100`, syncs the parent, and only then removes what is older.

A failure of any rank removes the folder aside and is told on all ranks; it raises nothing, and older checkpoints stand.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.checkpoint.checkpoint import Checkpoint
from fleetune.checkpoint.disk import Disk, RealDisk, remove_tree
from fleetune.checkpoint.draft import (
    Draft,
    NotSaved,
    find_draft,
    gather,
    open_draft,
    publish,
    remove_checkpoint,
    remove_leftovers,
    same_content,
)
from fleetune.checkpoint.manifest import Manifest
from fleetune.checkpoint.part import FILE_BYTES, Part, PartFailure, failure_text, write_part
from fleetune.checkpoint.rotation import surplus
from fleetune.checkpoint.space import missing_text
from fleetune.checkpoint.verify import Candidate, Damaged, Refusal, candidates, folder_name, signature, verify
from fleetune.spec.records import Shard

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveReport:
    """How a save went, on every rank. bytes: of the whole checkpoint on rank 0, of the rank's own part on the others.

    error: why there is no new checkpoint, for a person; None where there is one. unchanged: the same was there already.
    seconds: from its begin to its end. stall_s: how long training waited for it. cpu_s: processor time of writing it in the
    background.
    """

    step: int
    bytes: int
    seconds: float
    error: str | None = None
    unchanged: bool = False
    stall_s: float = 0.0
    cpu_s: float = 0.0


class CheckpointStore:
    """The checkpoints in `folder`, which all ranks share.

    barrier: waits for all `world_size` ranks; called three times by every save. keep: newest checkpoints to keep, beside the
    best. fingerprints: a JSON object that is stored with each, to tell whether it belongs to this run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        barrier: Callable[[], None] = lambda: None,
        keep: int = 2,
        fingerprints: Mapping[str, Any] | None = None,
        disk: Disk | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.folder = Path(folder)
        #: What the last search refused, and why; the newest first.
        self.refused: list[Refusal] = []
        self._rank, self._world_size, self._barrier = rank, world_size, barrier
        self._keep = keep
        self._fingerprints = _as_json(fingerprints or {})
        self._disk = disk or RealDisk()
        self._file_bytes = file_bytes
        self._verified: dict[Path, tuple[object, Manifest]] = {}

    def save(self, step: int, shards: Iterable[Shard], state: Mapping[str, Any], *, best: bool = False) -> SaveReport:
        """Save the checkpoint of `step`. All ranks; each gives its own shards, rank 0's `state` (a JSON object) is kept.

        The pieces of all ranks must cover every tensor exactly once; their tensors must not change until this returns.
        What the disk does wrong comes back as `error`. Raises ValueError where `state` is no JSON, and what `shards` and
        the barrier raise.
        """
        started = time.monotonic()
        state = _as_json(state)
        draft, failure = self._begin(step, state, best)
        self._barrier()
        if self._rank:
            draft = find_draft(self.folder, step)
        part = self._write(draft, shards)
        identity = _identity(draft)
        self._barrier()
        if self._rank == 0:
            num_bytes, failure = (0, failure) if draft is None else self._end(draft, part, state, best)
        else:
            num_bytes = sum(file.num_bytes for file in part.files.values()) if isinstance(part, Part) else 0
        self._barrier()
        if self._rank:
            failure = self._outcome(draft, part, identity)
        if failure is not None:
            _log.warning("checkpoint of step %d was not saved: %s", step, failure)
            return SaveReport(step, 0, time.monotonic() - started, failure)
        return SaveReport(step, num_bytes, time.monotonic() - started, None, draft is not None and draft.unchanged)

    def latest(self) -> Checkpoint | None:
        """The checkpoint of the highest step whose manifest and hashes hold; None where there is none.

        Any rank, and ranks need not agree to call it. What is damaged is passed over and listed in `refused`.
        """
        self.refused = []
        for candidate in candidates(self.folder):
            manifest = self._check(candidate)
            if manifest is not None:
                return Checkpoint(candidate.folder, manifest)
        return None

    def at(self, step: int) -> Checkpoint | None:
        """The checkpoint of one step, or None where there is none that holds (`refused` says why)."""
        self.refused = []
        for candidate in candidates(self.folder):
            if candidate.step == step and (manifest := self._check(candidate)) is not None:
                return Checkpoint(candidate.folder, manifest)
        return None

    def best(self) -> Checkpoint | None:
        """The newest verified checkpoint that was the best when it was saved; None where none was marked."""
        self.refused = []
        for candidate in candidates(self.folder):
            manifest = self._check(candidate)
            if manifest is not None and manifest.best:
                return Checkpoint(candidate.folder, manifest)
        return None

    def all_steps(self) -> list[int]:
        """Steps of all checkpoints that hold, the lowest first."""
        self.refused = []
        return sorted({candidate.step for candidate in candidates(self.folder) if self._check(candidate) is not None})

    def mismatches(self, checkpoint: Checkpoint) -> list[str]:
        """What differs between this run's fingerprints and those of a checkpoint, naming both values."""
        theirs = checkpoint.fingerprints
        return [
            f"{name} is {self._fingerprints.get(name)!r} in this run and {theirs.get(name)!r} in {checkpoint.folder}"
            for name in sorted({*self._fingerprints, *theirs})
            if self._fingerprints.get(name) != theirs.get(name)
        ]

    def _begin(self, step: int, state: dict[str, Any], best: bool) -> tuple[Draft | None, str | None]:
        """Rank 0: the folder aside, or why there is none."""
        if self._rank:
            return None, None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._restore_set_aside()
            remove_leftovers(self._disk, self.folder, step)
            known = self._check(Candidate(step, self.folder / folder_name(step), False))
            unchanged = known is not None and same_content(known, state, self._fingerprints, best=best)
            return open_draft(self._disk, self.folder, step, unchanged=unchanged), None
        except OSError as error:
            free = self._free_bytes()
            text = missing_text(error.errno, needed_bytes=0, free_bytes=free, folder=self.folder)
            return None, f"rank 0 could not begin in {self.folder}: {failure_text(error)}{text}"

    def _write(self, draft: Draft | None, shards: Iterable[Shard]) -> Part | PartFailure | None:
        """Every rank: its part. The shards are run to their end in any case: making them may be a collective."""
        if draft is None or draft.unchanged:
            for _ in shards:
                pass
            return None
        return write_part(self._disk, draft.folder, self._rank, shards, file_bytes=self._file_bytes)

    def _end(self, draft: Draft, own: Part | PartFailure | None, state: dict[str, Any], best: bool) -> tuple[int, str | None]:
        """Rank 0: publish the draft and let older ones go, or remove it. Returns (bytes, why it failed)."""
        if own is None:  # it was there already
            self._abort(draft)
            return self._verified[draft.final][1].num_bytes, None
        needed_bytes = 0
        try:
            files, tensors = gather(draft, own, self._world_size)
            needed_bytes = sum(file.num_bytes for file in files.values())
            manifest = Manifest(draft.step, best, self._world_size, files, tensors, state, self._fingerprints)
            is_durable = publish(self._disk, draft, manifest)
        except NotSaved as error:
            cause, code, needed_bytes = str(error), error.code, error.needed_bytes
        except (OSError, ValueError) as error:
            cause, code = f"rank 0 could not complete it: {failure_text(error)}", getattr(error, "errno", None)
        else:
            self._remember(draft.final, manifest)
            if is_durable:
                self._rotate(draft.step)
            return manifest.num_bytes, None
        self._abort(draft)
        free = self._free_bytes()
        return 0, cause + missing_text(code, needed_bytes=needed_bytes, free_bytes=free, folder=self.folder)

    def _outcome(self, draft: Draft | None, part: Part | PartFailure | None, identity: object) -> str | None:
        """The other ranks, after the last barrier: why there is no checkpoint, None where there is one."""
        if isinstance(part, PartFailure):
            return part.cause
        if draft is None:
            return (
                f"rank {self._rank} sees no folder of rank 0's in {self.folder}: rank 0 could not make it (its log says why), "
                "or the nodes do not share this folder"
            )
        if draft.unchanged:
            return None
        if identity is None or _identity(Draft(draft.final, draft.step)) != identity:
            return "rank 0 gave the save up: its log and events.jsonl name the cause"
        try:
            self._remember(draft.final, verify(Candidate(draft.step, draft.final, False), hashes=False))
        except (Damaged, OSError) as error:
            return f"rank {self._rank} cannot read the new checkpoint: {error}"
        return None

    def _check(self, candidate: Candidate) -> Manifest | None:
        """The manifest where the folder holds, else None with the refusal noted. What did not change is not read again."""
        known = self._verified.pop(candidate.folder, None)
        try:
            if known is not None and _untouched(candidate.folder, known):
                self._verified[candidate.folder] = known
                return known[1]
            manifest = verify(candidate)
            self._remember(candidate.folder, manifest)
            return manifest
        except Damaged as damage:
            refusal = Refusal(candidate.step, candidate.folder, damage.file, damage.cause)
        except FileNotFoundError:
            return None  # removed meanwhile, by the rotation of the process that trains
        except OSError as error:
            refusal = Refusal(candidate.step, candidate.folder, candidate.folder.name, failure_text(error))
        self.refused.append(refusal)
        _log.warning("%s", refusal)
        return None

    def _remember(self, folder: Path, manifest: Manifest) -> None:
        self._verified[folder] = (signature(folder, manifest.files), manifest)

    def _restore_set_aside(self) -> None:
        """After a crash while a checkpoint was replaced: the old one gets its name back, or goes where the new one holds."""
        for candidate in candidates(self.folder):
            if not candidate.set_aside:
                continue
            final = Candidate(candidate.step, self.folder / folder_name(candidate.step), False)
            if not os.path.lexists(final.folder):
                self._disk.rename(candidate.folder, final.folder)
                self._disk.sync_folder(self.folder)
            elif self._check(final) is not None:
                remove_checkpoint(self._disk, candidate.folder)

    def _rotate(self, saved: int) -> None:
        """Remove what is surplus. A failure is only told: the new checkpoint is safe."""
        self.refused = []
        found = {candidate.step: candidate for candidate in candidates(self.folder) if not candidate.set_aside}
        checked = {step: self._check(candidate) for step, candidate in found.items()}
        verified = {step: manifest.best for step, manifest in checked.items() if manifest is not None}
        for step in surplus(verified, found.keys() - verified.keys(), keep=self._keep, saved=saved):
            try:
                remove_checkpoint(self._disk, found[step].folder)
                self._verified.pop(found[step].folder, None)
            except OSError as error:
                _log.warning("the old checkpoint %s could not be removed: %s", found[step].folder, error)

    def _abort(self, draft: Draft) -> None:
        try:
            remove_tree(self._disk, draft.folder)
        except OSError as error:
            _log.warning("%s could not be removed, the next save will try again: %s", draft.folder, error)

    def _free_bytes(self) -> int:
        try:
            return self._disk.free_bytes(self.folder)
        except OSError:
            return 0


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value as a reader will see it. Raises ValueError where it is no JSON, a NaN or an infinity among it."""
    try:
        return json.loads(json.dumps(dict(value), allow_nan=False))
    except TypeError as error:
        raise ValueError(f"the state of a checkpoint must be JSON: {error}") from None


def _untouched(folder: Path, known: tuple[object, Manifest]) -> bool:
    try:
        return signature(folder, known[1].files) == known[0]
    except OSError:
        return False


def _identity(draft: Draft | None) -> object:
    """Tells a folder from another of the same name; a rename keeps it."""
    if draft is None:
        return None
    try:
        status = os.stat(draft.folder, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino
