"""Bind a module's parameters and buffers to existing memory.

In: a module on any device; tensors by name. Out: the module, whose parameters and buffers are those tensors.
Not here: filling memory that the module has (`loader.into`), the owner of the memory (`attach`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.errors import PlanError


def bind_parameters(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], *, strict: bool) -> None:
    """Bind a module's parameters and buffers to tensors; see `Attached.attach_into`."""
    state: dict[str, torch.Tensor] = dict(module.state_dict(keep_vars=True))
    pairs, pointed, faults = [], set[int](), []
    for name, tensor in tensors.items():
        target = state.get(name)
        if target is None:
            faults += [f"{name}: the target has none"] * strict
            continue
        if target.dtype != tensor.dtype or target.shape != tensor.shape:
            ours, theirs = f"{tensor.dtype} {list(tensor.shape)}", f"{target.dtype} {list(target.shape)}"
            faults.append(f"{name}: {ours} does not fit {theirs}")
        elif id(target) not in pointed:  # else it is tied to a parameter that is bound already
            pairs.append((target, tensor))
        pointed.add(id(target))
    if strict:
        left = [name for name, target in state.items() if id(target) not in pointed and target.numel()]
        faults += [f"{name}: the keeper has no such tensor" for name in left]
    if faults:
        more = f" (and {len(faults) - 10} more)" if len(faults) > 10 else ""
        message = f"{len(faults)} tensors do not fit: {'; '.join(faults[:10])}{more}"
        raise PlanError(message, hint="attach the right model, or pass strict=False to bind what both sides have")
    places = _places(module)
    for target, tensor in pairs:
        _point(target, tensor, places[id(target)])


_Place = tuple[dict[str, torch.Tensor | None], str]


def _places(module: torch.nn.Module) -> dict[int, list[_Place]]:
    """Return the places of each parameter and buffer by its id; a tied one has several."""
    places: dict[int, list[_Place]] = {}
    for submodule in module.modules():
        for members in (submodule._parameters, submodule._buffers):
            for name, tensor in members.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((members, name))  # type: ignore[arg-type]
    return places


def _point(target: torch.Tensor, tensor: torch.Tensor, places: list[_Place]) -> None:
    if target.device == tensor.device:
        target.data = tensor
        return
    new: torch.Tensor = tensor
    if isinstance(target, torch.nn.Parameter):
        new = torch.nn.Parameter(tensor, requires_grad=target.requires_grad)
    for members, name in places:
        members[name] = new
