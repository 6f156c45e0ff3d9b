"""Root-mean-square norms (Zhang and Sennrich 2019, arXiv 1910.07467) that keep their input and one number a row.

Families differ in where they round and in what the weight means; `FORMS` are the forms that are known, and
`fleetune.models.fast` finds out by trial which one a module has.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from fleetune.models.row_chunks import row_chunks

#: rounded: w * round(x / rms). offset: round((1 + w) * x / rms). exact: round(w * x / rms). Products in fp32 inside `round`.
Form = Literal["rounded", "offset", "exact"]
FORMS: tuple[Form, ...] = ("rounded", "offset", "exact")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: Form) -> torch.Tensor:
    """[..., H] -> [..., H], of the dtype that the family's own norm gives; rms = sqrt(mean(x^2) + epsilon) in fp32."""
    return _RmsNorm.apply(x, weight, epsilon, form)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: Form) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        narrow = form != "rounded"
        y = torch.empty_like(rows, dtype=x.dtype if narrow else torch.promote_types(x.dtype, weight.dtype))
        scale = torch.empty(len(rows), 1, dtype=torch.float32, device=x.device)
        factor = _factor(weight, form)
        for part in row_chunks(rows):
            wide = _private_fp32(rows[part])
            own = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
            scale[part] = own
            wide *= own
            if narrow:
                y[part] = wide.mul_(factor)
            else:
                torch.mul(wide.to(x.dtype), weight, out=y[part])
        ctx.save_for_backward(x, weight, scale)
        ctx.form = form
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        rows, d_rows = x.reshape(-1, x.shape[-1]), d_y.reshape(-1, x.shape[-1])
        d_x = torch.empty_like(rows) if needs_x else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device) if needs_weight else None
        factor = _factor(weight, ctx.form)
        for part in row_chunks(rows):
            normal = _private_fp32(rows[part]).mul_(scale[part])
            d_wide = _private_fp32(d_rows[part])
            if d_weight is not None:
                d_weight += (d_wide * normal).sum(0)
            if d_x is not None:
                d_wide *= factor
                mean = torch.linalg.vecdot(d_wide, normal)[:, None].div_(x.shape[-1])
                d_x[part] = d_wide.addcmul_(normal, mean, value=-1).mul_(scale[part])
        return (
            None if d_x is None else d_x.view(x.shape),
            None if d_weight is None else d_weight.to(weight.dtype),
            None,
            None,
        )


def _factor(weight: torch.Tensor, form: Form) -> torch.Tensor:
    """fp32 [H]: what the normalised rows are multiplied by."""
    return weight.float() + 1.0 if form == "offset" else weight.float()


def _private_fp32(x: torch.Tensor) -> torch.Tensor:
    """A copy in fp32 that may be written to."""
    return x.to(torch.float32, copy=True)
