"""Requests of conversions: tasks of the size that was asked for, or that the size of the source makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import ConfigError
from penstock.types import MIB
from penstock_convert import request
from penstock_convert.convert import convert
from penstock_convert.request import plan


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One tensor of 8 MiB."""
    (tmp_path / "source").mkdir()
    tensors = {"layers.0.q_proj.weight": torch.zeros(4096, 1024, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    return tmp_path / "source"


def test_tasks_have_requested_size(source: Path) -> None:
    assert len(plan(source, to="fp8-block128", task_bytes=MIB).tasks) > 8
    assert len(plan(source, to="fp8-block128").tasks) == 1


def test_default_task_size_grows_with_bytes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(request, "task_bytes_of", lambda nbytes: asked.append(nbytes) or MIB)
    assert len(plan([source, source], operations="average").tasks) > 8
    assert asked == [2 * 8 * MIB]


def test_tasks_are_smaller_with_little_memory(source: Path) -> None:
    usual, small = (plan(source, to="fp8-block128", memory_bytes=memory) for memory in (None, 2 * MIB))
    assert len(small.tasks) > len(usual.tasks)
    assert int(small.memory_bytes.max()) <= 2 * MIB


def test_planned_job_matches_executed_job(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", to="fp8-block128", devices="cpu")
    job = plan(source, to="fp8-block128")
    assert report.num_tasks == len(job.tasks)
    assert job.key in (tmp_path / "out" / "penstock.job").read_text()


def test_zero_shard_bytes_is_refused(source: Path) -> None:
    with pytest.raises(ConfigError, match="shard_bytes=0"):
        plan(source, to="fp8-block128", shard_bytes=0)
