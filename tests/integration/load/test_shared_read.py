"""Files that ranks read together: slices, skipped tensors, different orders and pauses. Failures fail all ranks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.support.ranks import Outcome, run_ranks

import penstock
from penstock.errors import PeerLost, SourceChanged, SourceUnavailable
from penstock.storage.files import FileSource
from penstock_hf.patched_libraries import patched_libraries

STALL_S = 4.0
ENVIRON = {"PENSTOCK_STALL_S": "60", "PENSTOCK_CHUNK_BYTES": "256K", "OMP_NUM_THREADS": "1"}
SOON = {"PENSTOCK_STALL_S": str(STALL_S)}
BOUND_S = 3 * STALL_S + 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared")
    generator = torch.Generator().manual_seed(3)
    for file in range(2):
        tensors = {f"layers.{at}.{file}": torch.rand(97 + 16 * at, 1024 + at, generator=generator) for at in range(12)}
        tensors[f"small.{file}"] = torch.rand(3, generator=generator)
        tensors[f"none.{file}"] = torch.empty(0, 4)
        tensors[f"cube.{file}"] = torch.rand(6, 50, 70, generator=generator).to(torch.bfloat16)
        save_file(tensors, directory / f"model-{file}.safetensors")
    return directory


def expected_tensors(directory: str) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def open_all(directory: str) -> dict[str, Any]:
    # Call the function through the module, where the block replaces it.
    files = [safetensors.safe_open(path, framework="pt") for path in sorted(Path(directory).glob("*.safetensors"))]
    return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118


def everything(rank: int, world_size: int, directory: str, **options: Any) -> Any:
    true = expected_tensors(directory)
    with patched_libraries(group=dist.group.WORLD, **options) as report:
        slices = open_all(directory)
        with ThreadPoolExecutor(4) as pool:
            mine = dict(zip(slices, pool.map(lambda s: s[...], slices.values()), strict=True))
    for name, tensor in true.items():
        assert torch.equal(mine[name], tensor), name
        assert slices[name].get_shape() == list(tensor.shape)
    return report.shared[0]


def parts(rank: int, world_size: int, directory: str, memory_bytes: int, seed: int) -> Any:
    """Request slices of most tensors, some of them twice, from four threads in this rank's order."""
    chance = random.Random(seed + rank)
    true = expected_tensors(directory)
    wanted = []
    for name, tensor in true.items():
        for _ in range(chance.choice([0, 1, 1, 2])):
            index = [slice(None)] * tensor.ndim
            # Odd seeds cut several dims, and even seeds cut one dim.
            for dim in chance.sample(range(tensor.ndim), 1 + seed % 2 * (tensor.ndim - 1)):
                start = chance.randint(0, tensor.shape[dim])
                index[dim] = slice(start, chance.randint(start, tensor.shape[dim]))
            wanted.append((name, chance.choice([tuple(index), tuple(index), ..., (0, ...)] if len(tensor) else [...])))
    if seed % 2:
        chance.shuffle(wanted)
    with patched_libraries(group=dist.group.WORLD, memory_bytes=memory_bytes) as report:
        slices = open_all(directory)
        with ThreadPoolExecutor(4) as pool:
            taken = list(pool.map(lambda pair: slices[pair[0]][pair[1]], wanted))
    for (name, index), tensor in zip(wanted, taken, strict=True):
        assert torch.equal(tensor, true[name][index]), (name, index)
    return report.shared


def reversed_order(rank: int, world_size: int, directory: str) -> Any:
    true = expected_tensors(directory)
    with patched_libraries(group=dist.group.WORLD, memory_bytes=2 << 20) as report:
        slices = open_all(directory)
        names = sorted(slices, reverse=rank == 1)
        for name in names:
            assert torch.equal(slices[name][...], true[name]), name
    return report.shared[0].read_again_bytes


def in_turn(rank: int, world_size: int, directory: str) -> Any:
    true, mine = expected_tensors(directory), {}
    with patched_libraries(group=dist.group.WORLD) as report:
        for path in sorted(Path(directory).glob("*.safetensors")):
            mine |= safetensors.torch.load_file(path)
    assert mine.keys() == true.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in true.items())
    return [shared.read_bytes for shared in report.shared]


def left_open(rank: int, world_size: int, directory: str) -> Any:
    """Load all files one by one without closing them, then a model with tensors of the same names."""
    true = expected_tensors(directory)
    first, *_ = paths = [str(path) for path in sorted(Path(directory).glob("*.safetensors"))]
    with patched_libraries(group=dist.group.WORLD) as report:
        for path in paths:
            file = safetensors.safe_open(path, framework="pt")
            assert all(torch.equal(file.get_tensor(name), true[name]) for name in file.keys())  # noqa: SIM118
        copy = shutil.copyfile(first, f"{directory}-{rank}.safetensors")
        other = safetensors.safe_open(copy, framework="pt")
        assert torch.equal(other.get_tensor("small.0"), true["small.0"])
    os.unlink(copy)
    return [shared.nbytes for shared in report.shared]


def other_arguments(rank: int, world_size: int, directory: str) -> Any:
    """Open files with the framework and the device as positional arguments, and for NumPy."""
    with patched_libraries(group=dist.group.WORLD):
        path = f"{directory}/model-0.safetensors"
        with safetensors.safe_open(path, "np") as file:
            assert isinstance(file.get_tensor("small.0"), numpy.ndarray)
        with safetensors.safe_open(path, "pt", "meta") as file:
            return str(file.get_tensor("small.0").device)


def in_one_process(rank: int, world_size: int, directory: str) -> Any:
    """Run many loads in one pair of processes, because starting processes takes longer."""
    whole = everything(rank, world_size, directory)
    some = {
        (memory_bytes, seed): parts(rank, world_size, directory, memory_bytes << 20, seed)
        for memory_bytes in (256, 2)
        for seed in range(4)
    }
    again = reversed_order(rank, world_size, directory)
    more = left_open(rank, world_size, directory), other_arguments(rank, world_size, directory)
    return whole, some, again, in_turn(rank, world_size, directory), more


def run(body: Callable[..., Any], world_size: int, *args: Any, **environ: str) -> list[Outcome]:
    return run_ranks(body, world_size, *args, timeout_s=100, environ=ENVIRON | environ)


def returned(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.ended for outcome in outcomes] == ["returned"] * len(outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def raised(outcomes: list[Outcome]) -> list[str]:
    assert [outcome.ended for outcome in outcomes] == ["raised"] * len(outcomes), outcomes
    assert all(outcome.seconds < BOUND_S for outcome in outcomes), outcomes
    return [outcome.error for outcome in outcomes]


def test_ranks_reading_in_any_order_share_reads(directory: Path) -> None:
    wholes, somes, again, turns, more = zip(*returned(run(in_one_process, 2, str(directory))), strict=True)
    assert sum(report.read_bytes for report in wholes) == wholes[0].nbytes
    assert all(report.read_bytes + report.group_bytes == report.nbytes for report in wholes)
    assert all(report.read_again_bytes == 0 for report in wholes)
    for some in somes:
        for (memory_bytes, seed), shared in some.items():
            for report in shared:
                # One round, and tensors cut in several dims that threads wait for, may exceed the limit.
                assert seed % 2 or report.peak_window_bytes <= memory_bytes * (1 << 20) // 2 + (2 * 256 << 10)
    # The rank that requested the last tensor first had to read the tensors again that had left its window.
    assert again[1] > again[0]
    sizes = [
        sum(t.nbytes for n, t in expected_tensors(str(directory)).items() if n.endswith(f".{file}"))
        for file in range(2)
    ]
    assert [sum(pair) for pair in zip(*turns, strict=True)] == sizes
    # A file that was not closed is not read again with the next file.
    assert more == (([*sizes, sizes[0]], "meta"),) * 2


def test_one_or_three_ranks_read_each_byte_once(directory: Path) -> None:
    for world_size in (1, 3):
        reports = returned(run(everything, world_size, str(directory)))
        assert sum(report.read_bytes for report in reports) == reports[0].nbytes


def two_owners(rank: int, world_size: int, directory: str) -> Any:
    """Take one tensor in two threads. The second writes to its result before the first copies its own."""
    is_read, is_written, copies = threading.Event(), threading.Event(), []
    readv, clone = FileSource.readv, torch.Tensor.clone

    def late_readv(self: FileSource, offset: int, buffers: Any) -> str:
        if sum(len(b) for b in buffers) >= 64 << 10:
            is_read.wait(20)
        return readv(self, offset, buffers)

    def late_clone(self: torch.Tensor) -> torch.Tensor:
        copies.append(self)
        if len(copies) == 1:
            is_written.wait(20)
        return clone(self)

    def take(part: Any) -> torch.Tensor:
        tensor = part[...]
        if not is_written.is_set():
            # The first thread has finished, and the other has not copied yet.
            mine = clone(tensor)
            tensor.zero_()
            is_written.set()
            return mine
        return tensor

    true = expected_tensors(directory)["layers.11.0"]
    FileSource.readv, torch.Tensor.clone = late_readv, late_clone  # type: ignore[method-assign]
    with patched_libraries(group=dist.group.WORLD), ThreadPoolExecutor(2) as pool:
        part = open_all(directory)["layers.11.0"]
        both = [pool.submit(take, part) for _ in range(2)]
        time.sleep(1.0)
        is_read.set()
        assert all(torch.equal(future.result(20), true) for future in both)
    return len(copies)


def test_concurrent_threads_receive_separate_tensors(directory: Path) -> None:
    assert returned(run(two_owners, 1, str(directory))) == [2]


def pauses(rank: int, world_size: int, directory: str) -> Any:
    began = time.monotonic()
    with patched_libraries(group=dist.group.WORLD, memory_bytes=1 << 20) as report:
        slices = open_all(directory)
        names = sorted(slices)
        assert slices[names[0]][...].numel()
        if rank == 1:
            time.sleep(3 * STALL_S)
        for name in names[1:]:
            slices[name][...]
        seconds = time.monotonic() - began
    return seconds, report.shared[0].read_again_bytes


def test_paused_rank_does_not_delay_other_ranks(directory: Path) -> None:
    (first, _), (second, again) = returned(run(pauses, 2, str(directory), **SOON))
    assert first < second
    assert again > 0


def fails_in_its_program(rank: int, world_size: int, directory: str, victim: int) -> Any:
    with patched_libraries(group=dist.group.WORLD):
        slices = open_all(directory)
        names = sorted(slices)
        slices[names[0]][...]
        if rank == victim:
            raise RuntimeError("out of memory, say")
        for name in names[1:]:
            slices[name][...]


def fails_before_it_reads(rank: int, world_size: int, directory: str, victim: int) -> Any:
    with patched_libraries(group=dist.group.WORLD):
        if rank == victim:
            raise ValueError("a wrong option")
        open_all(directory)["small.0"][...]


def other_weights(rank: int, world_size: int, directory: str, other: str) -> Any:
    with patched_libraries(group=dist.group.WORLD):
        open_all(other if rank else directory)["small.0"][...]


def loads_more(rank: int, world_size: int, directory: str) -> Any:
    with patched_libraries(group=dist.group.WORLD):
        open_all(directory)["small.0"][...]
        if rank == 0:
            open_all(directory)["small.0"][...]


def patched(rank: int, world_size: int, directory: str, victim: int, act: str = "fail") -> Any:
    """In the lost rank's process, let the second read of a body fail or kill the process."""
    original, count = FileSource.readv, [0]

    def readv(self: FileSource, offset: int, buffers: Any) -> str:
        if sum(len(b) for b in buffers) >= 64 << 10:
            count[0] += 1
            if count[0] == 2:
                if act == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise SourceUnavailable("the disk is gone", uri=directory)
        return original(self, offset, buffers)

    if rank == victim:
        FileSource.readv = readv  # type: ignore[method-assign]
    with patched_libraries(group=dist.group.WORLD):
        for part in open_all(directory).values():
            part[...]


def ends_on_a_changed_file(rank: int, world_size: int, directory: str, victim: int) -> Any:
    def check_unchanged(self: FileSource) -> None:
        raise SourceChanged("the file was replaced", uri=self.uri)

    told = Path(f"{directory}-told")
    if rank == victim:
        FileSource.check_unchanged = check_unchanged  # type: ignore[method-assign]
    try:
        with patched_libraries(group=dist.group.WORLD):
            open_all(directory)["small.0"][...]
    except PeerLost:
        told.touch()
        raise
    except SourceChanged:
        # Stay alive, so that the other rank cannot detect the error by the exit of this process.
        deadline = time.monotonic() + 15
        while not told.exists():
            assert time.monotonic() < deadline, "the other rank was not told"
            time.sleep(0.05)
        raise


@pytest.mark.parametrize(
    ("body", "victim", "error"),
    [
        (fails_in_its_program, 1, "RuntimeError"),
        (fails_before_it_reads, 0, "ValueError"),
        (patched, 1, "SourceUnavailable"),
        (ends_on_a_changed_file, 1, "SourceChanged"),
    ],
)
def test_failure_on_one_rank_fails_all_ranks(directory: Path, body: Any, victim: int, error: str) -> None:
    errors = raised(run(body, 2, str(directory), victim))
    assert errors[victim] == error
    assert errors[1 - victim] == "PeerLost"


def test_dead_rank_raises_peer_lost_on_remaining_ranks(directory: Path) -> None:
    outcomes = run(patched, 3, str(directory), 1, "kill", **SOON)
    assert [outcome.ended for outcome in outcomes] == ["raised", "died", "raised"], outcomes
    assert [outcomes[rank].error for rank in (0, 2)] == ["PeerLost"] * 2
    assert all(outcome.seconds < BOUND_S for outcome in outcomes)


def test_ranks_loading_different_weights_raise(directory: Path, tmp_path: Path) -> None:
    save_file({"small.0": torch.ones(3)}, tmp_path / "model.safetensors")
    assert raised(run(other_weights, 2, str(directory), str(tmp_path))) == ["PlanError"] * 2
    assert raised(run(loads_more, 2, str(directory))) == ["PlanError"] * 2


def verified(rank: int, world_size: int, directory: str, verify: bool) -> Any:
    report = everything(rank, world_size, directory, verify=verify)
    return report.verified, report.why


def test_shared_read_verifies_manifest_digests(directory: Path, tmp_path: Path) -> None:
    for path in directory.glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert raised(run(verified, 2, str(tmp_path), True)) == ["NotFound"] * 2
    assert [word for word, _ in returned(run(verified, 2, str(tmp_path), False))] == [False] * 2
    penstock.manifest(tmp_path)
    assert [word for word, _ in returned(run(verified, 2, str(tmp_path), True))] == [True] * 2
    path = tmp_path / "model-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-100_000] ^= 1
    path.write_bytes(data)
    errors = raised(run(verified, 2, str(tmp_path), False))
    assert sorted(errors) == ["IntegrityError", "PeerLost"]
