"""Modules whose state dict has copies, views, plain attributes or different names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import penstock
from penstock.errors import PlanError

Verb = Callable[[torch.nn.Module, Path], object]


class Stacked(torch.nn.Module):
    """A module with one parameter that is saved as two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = torch.nn.Parameter(torch.zeros(2, 3, 4))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for number in range(2):
            destination[f"{prefix}{number}"] = self.stack[number] if keep_vars else self.stack.detach()[number]


class Attribute(torch.nn.Module):
    """A module with a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = torch.zeros(3, 4)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}0"] = self.codes


def load_into(module: torch.nn.Module, path: Path) -> None:
    penstock.load_into(module, path, strict=False)


def load_in_background(module: torch.nn.Module, path: Path) -> None:
    with penstock.modules.load_in_background(module, path, strict=False) as loading:
        loading.wait()


def reload_failed(module: torch.nn.Module, path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise PlanError("stop")

    loading = penstock.modules.load_in_background(module, path, strict=False, progress=stop)
    with pytest.raises(PlanError, match="stop"):
        loading.wait()
    load_into(module, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"0": torch.full((3, 4), 1.0), "1": torch.full((3, 4), 2.0)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("verb", [load_into, load_in_background, reload_failed])
def test_views_in_state_dict_are_filled(path: Path, verb: Verb) -> None:
    module = Stacked()
    verb(module, path)
    assert module.stack[:, 0, 0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("verb", [load_into, load_in_background])
def test_copies_in_state_dict_raise_plan_error(path: Path, verb: Callable[..., object]) -> None:
    def copies(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for name in list(state):
            state[name] = state[name].clone()

    module = Stacked()
    module.register_state_dict_post_hook(copies)
    with pytest.raises(PlanError, match="returns a copy of it") as raised:
        verb(module, path)
    assert not raised.value.mutated
    assert not module.stack.any()


def test_plain_tensor_attribute_in_state_dict_is_filled(path: Path) -> None:
    module = Attribute()
    load_into(module, path)
    assert module.codes.eq(1).all()


def test_plain_tensor_attribute_in_background_load_raises(path: Path) -> None:
    module = Attribute()
    with pytest.raises(PlanError, match="not a parameter or buffer"):
        load_in_background(module, path)
    assert not module.codes.any()


@pytest.mark.parametrize("verb", [load_into, load_in_background])
def test_state_dict_entry_without_checkpoint_tensor_is_accepted(path: Path, verb: Verb) -> None:
    def count(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        state[f"{prefix}count"] = torch.tensor([2])

    module = Stacked()
    module.register_state_dict_post_hook(count)
    verb(module, path)
    assert module.stack[:, 0, 0].tolist() == [1.0, 2.0]
