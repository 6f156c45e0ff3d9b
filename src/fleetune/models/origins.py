"""Where the values of a model's parameters lie in its files, so that any piece of any of them can be read alone.

Most lie whole under one name. Experts, which a model has as one stacked parameter, are often stored one by one, and the two
matrices that a model joins (gate and up) each for itself; transformers says of its families how.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fleetune.models.stored import StoredWeights, naming
from fleetune.spec.errors import UserError


@dataclass(frozen=True)
class Origin:
    """parts: stored names, `parts[p][e]` is part p of expert e; parts follow each other along an expert's first dim. One
    name alone is a tensor that is stored whole."""

    parts: tuple[tuple[str, ...], ...]
    is_whole: bool

    def shape(self, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Of the parameter, from the shapes of what is stored."""
        if self.is_whole:
            return shapes[self.parts[0][0]]
        first = [shapes[part[0]] for part in self.parts]
        return (len(self.parts[0]), sum(shape[0] for shape in first), *first[0][1:])


def find_origins(module: nn.Module, stored: StoredWeights) -> tuple[dict[str, Origin], list[str]]:
    """({name in the model: origin}, stored names that the model does not know).

    Raises UserError for weights that transformers puts together in another way: their pieces cannot be read alone.
    """
    name_of = naming(module)
    state = module.state_dict(keep_vars=True)
    found: dict[str, Origin] = {}
    unknown: list[str] = []
    split: dict[str, dict[tuple[int, int], str]] = {}
    patterns: list[tuple[re.Pattern[str], int]] | None = None
    for stored_name in stored.files:
        name, converts = name_of(stored_name)
        if name not in state:
            unknown.append(stored_name)
        elif not converts:
            found[name] = Origin(((stored_name,),), True)
        else:
            patterns = _experts_one_by_one(module) if patterns is None else patterns
            places = [(part, match) for pattern, part in patterns if (match := pattern.search(stored_name))]
            if not places:
                raise UserError(
                    f"{stored.folder} stores {stored_name} in a way that only a whole model can be made of: give --shard 1 and "
                    "--tensor 1, or load it with transformers once, save it with save_pretrained, and give that folder"
                )
            part, match = places[0]
            split.setdefault(name, {})[part, int(match[1])] = stored_name
    for name, pieces in split.items():
        parts, experts = 1 + max(part for part, _ in pieces), 1 + max(expert for _, expert in pieces)
        if len(pieces) == parts * experts:  # else it counts as missing
            rows = tuple(tuple(pieces[part, expert] for expert in range(experts)) for part in range(parts))
            found[name] = Origin(rows, False)
    return found, unknown


def _experts_one_by_one(module: nn.Module) -> list[tuple[re.Pattern[str], int]]:
    """(pattern of a stored name whose one group is the expert's number, which part it is), of what can be read in pieces."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    found = []
    for entry in get_model_conversion_mapping(module):
        if isinstance(entry, WeightConverter) and [(type(o).__name__, o.dim) for o in entry.operations] in (
            [("MergeModulelist", 0)],
            [("MergeModulelist", 0), ("Concatenate", 1)],
        ):
            for part, pattern in enumerate(entry.source_patterns):
                if pattern.count("*") == 1:
                    found.append((re.compile(re.escape(pattern).replace(r"\*", r"(\d+)") + "$"), part))
    return found


class PieceReader:
    """Reads any piece of any parameter; keeps the files open while it lives."""

    def __init__(self, stored: StoredWeights, origins: dict[str, Origin]) -> None:
        self._files, self._origins = stored.files, origins
        self._handles: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._origins

    def read(self, name: str, at: tuple[slice, ...]) -> torch.Tensor:
        """On the CPU, in the dtype of the file; memory of its own. at: one slice with both ends for each dim."""
        origin = self._origins[name]
        if origin.is_whole:
            return self._slice(origin.parts[0][0], at)
        experts = [torch.cat(list(self._rows(origin, expert, at[1], at[2:]))) for expert in range(at[0].start, at[0].stop)]
        return torch.stack(experts)

    def _rows(self, origin: Origin, expert: int, rows: slice, rest: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        start = 0
        for part in origin.parts:
            size = self._shape(part[expert])[0]
            first, last = max(rows.start - start, 0), min(rows.stop - start, size)
            if first < last:
                yield self._slice(part[expert], (slice(first, last), *rest))
            start += size

    def _slice(self, stored: str, at: tuple[slice, ...]) -> torch.Tensor:
        piece: torch.Tensor = self._handle(stored).get_slice(stored)[at]
        return piece

    def _shape(self, stored: str) -> tuple[int, ...]:
        return tuple(self._handle(stored).get_slice(stored).get_shape())

    def _handle(self, stored: str) -> Any:
        from safetensors import safe_open

        path = self._files[stored]
        if path not in self._handles:
            self._handles[path] = safe_open(path, framework="pt")
        return self._handles[path]
