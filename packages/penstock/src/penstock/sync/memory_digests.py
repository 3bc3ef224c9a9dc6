"""Digests of the memory of tensors, to verify that an engine restored the same bytes after sleeping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from penstock.holding.digester import digests_of
from penstock.holding.placement import place_rows
from penstock.sync.shards import Declarable, declared


class MemoryDigests:
    """The digests of all storages of some tensors.

    Attributes:
        digests: one digest for each storage, in the order of the tensors.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.numel() and tensor.layout is torch.strided]
        self.digests = self._now()

    @classmethod
    def of_target(cls, target: torch.nn.Module | Mapping[str, Declarable]) -> MemoryDigests:
        """Compute the digests of a subscriber's target."""
        if isinstance(target, torch.nn.Module):
            return cls(tensor for _, tensor in named_tensors(target))
        return cls(row.tensor for row in declared(target))

    def is_same(self) -> bool:
        """Return whether all bytes are unchanged."""
        return self.digests == self._now()

    def _now(self) -> list[int]:
        # Keep the digests in the order of the tensors, because an engine may restore bytes at different addresses.
        memories = [memory for memory in place_rows(self._tensors).regions if memory.nbytes]
        digests: list[int] = digests_of(memories).tolist()
        return digests


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Yield each parameter and buffer with its name, or with None if the state dict omits it."""
    for prefix, layer in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, tensor in layer._parameters.items():
            if tensor is not None:
                yield f"{dot}{name}", tensor
        for name, tensor in layer._buffers.items():
            if tensor is not None:
                yield (None if name in layer._non_persistent_buffers_set else f"{dot}{name}"), tensor
