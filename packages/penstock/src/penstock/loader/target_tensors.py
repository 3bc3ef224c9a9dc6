"""The tensors of a load's target: a module's parameters and buffers, or a mapping of tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from penstock.arguments import require_type
from penstock.errors import PlanError
from penstock.loader.pending import own_tensor, own_tensors
from penstock.memory.targets import require_initialised

if TYPE_CHECKING:
    from penstock.loader.match import Matched

Place = tuple[dict[str, torch.Tensor | None], str]
"""The place of a tensor in a module, as its dict of parameters or buffers and its name in that dict."""

Member = tuple[torch.Tensor, list[Place]]
"""A module's parameter or buffer, and its places."""


def targets_of(
    target: torch.nn.Module | Mapping[str, torch.Tensor], *, whole: bool = False, written: bool = False
) -> dict[str, torch.Tensor]:
    """Return a module's parameters and persistent buffers, or tensors by name, detached but with the same memory.

    If `written` is set, the caller writes to the memory, so raise PlanError if the state dict contains copies. Also
    raise PlanError for an uninitialised parameter, and ConfigError for a wrong type or during a load. See `own_state`.
    """
    if isinstance(target, torch.nn.Module):
        tensors: Mapping[str, torch.Tensor] = own_state(target, whole=whole)
        if written:
            require_no_copies(target, tensors)
    else:
        require_tensors("the target", target)
        tensors = target
    for name, tensor in tensors.items():
        # Torch cannot detach a parameter without a shape.
        require_initialised(name, tensor)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def own_state(module: torch.nn.Module, *, whole: bool = False) -> dict[str, torch.Tensor]:
    """Return a module's parameters and persistent buffers, after the last write of any failed load.

    If `whole` is set, the caller reads the values, so raise a failed load's error. Raise ConfigError during a load.
    """
    # Use the state dict, because it excludes non-persistent buffers.
    with own_tensors(whole):
        state = module.state_dict(keep_vars=True)
    return {
        name: own_tensor(value, whole=whole)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != _EXTRA_STATE_KEY_SUFFIX
    }


def require_no_copies(module: torch.nn.Module, written: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanError if a state dict hook or override returns copies of tensors that will be written."""
    others = {name: tensor for name, tensor in written.items() if not isinstance(tensor, torch.nn.Parameter)}
    if not others:
        return
    own = [own_tensor(tensor) for tensor in chain(module.parameters(), module.buffers())]
    ids = {id(tensor) for tensor in own}
    others = {name: tensor for name, tensor in others.items() if id(tensor) not in ids and tensor.numel()}
    memories = {memory_of(tensor) for tensor in own} if others else set()
    others = {name: tensor for name, tensor in others.items() if memory_of(tensor) not in memories}
    again = own_state(module) if others else {}
    for name, tensor in others.items():
        # `written` keeps the first copy alive, so a second copy has a different address.
        if name not in again or memory_of(again[name]) != memory_of(tensor):
            why = "the module's state dict returns a copy of it, so bytes written there would not reach the module"
            raise PlanError(why, tensor=name, hint="call load, and pass its tensors to module.load_state_dict")


def filled_of(targets: Mapping[str, torch.Tensor], matched: Matched) -> dict[str, torch.Tensor]:
    """Return the targets that a load fills."""
    memories = {memory_of(tensor) for tensor in matched.lines().tensors}
    return {name: tensor for name, tensor in targets.items() if memory_of(tensor) in memories}


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor or of a DTensor's shard. Return 0 if there is no storage."""
    try:
        return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()
    except (RuntimeError, ValueError):
        return 0


def members_in(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], verb: str) -> dict[int, Member]:
    """Return the parameters and buffers that use the memory of these tensors, with their places, keyed by id.

    Pending tensors from a failed load count as the module's tensors. Raise PlanError if no parameter or buffer uses a
    tensor's memory.
    """
    memories = {memory_of(tensor): name for name, tensor in tensors.items() if tensor.numel()}
    members: dict[int, Member] = {}
    for places in places_of(module).values():
        own = own_tensor(places[0][0][places[0][1]])  # type: ignore[arg-type]
        if own.numel() and memory_of(own) in memories:
            members.setdefault(id(own), (own, []))[1].extend(places)
    found = {memory_of(own) for own, _ in members.values()}
    for memory, name in memories.items():
        if memory not in found:
            why = f"it is not a parameter or buffer of the module, so {verb} cannot prevent its use during the load"
            raise PlanError(why, tensor=name, hint="register it as a buffer, or use load_into")
    return members


def put_back(module: torch.nn.Module) -> None:
    """Restore a module's tensors where a failed load left pending tensors."""
    for members, name in chain.from_iterable(places_of(module).values()):
        members[name] = own_tensor(members[name])  # type: ignore[arg-type]


def device_of(targets: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the device of all targets. Raise PlanError if they are on several devices or on the meta device."""
    if not targets:
        hint = "pass a module that has tensors, or an empty dict to receive new tensors"
        raise PlanError("the target has no tensors to fill", hint=hint)
    devices = {tensor.device for tensor in targets.values() if tensor.numel()}
    if any(device.type == "meta" for device in devices):
        raise PlanError(
            "some targets are on the meta device", hint="first allocate them with module.to_empty(device=...)"
        )
    # A load uses one device for staging, streams and the checker. An empty target may be on any device.
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    if devices:
        raise PlanError("the targets are on several devices", hint="call load_into for each device")
    return device


def places_of(module: torch.nn.Module) -> dict[int, list[Place]]:
    """Return the places of each parameter and buffer, keyed by id. A tied tensor has several places."""
    places: dict[int, list[Place]] = {}
    for submodule in module.modules():
        for members in (submodule._parameters, submodule._buffers):
            for name, tensor in members.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((members, name))  # type: ignore[arg-type]
    return places


def require_tensors(what: str, tensors: object) -> None:
    """Raise ConfigError unless this is a mapping of names to tensors."""
    expected = "a torch.nn.Module, or a dict of tensors by name"
    require_type(what, tensors, Mapping, expected)
    assert isinstance(tensors, Mapping)
    for name, tensor in tensors.items():
        require_type(f"{what}[{name!r}]", tensor, torch.Tensor, expected)
