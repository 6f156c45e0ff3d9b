"""A part of a model: some of its blocks on this rank, and forwards that run through those alone.

The family's own forward runs on every rank, so positions, masks and rotary frequencies are made there as in the whole
model. In front of every block stands a door: a block that lies elsewhere is passed by, the first block of a run is given
the hidden states that came from another rank, and behind its last block they are taken out again. Weights of blocks that
lie elsewhere are on the meta device, with their names and shapes; so are the embedding and the head where they are not
used. The few other weights outside the blocks (norms, learned positions) lie on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fleetune.models.probe import TOLERANCE, kind_of_block
from fleetune.spec.errors import UserError
from fleetune.spec.records import MicroBatch
from fleetune.spec.stages import Stage, runs_of_blocks

if TYPE_CHECKING:
    from fleetune.models.causal import CausalModel
    from fleetune.models.layout import LaidOut


class ModelPart:
    """The doors of one model. runs: the runs of blocks that lie here, in order."""

    def __init__(self, model: CausalModel, runs: tuple[range, ...]) -> None:
        self._model = model
        self.runs = runs
        self._num_blocks = model.anatomy.num_blocks
        self._laid_out: LaidOut | None = None
        self._window: Sequence[int] = range(self._num_blocks)
        self._entering: torch.Tensor | None = None
        self._leaving: torch.Tensor | None = None
        #: What a block of this family gives behind the hidden states: so many more values, or None for a bare tensor.
        self._more: int | None = None
        for index, name in enumerate(model.anatomy.block_names()):
            block = model.module.get_submodule(name)
            block.forward = _Door(self, index, block.forward)
        embedding = model.module.get_submodule(model.anatomy.embedding)
        embedding.forward = _Embedding(self, embedding)

    def run(
        self, laid_out: LaidOut, window: Sequence[int], entering: torch.Tensor | None, *, to_end: bool | None = None
    ) -> torch.Tensor:
        """Run the blocks in `window`, rising numbers. entering: [at least T, H] in front of its first block, None for the
        embedding's.

        Returns [T, H] behind its last block, in the order of the tokens; where it ends with the model's last block (or
        `to_end` is asked for), [N, H]: what the head is given at the positions that predict a trained token.
        """
        to_end = window[-1] == self._num_blocks - 1 if to_end is None else to_end
        self._laid_out, self._window, self._entering, self._leaving = laid_out, window, entering, None
        try:
            if to_end:
                return self._model.hidden(laid_out)
            self._model.states(laid_out, to_head=False)
            if self._leaving is None:
                raise ValueError(f"the forward of {type(self._model.module).__name__} left out block {window[-1]}")
            return _by_token(self._leaving, laid_out)
        finally:
            self._laid_out = self._entering = self._leaving = None
            self._window = range(self._num_blocks)

    def embedded(self, real: Callable[..., torch.Tensor], embedding: nn.Module, args: Any, kwargs: Any) -> torch.Tensor:
        """Token embeddings; zeros of their shape where a run begins behind them, since its door replaces what follows."""
        if self._entering is None:
            return real(*args, **kwargs)
        weight: Any = embedding.weight
        tokens = args[0] if args else kwargs["input"]
        return torch.zeros(*tokens.shape, weight.shape[1], dtype=weight.dtype, device=tokens.device)

    def passed(self, index: int, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a block gives, or what is given in its place."""
        states = args[0] if args else kwargs["hidden_states"]
        if index not in self._window:
            return states if self._more is None else (states, *(None for _ in range(self._more)))
        if index == self._window[0] and self._entering is not None:
            assert self._laid_out is not None
            states = _by_slot(self._entering, self._laid_out, states.shape)
            args, kwargs = ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})
        output = real(*args, **kwargs)
        self._more = len(output) - 1 if isinstance(output, tuple) else None
        if index == self._window[-1]:
            self._leaving = output[0] if isinstance(output, tuple) else output
        return output


class _Door:
    """Takes the place of a block's `forward`."""

    def __init__(self, part: ModelPart, index: int, real: Callable[..., Any]) -> None:
        self._part, self._index, self._real = part, index, real

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._part.passed(self._index, self._real, args, kwargs)


class _Embedding:
    """Takes the place of the token embedding's `forward`."""

    def __init__(self, part: ModelPart, module: nn.Module) -> None:
        self._part, self._module, self._real = part, module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._part.embedded(self._real, self._module, args, kwargs)


def keep_part(model: CausalModel, stage: Stage, *, device: torch.device, trainable: bool) -> None:
    """Let `model`, loaded with all weights mapped on the CPU, keep the weights of one stage only, on `device`.

    What is trained becomes a private copy; frozen weights stay mapped on a CPU. Raises UserError where the model has too
    few blocks, or hands more from block to block than hidden states.
    """
    runs = runs_of_blocks(model.anatomy.num_blocks, stage.num_runs)
    part = ModelPart(model, tuple(runs[number] for number in stage.own))
    _try_cuts(model, part, [run.start for run in runs[1:]])
    _let_go(model, part.runs, stage)
    _take(model.module, device, trainable=trainable)
    model.device = device
    model.part = part


def _try_cuts(model: CausalModel, part: ModelPart, cuts: Sequence[int]) -> None:
    """Run some of the blocks around each cut, of each kind, once as they are and once apart.

    The weights are still all there, mapped: what is read of them is read for a moment and belongs to no one.
    """
    kinds = [kind_of_block(model.module.get_submodule(name)) for name in model.anatomy.block_names()]
    # What lies around a cut: the last block of each kind before it, and the first of each kind behind it.
    before = [dict(zip(kinds[:cut], range(cut))) for cut in cuts]
    behind = [dict(reversed([*zip(kinds[cut:], range(cut, len(kinds)))])) for cut in cuts]
    alike = {(*one, None, *other, kinds[cut - 1], kinds[cut]): cut for one, other, cut in zip(before, behind, cuts)}
    laid_out = model.lay_out(_two_documents(model), torch.device("cpu"))
    training = model.module.training
    model.module.eval()
    try:
        with torch.no_grad():
            part.run(laid_out, range(1), None)  # shows what a block gives
            for cut in alike.values():
                first, second = (sorted(side[cuts.index(cut)].values()) for side in (before, behind))
                whole = part.run(laid_out, first + second, None, to_end=True)
                half = part.run(laid_out, first, None, to_end=False)
                apart = part.run(laid_out, second, half, to_end=True)
                off = float((whole.float() - apart.float()).abs().max())
                limit = TOLERANCE.get(whole.dtype, 1e-4) * float(whole.float().abs().max())
                if not off <= limit:
                    raise ValueError(f"cut before block {cut}, its hidden states are off by {off:.2g}")
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"{type(model.module).__name__} cannot be cut into stages: its blocks hand more to each other than hidden states "
            f"({_first_line(error)}). Give --pipeline 1, and more of --replicate or --shard"
        ) from error
    finally:
        model.module.train(training)


def _two_documents(model: CausalModel) -> MicroBatch:
    weight: Any = model.module.get_submodule(model.anatomy.embedding).weight
    size = int(weight.shape[0])
    tokens = 4 + (7 * np.arange(14)) % max(1, size - 4)
    trained = np.ones(14, dtype=bool)
    trained[[0, 5]] = False
    return MicroBatch(-1, -1, (0, 1), tokens % size, trained, np.array([0, 5, 14]), np.array([0, 1, 2]), ("", ""))


def _let_go(model: CausalModel, runs: tuple[range, ...], stage: Stage) -> None:
    """Put the weights of what lies elsewhere on the meta device. A weight that is tied to one that stays, stays."""
    anatomy, module = model.anatomy, model.module
    own = {index for run in runs for index in run}
    absent = [name for index, name in enumerate(anatomy.block_names()) if index not in own]
    absent += [] if stage.is_first else [anatomy.embedding]
    absent += [] if stage.is_last else [anatomy.head]
    lost = {id(owner) for name in absent for owner in module.get_submodule(name).modules()}
    kept = {id(p) for owner in module.modules() if id(owner) not in lost for p in owner._parameters.values()}
    _replace_parameters(
        module,
        lambda parameter: (
            parameter
            if id(parameter) in kept
            else nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        ),
    )


def _take(module: nn.Module, device: torch.device, *, trainable: bool) -> None:
    """Move what is held to the device; what is trained must not be pages of a file."""

    def taken(parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:
            return nn.Parameter(parameter, requires_grad=trainable)
        values = parameter.detach().to(device)
        if trainable and values.data_ptr() == parameter.data_ptr():
            values = values.clone()
        return nn.Parameter(values, requires_grad=trainable)

    _replace_parameters(module, taken)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.device != device:
                owner._buffers[name] = buffer.to(device)


def _replace_parameters(module: nn.Module, change: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Each parameter once: what is tied stays tied."""
    made: dict[int, nn.Parameter] = {}
    olds: list[nn.Parameter] = []  # kept alive meanwhile: an id may not be used twice
    for owner, name, parameter in list(_places(module)):
        olds.append(parameter)
        if id(parameter) not in made:
            made[id(parameter)] = change(parameter)
        owner._parameters[name] = made[id(parameter)]


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, parameter


def _by_slot(states: torch.Tensor, laid_out: LaidOut, shape: torch.Size) -> torch.Tensor:
    """[>= T, H] in the order of the tokens -> [R, C, H]; slots without a token get the states of one that has them."""
    if laid_out.token_of_slot is not None:
        return states.index_select(0, laid_out.token_of_slot).view(shape)
    tokens = states[: laid_out.num_tokens]
    more = shape[1] - laid_out.num_tokens
    return (torch.cat([tokens, tokens[-1:].expand(more, -1)]) if more else tokens).view(shape)


def _by_token(states: torch.Tensor, laid_out: LaidOut) -> torch.Tensor:
    """[R, C, H] -> [T, H]."""
    flat = states.flatten(0, 1)
    return flat[: laid_out.num_tokens] if laid_out.slot_of_token is None else flat.index_select(0, laid_out.slot_of_token)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
