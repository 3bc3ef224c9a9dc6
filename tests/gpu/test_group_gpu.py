"""`group=` over NCCL: bit-identical tensors on every rank, boxes, and errors that reach all ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.compare import all_bits, by_safetensors
from tests.support.moe import write_moe
from tests.support.ranks import Outcome, run_ranks
from tests.support.shards import shard_box

import penstock
from penstock.errors import SourceUnavailable
from penstock.storage.files import FileSource
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

pytestmark = pytest.mark.gpus(2)
STALL_S = 5.0
BOUND_S = 3 * STALL_S + 10
WORLDS = [2, pytest.param(4, marks=pytest.mark.gpus(4))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("group") / "model"
    write_llama(directory, num_layers=4, hidden=2048, shards=3)
    return directory


def load_rank(rank: int, directories: list[str], **options: Any) -> penstock.Weights:
    weights = penstock.load(directories[rank], device=f"cuda:{rank}", group=torch.distributed.group.WORLD, **options)
    assert {tensor.device.index for tensor in weights.values()} == {rank}
    return weights


def everything(rank: int, world_size: int, directories: list[str], options: dict[str, Any]) -> Any:
    weights = load_rank(rank, directories, **options)
    return all_bits(weights), weights.report.read_bytes


def own_boxes(rank: int, world_size: int, directories: list[str], dim: int) -> Any:
    whole = by_safetensors(Path(directories[rank]))
    boxes = {
        name: shard_box(tuple(tensor.shape), dim, rank, world_size)
        for name, tensor in whole.items()
        if tensor.ndim == 2 and tensor.shape[dim] % world_size == 0
    }
    weights = load_rank(rank, directories, boxes=boxes)
    wanted = {
        name: tensor[tuple(map(slice, boxes[name].start, boxes[name].stop))] if name in boxes else tensor
        for name, tensor in whole.items()
    }
    return all_bits(weights) == all_bits(wanted)


def memory_comes_back(rank: int, world_size: int, directories: list[str]) -> Any:
    held = []
    for _ in range(3):
        weights = load_rank(rank, directories)
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        del weights
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    return held[0] == held[-1] and held[-1] < nbytes // 2


def reading_fails(rank: int, world_size: int, directories: list[str], victim: int) -> Any:
    original, count = FileSource.readv, [0]

    def readv(self: FileSource, offset: int, buffers: Any) -> str:
        count[0] += sum(len(b) for b in buffers) >= MIB
        if rank == victim and count[0] == 3:
            raise SourceUnavailable("the disk is gone", uri=self.uri)
        return original(self, offset, buffers)

    FileSource.readv = readv  # type: ignore[method-assign]
    os.environ["PENSTOCK_IO_URING"] = "0"  # reads by the kernel cannot be made to fail here
    return everything(rank, world_size, directories, {})


def run(body: Callable[..., Any], world_size: int, *args: Any) -> list[Outcome]:
    environ = {"PENSTOCK_STALL_S": str(STALL_S)}
    return run_ranks(body, world_size, *args, backend="nccl", timeout_s=90, environ=environ)


def assert_all_raised(outcomes: list[Outcome]) -> None:
    assert [outcome.ended for outcome in outcomes] == ["raised"] * len(outcomes), outcomes
    for outcome in outcomes:
        assert issubclass(getattr(penstock.errors, outcome.error, Exception), penstock.PenstockError), outcome
        assert outcome.seconds < BOUND_S


@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_load_all_tensors_from_one_read(checkpoint: Path, world_size: int) -> None:
    outcomes = run(everything, world_size, [str(checkpoint)] * world_size, {})
    wanted = by_safetensors(checkpoint)
    assert [outcome.ended for outcome in outcomes] == ["returned"] * world_size, outcomes
    assert all(outcome.value[0] == all_bits(wanted) for outcome in outcomes)
    total = sum(tensor.nbytes for tensor in wanted.values())
    assert total <= sum(outcome.value[1] for outcome in outcomes) <= 1.1 * total


@pytest.mark.parametrize("world_size", WORLDS)
def test_small_tensors_load_within_small_memory_budget(tmp_path: Path, world_size: int) -> None:
    write_moe(tmp_path / "moe", num_tensors=2000, shards=2)
    outcomes = run(
        everything,
        world_size,
        [str(tmp_path / "moe")] * world_size,
        {"settings": penstock.ReadSettings(memory_bytes=16 * MIB)},
    )
    wanted = all_bits(by_safetensors(tmp_path / "moe"))
    assert [outcome.ended for outcome in outcomes] == ["returned"] * world_size, outcomes
    assert all(outcome.value[0] == wanted for outcome in outcomes)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dim", [0, 1])
def test_each_rank_receives_its_slices(checkpoint: Path, world_size: int, dim: int) -> None:
    outcomes = run(own_boxes, world_size, [str(checkpoint)] * world_size, dim)
    assert [(outcome.ended, outcome.value) for outcome in outcomes] == [("returned", True)] * world_size


def test_group_load_frees_device_memory(checkpoint: Path) -> None:
    outcomes = run(memory_comes_back, 2, [str(checkpoint)] * 2)
    assert [(outcome.ended, outcome.value) for outcome in outcomes] == [("returned", True)] * 2, outcomes


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("fault", ["truncated", "missing", "reading"])
def test_failure_on_one_rank_fails_all_ranks(checkpoint: Path, tmp_path: Path, world_size: int, fault: str) -> None:
    directories = [str(checkpoint)] * world_size
    if fault == "reading":
        assert_all_raised(run(reading_fails, world_size, directories, 1))
        return
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    last = sorted(broken.glob("*.safetensors"))[-1]
    if fault == "missing":
        last.unlink()
    else:
        os.truncate(last, last.stat().st_size - 100_000)
    directories[-1] = str(broken)
    assert_all_raised(run(everything, world_size, directories, {}))
