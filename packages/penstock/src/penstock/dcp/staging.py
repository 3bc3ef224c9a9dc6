"""Copies of a state for an asynchronous save, in host memory of a bound that is kept between saves.

In: a state dict. Out: a state dict that training does not change, as far as the bound allows; what is beyond it is
written before `async_save` returns.
Not here: the writing (`writer`), what can be stored (`stored`, `pickled`).

DCP looks for tensors in mappings and lists of any class, and in nothing else. Everything else is a value, and values
are copied too. A value or tensor that cannot be stored is replaced by a refusal, which DCP's collective reports: an
error on one rank alone would leave the others waiting.

    stage: tensors -> the arena, up to `staging_bytes` -> DCP's thread plans and writes, tensors that are live first
    synchronize_staging: waits for those; then training goes on while the arena is written
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from penstock.config import parse_bytes
from penstock.dcp.pickled import copy_of
from penstock.dcp.stored import has_own_storage, require_storable
from penstock.errors import PeerLost, PlanError

_ALIGN = 64
_INNER = (Mapping, list, torch.Tensor)
"""What DCP looks at in a list. A list without them is one value."""
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
        uncopied: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if has_own_storage(tensor):
                return tensors.setdefault(_key(tensor), tensor)
            uncopied.append(tensor)
            return tensor

        # Values are copied here, before the tensors: that takes longer, and other threads may change both.
        staged = _map(state_dict, note, "")
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
        # Each device has its own queue of copies.
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self.written_live.clear()
        self.has_live = len(copies) < len(tensors) or bool(uncopied)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return copies.get(_key(tensor), tensor) if has_own_storage(tensor) else tensor

        result: dict[str, Any] = _map(staged, copied, "", is_staged=True)
        # Last: where there is no memory for the arena no save begins, and the next one has none to wait for.
        self._is_busy = True
        return result

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the arena."""
        return (
            has_own_storage(tensor) and tensor.untyped_storage().data_ptr() == self._arena.untyped_storage().data_ptr()
        )

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
    """Return the identity of a tensor's memory and of what it makes of it: tied weights are copied once."""
    views = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, views


class _Refusal:
    """A value of the state that cannot be stored; it raises its error when DCP writes it."""

    def __init__(self, error: PlanError) -> None:
        self._error = error

    def __reduce_ex__(self, protocol: object) -> str:
        raise self._error


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor], name: str, *, is_staged: bool = False) -> Any:
    """Return a nested state with its tensors changed, of a DTensor its local part, and its values copied.

    Args:
        value: a part of the state.
        change: returns another tensor for one that can be stored.
        name: of the part, for errors.
        is_staged: the state was made by this function; its values are copies already.
    """
    if isinstance(value, Mapping):
        return {key: _map(item, change, _name(name, key), is_staged=is_staged) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, _INNER) for item in value):
        return [_map(item, change, _name(name, number), is_staged=is_staged) for number, item in enumerate(value)]
    if is_staged and not isinstance(value, torch.Tensor):
        return value
    try:
        if isinstance(value, DTensor):
            return _map_dtensor(value, change, name)
        if isinstance(value, torch.Tensor):
            return _map_tensor(value, change, name)
        return copy_of(list(value) if isinstance(value, list) else value)
    except PlanError as error:
        error.tensor = name
        return _Refusal(error)


def _name(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _map_tensor(value: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], name: str) -> torch.Tensor:
    require_storable(value, name)
    # A class with shards of its own plans them itself.
    return change(value.detach() if has_own_storage(value) else value)


def _map_dtensor(value: DTensor, change: Callable[[torch.Tensor], torch.Tensor], name: str) -> DTensor:
    local = _map_tensor(value.to_local(), change, name)
    if not has_own_storage(local):
        return value
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
