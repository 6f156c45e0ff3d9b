"""The plain types that cross rooms. No torch here: arrays and tensors are named in annotations only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

#: Version stamped into every JSON file of the run folder.
FORMAT_VERSION = 1


@dataclass(frozen=True)
class MicroBatch:
    """A run of consecutive sequences for one forward and backward on one data rank, without any padding.

    A sequence is one or more documents (packed examples); attention never crosses a document's bounds. Who runs the
    model chooses the layout (flat, or one padded row per document); the meaning is the same.

    step: the optimizer step it belongs to (0-based); -1 in evaluation.
    number: its number within the step, counted without knowing the world size.
    sequences: global sequence numbers, one per sequence (their count is the number of sequences B).
    tokens: int64 [T], all documents one after the other.
    trained: bool [T]; True where the token is a target. A document's first token is never a target.
    document_bounds: int64 [D + 1], offsets into `tokens`; document d is tokens[bounds[d]:bounds[d + 1]].
    sequence_bounds: int64 [B + 1], offsets into the list of documents.
    samples: D sample ids, `source:row[:repeat][#piece]`.

    An empty micro-batch (B = D = T = 0) has weight 0: a data rank with a smaller share runs it where the forward is
    collective.
    """

    step: int
    number: int
    sequences: tuple[int, ...]
    tokens: np.ndarray
    trained: np.ndarray
    document_bounds: np.ndarray
    sequence_bounds: np.ndarray
    samples: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_trained_tokens(self) -> int:
        return int(self.trained.sum())


@dataclass(frozen=True)
class StepBatch:
    """What one data rank runs in one optimizer step, with the ids of the whole step for the ledger.

    samples: sample ids of the whole global batch (all ranks), in order; the same on every rank.
    data_wait_s: seconds the loop waited for this batch.
    """

    step: int
    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[str, ...]
    next_sequence: int
    data_wait_s: float


@dataclass(frozen=True)
class StepReport:
    """What an engine says of one optimizer step; the same on every rank.

    loss: mean over all trained tokens of the global batch, before the update (nats per token).
    gradient_norm: L2 norm of the whole gradient before clipping.
    trained_tokens, tokens: counts over all ranks.
    applied: False where the update was not applied (a non-finite value, a loss-scale overflow).
    bytes_sent: bytes this rank gave to collectives in this step.
    overflow: not applied because an fp16 loss scale was too large, which the engine has lowered: nothing is wrong.
    culprits: where loss or gradient was not finite and it could be told: which rank, micro-batch and rows, a line each.
    """

    loss: float
    gradient_norm: float
    trained_tokens: int
    tokens: int
    applied: bool
    bytes_sent: int
    overflow: bool = False
    culprits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shard:
    """One piece of one named tensor of the training state.

    name: the parameter's name in the model, the same in every layout.
    role: `parameter`, or the optimizer's name of the state (`exp_avg`, `exp_avg_sq`, ...).
    global_shape: the shape of the whole tensor; offset: where this piece starts in it, one number per dim.
    tensor: the piece; contiguous, on any device.
    """

    name: str
    role: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor


#: read(name, role, offset, shape) -> tensor on the CPU; raises KeyError when the checkpoint has no such tensor.
ShardReader = Callable[[str, str, tuple[int, ...], tuple[int, ...]], Any]


@dataclass(frozen=True)
class Outcome:
    """How one rank of one attempt ended; written to the run folder, read by the supervisor.

    kind: `done`, `crash`, `user` (only the person can mend it) or `preempted` (saved, resume).
    cause: one line for a person. exit_code: 0, 1, 2 or 75.
    """

    kind: str
    cause: str
    exit_code: int
    rank: int
    node: int
    attempt: int
    step: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)
