"""Changes of a module's tensors that are detected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from penstock.sync.placed import Placed


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.BatchNorm1d(4), "c": nn.ModuleList([nn.Linear(4, 4)])})


def transpose_view(module: nn.Module) -> None:
    module["a"].weight.data = module["a"].weight.data.t()


def view_bits(module: nn.Module) -> None:
    module["a"].weight.requires_grad_(False).data = module["a"].weight.data.view(torch.int32)


def swap_for_meta(module: nn.Module) -> None:
    torch.utils.swap_tensors(module["a"].weight, nn.Parameter(torch.empty(4, 4, device="meta")))


def offset_view(module: nn.Module) -> None:
    module["a"].bias.data = torch.zeros(8)[4:]


def same_values(module: nn.Module) -> None:
    module["b"].running_mean = module["b"].running_mean.clone()


def add_to_empty(module: nn.Module) -> None:
    module["a"].register_buffer("scale", torch.ones(1))


NOTICED: list[Callable[..., None]] = [
    transpose_view,
    view_bits,
    swap_for_meta,
    offset_view,
    same_values,
    add_to_empty,
    lambda module: module.double(),
    lambda module: module.half().float(),
    lambda module: module["a"].register_parameter("bias", None),
    lambda module: module["c"].append(nn.Linear(4, 4)),
    lambda module: module["c"].__setitem__(0, nn.Linear(4, 4)),
    lambda module: module.load_state_dict({n: t.clone() for n, t in module.state_dict().items()}, assign=True),
]


@pytest.mark.parametrize("change", NOTICED)
def test_changed_address_is_detected(change: Callable[..., None]) -> None:
    module = model()
    placed = Placed(module)
    assert placed.is_same()
    change(module)
    assert not placed.is_same()
    placed.refresh()
    assert placed.is_same()


@pytest.mark.parametrize("value", [torch.zeros(4, 4, device="meta"), torch.zeros(4, 4, dtype=torch.int32)])
def test_changed_dict_value_is_detected(value: torch.Tensor) -> None:
    tensors = {"w": torch.zeros(4, 4), "v": torch.zeros(1)}
    placed = Placed(tensors)
    # The same object contains a different tensor.
    torch.utils.swap_tensors(tensors["w"], value.clone())
    assert not placed.is_same()
    assert placed.moved() == ["w"]


def test_parameter_moved_to_next_module_is_detected() -> None:
    # The names and the objects stay in the same order.
    first, second, last = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    module = nn.ModuleList([nn.Module(), nn.Module()])
    module[0].x, module[0].y, module[1].z = first, second, last
    placed = Placed(module)
    del module[0].y, module[1].z
    module[1].y, module[1].z = second, last
    assert not placed.is_same()


@torch.no_grad()
def test_changed_values_are_not_reported_as_moved() -> None:
    module = model()
    placed = Placed(module)
    for tensor in module.state_dict().values():
        tensor.copy_(torch.ones_like(tensor))
    module.requires_grad_(False)
    module.eval()
    with torch.inference_mode():
        assert placed.is_same()
    assert placed.is_same()
