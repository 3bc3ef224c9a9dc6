"""Copies of a state for an asynchronous save, in host memory of a bound that is kept between saves.

In: a state dict. Out: a state dict that training does not change, as far as the bound allows; what is beyond it is
written before `async_save` returns.
Not here: the writing (`writer`).

    stage: tensors -> the arena, up to `staging_bytes` -> DCP's thread plans and writes, tensors that are live first
    synchronize_staging: waits for those; then training goes on while the arena is written
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from penstock.config import parse_bytes
from penstock.errors import PeerLost

_ALIGN = 64
_POLL_S = 0.01


class Staging(AsyncStager):
    """The stager of a writer: DCP asks a writer that is one.

    Args:
        staging_bytes: size of the arena; None: what the first state needs.
        stall_s: deadline for the save to begin.

    Attributes:
        written_live: set once everything that is no copy was written.
        has_live: whether the state has tensors that are no copies.
    """

    def __init__(self, staging_bytes: int | str | None, stall_s: float) -> None:
        self._limit = None if staging_bytes is None else parse_bytes(staging_bytes)
        self._stall_s = stall_s
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self.written_live = threading.Event()
        self.has_live = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Return whether a part of the state must be written before training goes on."""
        return self.has_live

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state with its tensors copied, as far as the arena has room. Waits for the save before."""
        # The arena is still read by it.
        self._wait(lambda: False)
        self._thread = None
        tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        _map(state_dict, lambda tensor: tensors.setdefault(_key(tensor), tensor))
        needed = sum(_room(tensor) for tensor in tensors.values())
        size = needed if self._limit is None else min(needed, self._limit)
        if self._arena.numel() < size:
            # Dropped first: two of them would be twice the bound.
            self._arena = torch.empty(0, dtype=torch.uint8)
            self._arena = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        at = 0
        # Large ones first: small ones then fill what is left.
        for key, tensor in sorted(tensors.items(), key=lambda pair: -pair[1].nbytes):
            if at + _room(tensor) > size:
                continue
            copy = self._arena[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key] = copy.copy_(tensor, non_blocking=True)
            at += _room(tensor)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.written_live.clear()
        self.has_live = len(copies) < len(tensors)
        staged: dict[str, Any] = _map(state_dict, lambda tensor: copies.get(_key(tensor), tensor))
        # Last: where there is no memory for the arena no save begins, and the next one has none to wait for.
        self._is_busy = True
        return staged

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the arena."""
        return tensor.untyped_storage().data_ptr() == self._arena.untyped_storage().data_ptr()

    def synchronize_staging(self) -> None:
        """Return once nothing of the caller's own memory is read any more; at once where the save has failed."""
        self._wait(self.written_live.is_set)

    def begin(self, thread: threading.Thread) -> None:
        """Note the thread that saves."""
        self._thread = thread

    def release(self) -> None:
        """Note that the state is not read any more."""
        self._is_busy = False

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done`, or the save that was staged has ended. PeerLost: it does not begin."""
        begun = time.monotonic()
        while self._is_busy and not done():
            # DCP runs each save on a thread of its own, which ends with it, also where it fails before it writes.
            if self._thread is not None and not self._thread.is_alive():
                return
            if self._thread is None and time.monotonic() - begun > self._stall_s:
                raise PeerLost(f"the save did not begin within {self._stall_s} s")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Free the arena."""
        self._wait(lambda: False)
        self._arena = torch.empty(0, dtype=torch.uint8)


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN) * _ALIGN


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the identity of a tensor's memory: tied weights are copied once."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a nested state with its tensors changed; of a DTensor, its local part."""
    if isinstance(value, DTensor):
        local = change(value.to_local().detach())
        return DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    if isinstance(value, torch.Tensor):
        return change(value.detach())
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in {list, tuple}:
        return type(value)(_map(item, change) for item in value)
    return value
