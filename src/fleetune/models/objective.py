"""The loss: cross-entropy summed over trained tokens, with the head folded in so that the logits never all exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fleetune.models.head import Head

if TYPE_CHECKING:
    from fleetune.models.layout import LaidOut

#: Bytes of the fp32 logits of one chunk. On 2 cores the loss of SmolLM2-135M (V = 49,152) took the same time from 16 to
#: 128 MiB; more memory buys nothing.
_CHUNK_BYTES = 32 << 20


class TokenLoss:
    """Cross-entropy of the next token, in nats, summed (not averaged) over trained tokens.

    A mixture of experts' auxiliary loss is not part of it: the sum is over tokens, so that no split of a batch changes it.
    """

    def __call__(self, hidden: torch.Tensor, laid_out: LaidOut, head: Head) -> tuple[torch.Tensor, int]:
        """hidden: [N, H] of the positions that predict `laid_out.targets`. Returns (fp32 scalar sum, N).

        The sum carries a gradient to `hidden`, and to the head's weight and bias where they are trained. N = 0 gives
        zeros, with gradients of zero.
        """
        return token_loss(hidden, laid_out.targets, head), laid_out.weight


def token_loss(hidden: torch.Tensor, targets: torch.Tensor, head: Head) -> torch.Tensor:
    """Sum of -log p(target): hidden [N, H], targets int64 [N] -> fp32 scalar.

    In fp32 equal to `cross_entropy(head.logits(hidden), targets, reduction="sum")` up to rounding. In bf16 the products
    are made in bf16 and everything else in fp32; the gradient of the logits is rounded to bf16 once, as autograd would.
    """
    if not head.fused:
        return torch.nn.functional.cross_entropy(head.logits(hidden), targets, reduction="sum")
    return _HeadLoss.apply(hidden, head.weight, head.bias, targets, head)


class _HeadLoss(torch.autograd.Function):
    """Makes the gradients in the forward pass, chunk by chunk: one pass over the logits, none of them kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, head: Head
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        states = hidden.detach().to(head.dtype)
        product = weight.detach().to(head.dtype)
        offset = None if bias is None else bias.detach().to(head.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_states = torch.empty_like(states) if needs_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        d_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if needs_bias else None
        rows = max(1, _CHUNK_BYTES // (4 * weight.shape[0]))
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, states.shape[0], rows):
                chunk = states[start : start + rows]
                loss, d_logits = _chunk(
                    chunk, targets[start : start + rows], product, offset, head, any(ctx.needs_input_grad[:3])
                )
                total += loss
                if d_logits is None:
                    continue
                if d_bias is not None:
                    d_bias += d_logits.sum(0, dtype=torch.float32)
                d_logits = d_logits.to(head.dtype)
                if d_states is not None:
                    torch.mm(d_logits, product, out=d_states[start : start + rows])
                if d_weight is not None:
                    _add_product(d_weight, d_logits, chunk)
        ctx.save_for_backward(d_states, d_weight, d_bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, d_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        made = (
            None if gradient is None else (gradient * d_total.to(gradient.dtype)).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        )
        return (*made, None, None)


def _chunk(
    states: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    head: Head,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Loss of some rows (fp32 scalar), and the gradient of the products before scale and cap (fp32 [n, V])."""
    logits = torch.nn.functional.linear(states, weight, bias).float()
    if head.scale != 1.0:
        logits *= head.scale
    slope = None
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_()
        slope = 1 - logits * logits if with_gradient else None
        logits *= head.softcap
    wanted = targets[:, None]
    of_target = logits.gather(1, wanted)
    if not with_gradient:
        return (torch.logsumexp(logits, 1, keepdim=True) - of_target).sum(), None
    largest = logits.amax(1, keepdim=True)
    logits -= largest
    logits.exp_()
    summed = logits.sum(1, keepdim=True)
    loss = (summed.log() + largest - of_target).sum()
    logits /= summed
    logits.scatter_add_(1, wanted, torch.full_like(of_target, -1.0))
    if slope is not None:
        logits *= slope
    if head.scale != 1.0:
        logits *= head.scale
    return loss, logits


def _add_product(total: torch.Tensor, d_logits: torch.Tensor, states: torch.Tensor) -> None:
    """total (fp32 [V, H]) += d_logits.T @ states, summed over chunks in fp32 whatever the product's dtype."""
    if d_logits.dtype == torch.float32:
        total.addmm_(d_logits.t(), states)
    else:
        total += d_logits.t() @ states
