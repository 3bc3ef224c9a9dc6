"""Overlapping targets are rejected, tied targets are grouped, and writes are recorded for autograd."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import PlanError
from penstock.memory.targets import note_written, tied_targets

MEMORY = torch.zeros(60)
GRID = torch.zeros(6, 8)


def groups(*tensors: torch.Tensor) -> list[list[int]]:
    return tied_targets([f"t{number}" for number in range(len(tensors))], tensors)


@pytest.mark.parametrize(
    "tensors",
    [
        (MEMORY[:48], MEMORY[45:51]),
        (MEMORY[45:51], MEMORY[:48]),
        (MEMORY, MEMORY[10:12]),
        (MEMORY[:20], MEMORY[:21]),
        (MEMORY[::2], MEMORY[2:4]),
        (MEMORY[::2], MEMORY[::3]),
        (GRID[:, :5], GRID[:, 4:]),
        (GRID, GRID.t()),
        (GRID[2:4], GRID[:, 3]),
        (MEMORY[:8], torch.zeros(3), MEMORY.view(torch.int16)[14:20]),
        (MEMORY, MEMORY[3:4], MEMORY[50:52]),
    ],
)
def test_partly_overlapping_targets_raise(tensors: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(PlanError, match="share part of their memory"):
        groups(*tensors)


@pytest.mark.parametrize(
    "tensors",
    [
        (MEMORY[:30], MEMORY[30:]),
        (MEMORY[::2], MEMORY[1::2]),
        (GRID[:, :4], GRID[:, 4:]),
        (GRID[:, ::2], GRID[:, 1::2]),
        (GRID[:3, :4].t(), GRID[:3, 4:], GRID[3:]),
        (GRID[0], GRID[1:, 3], GRID[1:, :3], MEMORY),
        (MEMORY[5:5], MEMORY),
    ],
)
def test_targets_with_disjoint_views_are_accepted(tensors: tuple[torch.Tensor, ...]) -> None:
    assert groups(*tensors) == []


@pytest.mark.parametrize("other", [GRID, GRID.view(-1), GRID.view(torch.int32), torch.nn.Parameter(GRID)])
def test_targets_with_same_memory_form_one_group(other: torch.Tensor) -> None:
    assert groups(torch.zeros(2), GRID, MEMORY, other) == [[1, 3]]


def test_identical_strided_views_form_one_group() -> None:
    assert groups(GRID[:, ::2], GRID[:, 1::2], GRID[:, ::2].detach()) == [[0, 2]]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1).expand(48), torch.zeros(4, 1).expand(4, 6), torch.zeros(9).as_strided((4, 3), (2, 1))],
)
def test_expanded_target_raises(tensor: torch.Tensor) -> None:
    with pytest.raises(PlanError, match="share memory"):
        groups(tensor)


def freed() -> torch.Tensor:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.nn.LazyLinear(6).weight, "not initialised"),
        (torch.zeros(3, device="meta"), "meta device"),
        (torch.eye(3).to_sparse(), "no memory itself"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), "no memory itself"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "lazily conjugated"),
        (freed(), "freed"),
    ],
)
def test_target_without_usable_memory_raises(tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(PlanError, match=why) as raised:
        groups(MEMORY, tensor)
    assert raised.value.tensor == "t1" and not raised.value.mutated


def test_write_through_view_is_recorded_for_autograd() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    loss = (weight * weight).sum()
    note_written([weight.detach()[1:]])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_recording_write_to_inference_tensor_does_not_raise() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    note_written([tensor])
