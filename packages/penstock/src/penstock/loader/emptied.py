"""The verb `empty_module`: give a module's memory back before a snapshot of the process, and fill it again afterwards.

In: a module on the CPU. Out: an `Emptied`; the module refuses each use until `refill` has put the same bytes back, at
the same addresses.
Not here: the snapshot itself (CRIU, or a fork); weights of an engine that sleeps (`sync.receive.released`).

    empty_module: digest, give the pages back --> snapshot, restore --> refill: load, compare, put the parameters back

An image of the process is smaller by the weights, and restores sooner. The addresses stay valid, so whatever refers to
the parameters (optimizers, compiled code) does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.arguments import require_type
from penstock.digest.leaf import LEAF_BYTES, leaf_digests
from penstock.errors import ConfigError, IntegrityError
from penstock.loader.into import device_of, load_into, members_in, own_state, put_back, targets_of
from penstock.loader.match import place_of
from penstock.loader.pending import LazyParameter
from penstock.loader.report import LoadReport
from penstock.memory.pages import give_back
from penstock.storage.weight_set import Uris
from penstock.types import U64

Refill = Callable[[dict[str, torch.Tensor]], object]
"""Fills tensors by name in place: from a keeper, or `Fleet.fetch`."""

_LISTED = 5


class Emptied:
    """A module whose weights were given back. Made by `empty_module`.

    Attributes:
        module: the module; each use of its parameters raises ConfigError until `refill` has succeeded.
        freed_bytes: bytes of memory that were given back.
        kept_bytes: bytes that could not be: shared memory, tensors with strides, parts of pages at the ends of others.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        # Whole: digests of a module that was emptied already would be those of nothing.
        state = own_state(module, whole=True)
        # Tied tensors are one memory under several names.
        self._tensors = {place_of(tensor): (name, tensor) for name, tensor in state.items() if tensor.numel()}
        self._digests = {name: _leaves(tensor) for name, tensor in self._tensors.values()}
        for tensor, places in members_in(module, state, "empty_module").values():
            pending = LazyParameter.of(tensor, self._refuse, lambda: True)
            for members, name in places:
                members[name] = pending
        self.freed_bytes = sum(_give_back(tensor) for _, tensor in self._tensors.values())
        self.kept_bytes = sum(tensor.nbytes for _, tensor in self._tensors.values()) - self.freed_bytes

    def refill(self, source: Uris | Refill, **options: Any) -> LoadReport | None:
        """Put the weights back at their addresses, and let the module be used again.

        Args:
            source: a weight set as `load` takes it, or a function that fills tensors by name in place.
            options: of `load_into`, for a weight set.

        Returns:
            The report of the load; None for a function.

        Raises:
            IntegrityError: the bytes are not those that were given back. The module stays unusable; refill it again.
            PenstockError: as `load_into`, or what the function raises; the same.
        """
        targets = targets_of(self.module)
        report = None
        if callable(source):
            source(targets)
        else:
            report = load_into(targets, source, **options)
        found = {name: _leaves(tensor) for name, tensor in self._tensors.values()}
        wrong = [name for name, leaves in self._digests.items() if not np.array_equal(leaves, found[name])]
        if wrong:
            more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
            raise IntegrityError(
                f"{len(wrong)} tensors are not what they were: {', '.join(wrong[:_LISTED])}{more}",
                mutated=True,
                hint="refill it from the weights that it had",
            )
        put_back(self.module)
        return report

    def _refuse(self) -> None:
        raise ConfigError("the weights of this module were given back for a snapshot", hint="call Emptied.refill first")


def empty_module(module: torch.nn.Module) -> Emptied:
    """Give the memory of a module's weights back, before a snapshot of this process is taken.

    Args:
        module: on the CPU; its parameters and persistent buffers are digested, then their pages are given back. Their
            addresses stay. Buffers that are not persistent keep their values: no checkpoint has them.

    Raises:
        ConfigError: the module is on a GPU, is being loaded, or was emptied already. PlanError: it is on several
            devices. PenstockError: a load into it failed.
    """
    require_type("the module", module, torch.nn.Module, "a torch.nn.Module")
    device = device_of(targets_of(module, written=True))
    if device.type != "cpu":
        hint = "memory of a GPU is moved to the host by cuda-checkpoint, with the weights in it"
        raise ConfigError(f"only weights in host memory can be given back, not on {device}", hint=hint)
    return Emptied(module)


def _leaves(tensor: torch.Tensor) -> U64:
    """Return the digests of a tensor's bytes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    digests = np.empty(-(-flat.nbytes // LEAF_BYTES), np.uint64)
    leaf_digests(flat.data, LEAF_BYTES, digests)
    return digests


def _give_back(tensor: torch.Tensor) -> int:
    """Give back the pages that lie wholly in a tensor's memory; return their bytes."""
    return give_back(tensor.data_ptr(), tensor.nbytes) if tensor.is_contiguous() else 0
