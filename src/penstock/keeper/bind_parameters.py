"""Pointing a module's parameters and buffers at memory that is there already.

In: a module, on whatever device; tensors by name. Out: the module, its parameters and buffers those tensors.
Not here: filling memory the module has (`loader.into`), whose memory it is (`attach`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.errors import PlanError


def bind_parameters(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], *, strict: bool) -> None:
    """See `Attached.attach_into`."""
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
        elif id(target) not in pointed:  # else it is tied to one that has its memory already
            pairs.append((target, tensor))
        pointed.add(id(target))
    if strict:
        left = [name for name, target in state.items() if id(target) not in pointed and target.numel()]
        faults += [f"{name}: nothing is kept for it" for name in left]
    if faults:
        more = f" (and {len(faults) - 10} more)" if len(faults) > 10 else ""
        message = f"{len(faults)} tensors do not fit: {'; '.join(faults[:10])}{more}"
        raise PlanError(message, hint="or pass strict=False")
    places = _places(module)
    for target, tensor in pairs:
        _point(target, tensor, places[id(target)])


_Place = tuple[dict[str, torch.Tensor | None], str]


def _places(module: torch.nn.Module) -> dict[int, list[_Place]]:
    """Where each parameter and buffer stands: a tied one in several modules."""
    found: dict[int, list[_Place]] = {}
    for one in module.modules():
        for members in (one._parameters, one._buffers):
            for name, tensor in members.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((members, name))  # type: ignore[arg-type]
    return found


def _point(target: torch.Tensor, tensor: torch.Tensor, places: list[_Place]) -> None:
    if target.device == tensor.device:
        target.data = tensor
        return
    new: torch.Tensor = tensor
    if isinstance(target, torch.nn.Parameter):
        new = torch.nn.Parameter(tensor, requires_grad=target.requires_grad)
    for members, name in places:
        members[name] = new
