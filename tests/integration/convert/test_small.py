"""Small conversions on the CPU: a thread in the caller's process makes the same bits as worker processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import penstock as ps
import penstock_convert
from penstock.errors import OperationFailed

LARGE = 1 << 16
"""Twice the number of elements from which torch splits a loop among threads."""


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Restore torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "llama").mkdir()
    torch.manual_seed(0)
    tensors = {f"layers.{layer}.weight": torch.randn(64, 96).bfloat16() for layer in range(8)}
    save_file(tensors, tmp_path / "llama" / "model.safetensors")
    return tmp_path / "llama"


@pytest.mark.parametrize(
    ("num_sources", "options"),
    [
        (1, {"to": "fp8-block128"}),
        (1, {"to": "nvfp4"}),
        (1, {"to": "cast:F32"}),
        (1, {"operations": {"op": "reshard", "to": 2}}),
        (2, {"operations": "linear"}),
        (3, {"operations": {"op": "average"}}),
        (1, {"operations": {"op": "rename", "rules": [["model", "policy"]]}, "to": "fp8-block128"}),
    ],
)
@pytest.mark.usefixtures("torch_threads")
def test_worker_thread_and_processes_write_identical_files(
    num_sources: int, options: dict[str, Any], tmp_path: Path
) -> None:
    chance = torch.Generator().manual_seed(1)
    sources = [tmp_path / f"source{number}" for number in range(num_sources)]
    for source in sources:
        source.mkdir()
        shapes = {"model.layers.0.mlp.up_proj.weight": (256, LARGE // 128), "model.norm.weight": (LARGE,)}
        save_file(
            {name: torch.randn(shape, generator=chance).bfloat16() for name, shape in shapes.items()},
            source / "model.safetensors",
        )
        (source / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}')
    made = []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        into = tmp_path / f"thread{num_threads}"
        assert not started_by(
            lambda look, into=into: ps.convert(sources, into, devices="cpu", progress=look, **options)
        )
        made.append(contents(into))
    ps.convert(sources, tmp_path / "processes", devices="cpu", workers=2, **options)
    wanted = contents(tmp_path / "processes")
    assert wanted and made == [wanted, wanted]


def test_operations_with_thread_dependent_sums_use_processes(tmp_path: Path, llama: Path) -> None:
    slerp = {"op": "slerp", "t": 0.5}
    assert started_by(
        lambda look: ps.convert([llama, llama], tmp_path / "out", operations=slerp, devices="cpu", progress=look)
    )
    assert not worker_threads()


def started_by(work: Callable[[Callable[[int, int], None]], object]) -> set[str]:
    """Return the processes that a conversion starts. A function called after each task finds them."""
    before, during = children(), set[str]()
    work(lambda done, total: during.update(children()))
    return during - before


def contents(directory: Path) -> dict[str, bytes]:
    """Return the weights of a result by file, without its manifest and small files, which name the run."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*.safetensors")}


def children() -> set[str]:
    """Return the unreaped child processes of this process."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def worker_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-w")]


def test_small_conversion_runs_in_thread(llama: Path, tmp_path: Path) -> None:
    before, during, threads = children(), set[str](), set[str]()

    def look(done: int, total: int) -> None:
        during.update(children())
        threads.update(worker_threads())

    report = ps.convert(
        llama,
        tmp_path / "out",
        to="gguf:Q8_0",
        devices="cpu",
        progress=look,
        workers=penstock_convert.WorkerSettings(task_bytes=2000),
    )
    assert during <= before and threads == {"penstock-w0"} and not worker_threads()
    assert report.num_workers == 1
    # Two workers are processes, and make the same file.
    ps.convert(
        llama,
        tmp_path / "two",
        to="gguf:Q8_0",
        devices="cpu",
        workers=penstock_convert.WorkerSettings(num_workers=2, task_bytes=2000),
    )
    made = [(tmp_path / name / "model.gguf").read_bytes() for name in ("out", "two")]
    assert made[0] == made[1]


def test_interrupted_conversion_in_thread_resumes_on_next_call(llama: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ps.convert(
            llama,
            tmp_path / "out",
            to="gguf:Q8_0",
            devices="cpu",
            progress=interrupt,
            workers=penstock_convert.WorkerSettings(task_bytes=2000),
        )
    assert not worker_threads() and not (tmp_path / "out").exists()
    report = ps.convert(
        llama, tmp_path / "out", to="gguf:Q8_0", devices="cpu", workers=penstock_convert.WorkerSettings(task_bytes=2000)
    )
    assert report.num_resumed >= 2
    ps.convert(llama, tmp_path / "whole", to="gguf:Q8_0", devices="cpu")
    assert (tmp_path / "out/model.gguf").read_bytes() == (tmp_path / "whole/model.gguf").read_bytes()


def test_failing_operation_stops_worker_thread(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({"bad": torch.full((4, 64), torch.inf)}, tmp_path / "source/model.safetensors")
    with pytest.raises(OperationFailed, match="infinite"):
        ps.convert(tmp_path / "source", tmp_path / "out", to="gguf:Q8_0", devices="cpu")
    assert not worker_threads()
