"""Hashes of the bits of many tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

#: Numbers that are added up, as integers, before they are hashed. A flipped bit always changes such a sum.
_BLOCK = 4096


def fingerprint_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """blake2b of names, shapes and all bits. tensors: (name, whole tensor on the CPU), in the same order everywhere."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def bits_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """blake2b of names, shapes and sums of the bits, block by block. tensors: (name, tensor of any dtype).

    Taken where they lie: of what is on a GPU only a thousandth comes to the host.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_sums(tensor.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [blocks and the rest]: sums of the tensor's bits read as whole numbers of 4 bytes, or of 1 where they must be."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0:
        flat = flat.view(torch.int32)
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks = flat[:whole].view(-1, _BLOCK).sum(dim=1, dtype=torch.int64)
    return torch.cat([blocks, flat[whole:].sum(dtype=torch.int64).reshape(1)])
