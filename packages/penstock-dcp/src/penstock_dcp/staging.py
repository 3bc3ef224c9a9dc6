"""Copies a state for an asynchronous save into host memory, which is limited in size and reused by later saves.

    stage: tensors -> the arena, up to `staging_bytes` -> DCP's thread plans and writes, tensors that are live first
    synchronize_staging: waits for those; then training goes on while the arena is written

DCP searches only mappings and lists for tensors. Every other object is a value, which is copied too. A value or tensor
that cannot be stored is replaced by an object that raises the error during DCP's collective, so that every rank gets
the error. An error raised here on one rank would leave the other ranks waiting.
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
from penstock.errors import PeerLost, PlanError
from penstock_dcp.pickled import copy_of
from penstock_dcp.stored import has_own_storage, require_storable

_ALIGN = 64
_INNER = (Mapping, list, torch.Tensor)
"""Types that DCP looks for in a list. DCP treats a list without any of them as one value."""
_POLL_S = 0.01


class Staging(AsyncStager):
    """The stager for `CheckpointWriter`, which inherits from this class, so that DCP uses the writer as the stager.

    Args:
        staging_bytes: limit in bytes for the arena, or None for an arena that holds the whole state.
        stall_s: time limit in seconds for the save to begin.

    Attributes:
        written_live: event that is set after every tensor that was not copied has been written.
        has_live: whether the staged state contains tensors that were not copied.
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
        """Return whether training must wait until some tensors have been written."""
        return self.has_live

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Wait for the previous save, and return the state with copies of the tensors that fit in the arena."""
        # The previous save may still be reading the arena.
        self._wait(lambda: False)
        self._thread = None
        tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        uncopied: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if has_own_storage(tensor):
                return tensors.setdefault(_key(tensor), tensor)
            uncopied.append(tensor)
            return tensor

        # Copy values before tensors. Copying values takes longer, and other threads may change the state meanwhile.
        staged = _map(state_dict, note, "")
        needed = sum(_room(tensor) for tensor in tensors.values())
        size = needed if self._limit is None else min(needed, self._limit)
        if self._arena.numel() < size:
            # Free the old arena first, because two arenas could exceed the limit.
            self._arena = torch.empty(0, dtype=torch.uint8)
            self._arena = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        at = 0
        # Copy large tensors first, so that small tensors fill the remaining space.
        for key, tensor in sorted(tensors.items(), key=lambda pair: -pair[1].nbytes):
            if at + _room(tensor) > size:
                continue
            copy = self._arena[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key] = copy.copy_(tensor, non_blocking=True)
            at += _room(tensor)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self.written_live.clear()
        self.has_live = len(copies) < len(tensors) or bool(uncopied)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return copies.get(_key(tensor), tensor) if has_own_storage(tensor) else tensor

        result: dict[str, Any] = _map(staged, copied, "", is_staged=True)
        # Set this flag last. If the arena cannot be allocated, no save begins, and the next call must not wait.
        self._is_busy = True
        return result

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the arena."""
        return (
            has_own_storage(tensor) and tensor.untyped_storage().data_ptr() == self._arena.untyped_storage().data_ptr()
        )

    def synchronize_staging(self) -> None:
        """Wait until the save no longer reads the caller's memory. Return immediately if the save has failed."""
        self._wait(self.written_live.is_set)

    def begin(self, thread: threading.Thread) -> None:
        """Record the thread that runs the save."""
        self._thread = thread

    def release(self) -> None:
        """Record that the save no longer reads the state."""
        self._is_busy = False

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done` returns true or the staged save has ended. Raise PeerLost if the save does not begin."""
        begun = time.monotonic()
        while self._is_busy and not done():
            # DCP runs each save in a new thread, which also exits if the save fails before the first write.
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
    """Return a key that is equal for tensors with the same memory and view, so that tied weights are copied once."""
    views = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, views


class _Refusal:
    """A substitute for a value that cannot be stored, which raises the error when DCP writes the value."""

    def __init__(self, error: PlanError) -> None:
        self._error = error

    def __reduce_ex__(self, protocol: object) -> str:
        raise self._error


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor], name: str, *, is_staged: bool = False) -> Any:
    """Return a nested state in which `change` has replaced each tensor, and every other value is a copy.

    For a DTensor, `change` is applied to the local tensor.

    Args:
        value: a part of the state.
        change: function that returns the replacement for a tensor. Only storable tensors are passed to `change`.
        name: name of this part of the state, for error messages.
        is_staged: whether `value` was returned by this function, so that its values are already copies.
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
    # A tensor subclass with shards plans the writes of its shards itself.
    return change(value.detach() if has_own_storage(value) else value)


def _map_dtensor(value: DTensor, change: Callable[[torch.Tensor], torch.Tensor], name: str) -> DTensor:
    local = _map_tensor(value.to_local(), change, name)
    if not has_own_storage(local):
        return value
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
