"""One verified checkpoint, read in whatever pieces the reader's own layout needs."""

from __future__ import annotations

import difflib
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fleetune.checkpoint.manifest import Manifest, StoredPiece, StoredTensor
from fleetune.checkpoint.pieces import Overlap, intersect, is_inside

if TYPE_CHECKING:
    import torch

#: Files kept mapped at once: a reader walks through tensors in the order they were written, mostly.
OPEN_FILES = 8


class Checkpoint:
    """A checkpoint whose manifest and hashes were found to hold; made by `CheckpointStore`. Each rank may have its own."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest
        self._tensors = {(tensor.name, tensor.role): tensor for tensor in manifest.tensors}
        self._open: OrderedDict[str, Any] = OrderedDict()

    @property
    def step(self) -> int:
        return self._manifest.step

    @property
    def best(self) -> bool:
        """Whether it was the best one when it was saved."""
        return self._manifest.best

    @property
    def world_size(self) -> int:
        """Ranks that wrote it; any number may read it."""
        return self._manifest.world_size

    @property
    def num_bytes(self) -> int:
        return self._manifest.num_bytes

    @property
    def state(self) -> dict[str, Any]:
        """What was saved beside the tensors: a JSON object, the caller's own copy."""
        return json.loads(json.dumps(self._manifest.state))

    @property
    def fingerprints(self) -> Mapping[str, Any]:
        return self._manifest.fingerprints

    def tensors(self) -> tuple[StoredTensor, ...]:
        """Every tensor it holds, with its role, global shape and dtype."""
        return self._manifest.tensors

    def read(self, name: str, role: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """The box at `offset` of `shape` (one number per dim) of a tensor, on the CPU, in the dtype it was saved in.

        Put together from the pieces of any layout; only their shared part is read. The result is new memory. Raises KeyError
        where there is no such tensor, ValueError where the box is not inside it.
        """
        import torch

        tensor = self._find(name, role)
        offset, shape = tuple(offset), tuple(shape)
        if not is_inside(tensor.global_shape, (offset, shape)):
            raise ValueError(
                f"tensor {name} ({role}) has shape {list(tensor.global_shape)}: the box at {list(offset)} of shape "
                f"{list(shape)} is not inside it"
            )
        result = torch.empty(shape, dtype=_torch_dtype(tensor.dtype))
        for piece in tensor.pieces:
            overlap = intersect((piece.offset, piece.shape), (offset, shape))
            if overlap is not None:
                target = result[tuple(slice(at, at + size) for at, size in zip(overlap.in_second, overlap.shape))]
                target.copy_(self._slice(piece, overlap))
        return result

    def close(self) -> None:
        """Unmap the files. Reading again maps them again."""
        self._open.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _find(self, name: str, role: str) -> StoredTensor:
        tensor = self._tensors.get((name, role))
        if tensor is not None:
            return tensor
        roles = sorted({known_role for known_name, known_role in self._tensors if known_name == name})
        if roles:
            raise KeyError(f"checkpoint {self.folder} has {name} with the roles {', '.join(roles)}, and not {role}")
        close = difflib.get_close_matches(name, {known_name for known_name, _ in self._tensors}, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise KeyError(f"checkpoint {self.folder} holds {len(self._tensors)} tensors, none named {name}{hint}")

    def _slice(self, piece: StoredPiece, overlap: Overlap) -> torch.Tensor:
        opened = self._file(piece.file)
        if not piece.shape:
            return opened.get_tensor(piece.key)
        return opened.get_slice(piece.key)[tuple(slice(at, at + size) for at, size in zip(overlap.in_first, overlap.shape))]

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        if name in self._open:
            self._open.move_to_end(name)
        else:
            self._open[name] = safe_open(str(self.folder / name), framework="pt")
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)
        return self._open[name]


def _torch_dtype(dtype: str) -> torch.dtype:
    import torch

    from fleetune.checkpoint.tensor_file import DTYPE_OF_TORCH

    return next(getattr(torch, name) for name, known in DTYPE_OF_TORCH.items() if known == dtype)
