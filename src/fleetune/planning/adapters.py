"""How many parameters an adapter has, from the shapes of the linear layers that get one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from fleetune.spec.errors import raise_if_any
from fleetune.spec.model_shape import LinearShape, ModelShape


def find_targets(shape: ModelShape, targets: Sequence[str]) -> list[LinearShape]:
    """The linear layers that `targets` name (`q_proj`, or more of the path); all of the blocks' where nothing is named.

    Raises UserError with every target that names none.
    """
    if not targets:
        raise_if_any([_without_linears(shape)] if not shape.linears else [])
        return list(shape.linears)
    named = {target: [linear for linear in shape.linears if _ends(linear, target)] for target in targets}
    raise_if_any([_unmatched(shape, target) for target, found in named.items() if not found])
    return [linear for linear in shape.linears if any(_ends(linear, target) for target in targets)]


def may_name_experts(shape: ModelShape, targets: Sequence[str]) -> bool:
    """Whether some of `targets` name no linear layer but perhaps stacked experts, whose names only the model's class tells."""
    has_experts = any(".experts." in name for name in shape.tensors)
    return has_experts and any(not any(_ends(linear, target) for linear in shape.linears) for target in targets)


def adapter_shapes(linears: Sequence[LinearShape], *, adapter: str, rank: int) -> list[tuple[int, ...]]:
    """Shapes of an adapter's weights: A is [rank, in], B is [out, rank]; DoRA learns a norm for each output as well."""
    shapes: list[tuple[int, ...]] = []
    for linear in linears:
        shapes += [(rank, linear.num_in), (linear.num_out, rank)]
        shapes += [(linear.num_out,)] if adapter == "dora" else []
    return shapes


def _ends(linear: LinearShape, target: str) -> bool:
    return f".{linear.block}.{linear.name}".endswith(f".{target}")


def _without_linears(shape: ModelShape) -> str:
    return f"no linear layers were found in the blocks of this {shape.model_type} model: give --method full, or another model"


def _unmatched(shape: ModelShape, target: str) -> str:
    known = list(dict.fromkeys(linear.name.rpartition(".")[2] for linear in shape.linears))
    near = difflib.get_close_matches(target, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"lora_targets {target} names no linear layer of the model's blocks: {hint}Give some of {', '.join(known)}, or none"
