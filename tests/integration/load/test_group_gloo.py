"""`group=` on the CPU: each rank reads its part once, and all ranks receive everything, their boxes, or an error."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.compare import all_bits, by_safetensors
from tests.support.ranks import Outcome, run_ranks
from tests.support.shards import shard_box

import penstock
from penstock.errors import SourceUnavailable
from penstock.storage.files import FileSource
from penstock.testing.checkpoints import write_llama

STALL_S = 5.0
"""Short timeout for tests that lose a rank. In other tests no rank may be given up as late."""
# Small chunks let each rank read several times and take part in several rounds.
ENVIRON = {"PENSTOCK_STALL_S": "60", "PENSTOCK_CHUNK_BYTES": "512K", "OMP_NUM_THREADS": "1"}
# A rank detects a failure at once, or at the stall deadline of one of two waits.
BOUND_S = 3 * STALL_S + 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("group") / "model"
    write_llama(directory, num_layers=2, hidden=512, shards=3)
    return directory


def tensor_bytes(directory: Path) -> int:
    return sum(tensor.nbytes for tensor in by_safetensors(directory).values())


def load_rank(rank: int, directories: list[str], **options: Any) -> penstock.Weights:
    return penstock.load(directories[rank], group=torch.distributed.group.WORLD, **options)


def everything(rank: int, world_size: int, directories: list[str], options: dict[str, Any]) -> Any:
    weights = load_rank(rank, directories, **options)
    by_path = Counter[str]()
    for file in weights.report.files:
        by_path[file.path] += file.nbytes
    others = by_path.pop("group")
    assert weights.report.nbytes <= others + by_path.total() <= 1.1 * weights.report.nbytes
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
    return all_bits(weights) == all_bits(wanted), weights.report.read_bytes


def twice(rank: int, world_size: int, directories: list[str]) -> Any:
    first, second = load_rank(rank, directories), load_rank(rank, directories, names="*layers.1.*")
    return all_bits(first), all_bits(second)


def after_failure(rank: int, world_size: int, directories: list[str], good: str) -> Any:
    with pytest.raises(penstock.PenstockError):
        load_rank(rank, directories)
    return all_bits(load_rank(rank, [good] * world_size))


def patched_reads(act: Callable[[], None], rank: int, victim: int) -> None:
    """In the lost rank's process, replace the first read of a file's body with the fault."""
    if rank != victim:
        return
    original, count = FileSource.readv, [0]

    def readv(self: FileSource, offset: int, buffers: Any) -> str:
        if offset >= 8 and sum(len(b) for b in buffers) >= 64 << 10:
            count[0] += 1
            if count[0] == 1:
                act()
        return original(self, offset, buffers)

    FileSource.readv = readv  # type: ignore[method-assign]


def reading_fails(rank: int, world_size: int, directories: list[str], victim: int) -> Any:
    def fail() -> None:
        raise SourceUnavailable("the disk is gone", uri=directories[rank])

    patched_reads(fail, rank, victim)
    return everything(rank, world_size, directories, {})


def reading_kills(rank: int, world_size: int, directories: list[str], victim: int) -> Any:
    patched_reads(lambda: os.kill(os.getpid(), signal.SIGKILL), rank, victim)
    return everything(rank, world_size, directories, {})


def dies_before(rank: int, world_size: int, directories: list[str], victim: int) -> Any:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return everything(rank, world_size, directories, {})


def reading_pauses(rank: int, world_size: int, directories: list[str], victim: int) -> Any:
    patched_reads(lambda: time.sleep(2 * STALL_S), rank, victim)
    return everything(rank, world_size, directories, {})


def run(body: Callable[..., Any], world_size: int, *args: Any, **environ: str) -> list[Outcome]:
    return run_ranks(body, world_size, *args, timeout_s=100, environ=ENVIRON | environ)


def assert_all_raised(outcomes: list[Outcome], *, within_s: float = BOUND_S) -> None:
    assert [outcome.ended for outcome in outcomes] == ["raised"] * len(outcomes), outcomes
    for outcome in outcomes:
        assert issubclass(getattr(penstock.errors, outcome.error, Exception), penstock.PenstockError), outcome
        assert outcome.seconds < within_s
        assert not outcome.mutated


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_load_all_tensors_from_one_read(checkpoint: Path, world_size: int) -> None:
    outcomes = run(everything, world_size, [str(checkpoint)] * world_size, {})
    wanted = all_bits(by_safetensors(checkpoint))
    assert [outcome.ended for outcome in outcomes] == ["returned"] * world_size, outcomes
    assert all(outcome.value[0] == wanted for outcome in outcomes)
    read = [outcome.value[1] for outcome in outcomes]
    total = tensor_bytes(checkpoint)
    assert total <= sum(read) <= 1.1 * total
    assert max(read) < 0.9 * total


def test_group_load_succeeds_with_budget_below_tensor_size(checkpoint: Path) -> None:
    outcomes = run(everything, 2, [str(checkpoint)] * 2, {"settings": penstock.ReadSettings(memory_bytes=1 << 20)})
    wanted = all_bits(by_safetensors(checkpoint))
    assert [outcome.value[0] if outcome.ended == "returned" else outcome for outcome in outcomes] == [wanted] * 2


@pytest.mark.parametrize("dim", [0, 1])
def test_each_rank_receives_its_slices(checkpoint: Path, dim: int) -> None:
    outcomes = run(own_boxes, 2, [str(checkpoint)] * 2, dim)
    assert [(outcome.ended, outcome.value[0]) for outcome in outcomes] == [("returned", True)] * 2, outcomes
    assert sum(outcome.value[1] for outcome in outcomes) <= 1.3 * tensor_bytes(checkpoint)


def test_group_loads_again_with_selected_tensor_names(checkpoint: Path) -> None:
    outcomes = run(twice, 2, [str(checkpoint)] * 2)
    wanted = all_bits(by_safetensors(checkpoint))
    some = {name: value for name, value in wanted.items() if ".layers.1." in name}
    assert [outcome.value for outcome in outcomes] == [(wanted, some)] * 2


def test_truncated_file_on_one_rank_fails_all_ranks(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    last = sorted(broken.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 100_000)
    outcomes = run(everything, 2, [str(checkpoint), str(broken)], {})
    assert_all_raised(outcomes)
    assert last.name in str(outcomes[1].value)


def test_missing_file_on_one_rank_fails_all_ranks(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    sorted(broken.glob("*.safetensors"))[-1].unlink()
    assert_all_raised(run(everything, 3, [str(checkpoint), str(broken), str(checkpoint)], {}))


def test_group_can_load_after_failed_load(checkpoint: Path, tmp_path: Path) -> None:
    directories = [str(checkpoint), str(tmp_path / "absent")]
    outcomes = run(after_failure, 2, directories, str(checkpoint))
    wanted = all_bits(by_safetensors(checkpoint))
    assert [outcome.value for outcome in outcomes] == [wanted] * 2, outcomes


def test_failed_read_on_one_rank_fails_all_ranks(checkpoint: Path) -> None:
    outcomes = run(reading_fails, 3, [str(checkpoint)] * 3, 1)
    assert_all_raised(outcomes)
    assert all("the disk is gone" in str(outcome.value) for outcome in outcomes)


def test_rank_slower_than_stall_timeout_succeeds(checkpoint: Path) -> None:
    outcomes = run(reading_pauses, 2, [str(checkpoint)] * 2, 1, PENSTOCK_STALL_S=str(STALL_S))
    assert [outcome.ended for outcome in outcomes] == ["returned"] * 2, outcomes
    assert all(outcome.seconds > STALL_S for outcome in outcomes)


@pytest.mark.parametrize("body", [dies_before, reading_kills])
def test_killed_rank_raises_peer_lost_before_deadline(checkpoint: Path, body: Callable[..., Any]) -> None:
    outcomes = run(body, 3, [str(checkpoint)] * 3, 2, PENSTOCK_STALL_S=str(STALL_S))
    assert outcomes[2].ended == "died"
    assert_all_raised(outcomes[:2])
    assert [outcome.error for outcome in outcomes[:2]] == ["PeerLost"] * 2, outcomes


def test_different_weights_on_ranks_raise(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_llama(other, num_layers=1, hidden=512, shards=3)
    outcomes = run(everything, 2, [str(checkpoint), str(other)], {})
    assert_all_raised(outcomes)
    assert [outcome.error for outcome in outcomes] == ["PlanError"] * 2, outcomes
