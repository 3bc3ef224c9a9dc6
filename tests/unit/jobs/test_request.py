"""Requests of conversions: tasks of the size that was asked for, or that the workers' kind makes of the source's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.jobs import request
from penstock.jobs.request import are_gpus, plan
from penstock.types import MIB


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One tensor of 8 MiB."""
    (tmp_path / "source").mkdir()
    save_file(
        {"layers.0.q_proj.weight": torch.zeros(4096, 1024, dtype=torch.bfloat16)},
        tmp_path / "source" / "model.safetensors",
    )
    return tmp_path / "source"


@pytest.mark.parametrize(
    ("devices", "prewarmed", "expected"),
    [
        ("all", 2, True),
        ("all", 0, False),
        ("cpu", 2, False),
        (["cuda:0", "cuda:1"], 0, True),
        (["cpu", "cuda"], 2, False),
    ],
)
def test_which_workers_run_on_gpus(
    monkeypatch: pytest.MonkeyPatch, devices: str | list[str], prewarmed: int, expected: bool
) -> None:
    monkeypatch.setattr(request, "num_prewarmed", lambda devices, workers: prewarmed)
    assert are_gpus(devices, None) == expected


def test_tasks_are_of_the_size_that_was_asked_for(source: Path) -> None:
    assert len(plan(source, to="fp8-block128", task_bytes=MIB).tasks) > 8
    assert len(plan(source, to="fp8-block128").tasks) == 1


def test_gpus_get_larger_tasks_than_the_cpu(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule of large sources, with its sizes divided by 64: 8 MiB stand for 512."""
    monkeypatch.setattr(request, "task_bytes_of", lambda nbytes, *, on_devices: (4 if on_devices else 1) * MIB)
    on_cpu = plan(source, to="fp8-block128", devices="cpu").tasks
    on_gpus = plan(source, to="fp8-block128", devices=["cuda:0"]).tasks
    assert len(on_gpus) < len(on_cpu)
    assert (
        plan(source, to="fp8-block128", devices=["cuda:0"], task_bytes=MIB).key
        == plan(source, to="fp8-block128", devices="cpu", task_bytes=MIB).key
    )
