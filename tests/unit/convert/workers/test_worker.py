"""A worker in this process: bits that do not depend on digests, wrong bytes that do not come through, memory kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.staged_device import Device

from penstock.config import Settings
from penstock.digest.leaf import LEAF_BYTES
from penstock.engine.trace import Trace
from penstock.errors import BudgetTooSmall, IntegrityError
from penstock.memory.staging import StagingPool
from penstock.storage.output import OutputSet
from penstock.storage.weight_set import WeightSet, build, encode, open_weights
from penstock.types import MIB
from penstock_convert.job import ConversionJob, plan_job
from penstock_convert.operations.spec import operation_of
from penstock_convert.result import METADATA
from penstock_convert.workers.compute import Buffers, HostCompute, Read, Write
from penstock_convert.workers.process import _post_all
from penstock_convert.workers.staged_copies import StagedCopies
from penstock_convert.workers.worker import COPY_BYTES, Worker, _TaskRun

Words = Sequence[Mapping[str, Any]]
FP8: Words = [{"op": "store", "format": "fp8-block128"}]
SLERP: Words = [{"op": "slerp", "t": 0.3}]
LINEAR: Words = [{"op": "linear", "weights": [0.25, 0.75]}]
RESHARD: Words = [{"op": "reshard", "to": 2}]


def write(directory: Path, seed: int, leaf_bytes: int = 0) -> Path:
    """A small checkpoint; with `leaf_bytes`, a manifest beside it."""
    directory.mkdir()
    chance = torch.Generator().manual_seed(seed)
    tensors = {
        "layers.0.q_proj.weight": torch.randn(384, 256, generator=chance).bfloat16(),
        "layers.0.o_proj.weight": torch.randn(256, 130, generator=chance).bfloat16(),
        "norm.weight": torch.randn(257, generator=chance),
        "scalar": torch.tensor(3.0),
    }
    save_file(tensors, directory / "model.safetensors")
    if leaf_bytes:
        add_manifest(directory, leaf_bytes)
    return directory


def add_manifest(directory: Path, leaf_bytes: int) -> None:
    with open_weights(str(directory), settings=Settings()) as weights:
        raw = encode(build(weights, leaf_bytes=leaf_bytes))
    (directory / "penstock.manifest").write_bytes(raw)


def flip(source: Path, tensor: str, at: int) -> None:
    """One bit of a tensor's byte."""
    with open_weights(str(source), settings=Settings()) as weights:
        table = weights.manifest.tensors
        offset = int(table.offset[table.names.index(tensor)])
    with open(source / "model.safetensors", "r+b") as file:
        file.seek(offset + at)
        byte = file.read(1)[0]
        file.seek(offset + at)
        file.write(bytes([byte ^ 16]))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, sources: Sequence[Path]) -> list[WeightSet]:
    return [stack.enter_context(open_weights(str(path), settings=Settings())) for path in sources]


def run(
    stack: ExitStack,
    sources: Sequence[Path],
    words: Words,
    into: Path,
    *,
    verify: bool = True,
    memory_bytes: int = 0,
    task_bytes: int = 1 << 15,
) -> tuple[ConversionJob, dict[str, torch.Tensor], int]:
    """A job by one worker: what it gave, and the most memory its tasks held at once."""
    sets = opened(stack, sources)
    job = plan_job(operation_of(words), [one.manifest for one in sets], task_bytes=task_bytes, verify=verify)
    out = OutputSet(into, job.files.table, job.files.body_nbytes, METADATA, job.files.groups)
    stack.callback(out.close)
    out.create()
    out.open()
    done, all_done = set[int](), threading.Event()

    def ended(task: int, digests: np.ndarray) -> None:
        done.add(task)
        if len(done) == len(job.tasks):
            all_done.set()

    with Worker(
        job,
        sets,
        out,
        device=torch.device("cpu"),
        memory_bytes=memory_bytes or 64 * MIB,
        stall_s=60.0,
        on_began=lambda task: None,
        on_done=ended,
        trace=Trace(enabled=False),
    ) as worker:
        for task in range(len(job.tasks)):
            worker.post(task)
        while not all_done.wait(0.01):
            worker.ticket.check()
    return (
        job,
        {f"{p.parent.name}/{n}": t for p in into.rglob("*.safetensors") for n, t in load_file(p).items()},
        (worker.buffers.peak_bytes),
    )


class Staged(HostCompute):
    """A backend that computes in host memory, but fills and drains it as one of a device does."""

    def __init__(self, memory_bytes: int, piece_bytes: int, num_buffers: int) -> None:
        super().__init__(memory_bytes)
        pool = StagingPool.map(num_buffers * piece_bytes, piece_bytes)
        self.copies = StagedCopies(pool, Device(delay_s=1e-4), 0, up=1, down=2, stall_s=30.0)
        self.staged_bytes, self.steps = num_buffers * piece_bytes, set[int]()

    def fill(self, inputs: torch.Tensor, read: Read, leaf_bytes: int) -> None:
        step = max(self.copies.pool.buffer_bytes // leaf_bytes, 1) * leaf_bytes
        self.steps.add(-(-len(inputs) // step))
        self.copies.fill(inputs.data_ptr(), len(inputs), read, step=step)

    def drain(self, raw: torch.Tensor, write: Write) -> None:
        self.copies.drain(raw.data_ptr(), len(raw), write)

    def close(self) -> None:
        self.copies.close()


@pytest.mark.parametrize("leaf_bytes", [0, 4096])
@pytest.mark.parametrize("words", [FP8, SLERP, LINEAR, RESHARD])
def test_input_staged_in_pieces_gives_identical_output(stack, tmp_path, monkeypatch, words, leaf_bytes) -> None:
    count = 2 if words in (SLERP, LINEAR) else 1
    sources = [write(tmp_path / f"source{i}", i, leaf_bytes) for i in range(count)]
    _, expected, _ = run(stack, sources, words, tmp_path / "whole" / "out")
    backend = Staged(64 * MIB, 4096, 3)
    monkeypatch.setattr(Worker, "_open_backend", lambda worker: backend)
    _, found, _ = run(stack, sources, words, tmp_path / "staged" / "out")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert max(backend.steps) > 1  # some reads were cut into pieces
    assert backend.copies.pool.num_in_use == 0


def test_corrupt_byte_in_staged_piece_raises(stack, tmp_path, monkeypatch) -> None:
    source = write(tmp_path / "source", 1, 4096)
    flip(source, "layers.0.q_proj.weight", 9000)
    monkeypatch.setattr(Worker, "_open_backend", lambda worker: Staged(64 * MIB, 4096, 3))
    with pytest.raises(IntegrityError):
        run(stack, [source], FP8, tmp_path / "out")


@pytest.mark.parametrize(("leaf_bytes", "is_copy"), [(0, True), (LEAF_BYTES, True), (4096, False)])
def test_copy_operation_buffers_only_few_leaves(stack, tmp_path, monkeypatch, leaf_bytes, is_copy) -> None:
    source = tmp_path / "source"
    source.mkdir()
    made = {
        "large": torch.randint(256, (3 * MIB + 7,), dtype=torch.uint8),
        "rows": torch.randn(700, 1000),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    save_file(made, source / "model.safetensors")
    if leaf_bytes:
        add_manifest(source, leaf_bytes)
    copied, copy = list[int](), _TaskRun._copy

    def spy(task_run: _TaskRun) -> None:
        copied.append(task_run.memory_bytes)
        copy(task_run)

    monkeypatch.setattr(_TaskRun, "_copy", spy)
    job, found, _ = run(stack, [source], [], tmp_path / "out", task_bytes=2 * MIB)
    assert all(torch.equal(found[f"out/{name}"], tensor) for name, tensor in made.items()) and len(found) == len(made)
    # Rows of 4,000 bytes are not cut at leaves, so these are read whole where they are compared.
    assert bool(copied) == is_copy and (leaf_bytes or len(copied) == len(job.tasks))
    assert all(nbytes <= COPY_BYTES for nbytes in copied)
    if leaf_bytes:
        flip(source, "large", 2 * MIB + 5)
        with pytest.raises(IntegrityError, match="large"):
            run(stack, [source], [], tmp_path / "refused", task_bytes=2 * MIB)


def test_job_below_minimum_memory_raises_budget_too_small(stack, tmp_path, monkeypatch) -> None:
    sources = [tmp_path / f"source{i}" for i in range(2)]
    for i, source in enumerate(sources):
        source.mkdir()
        chance = torch.Generator().manual_seed(i)
        save_file({"weight": torch.randn(1024, 1024, generator=chance).bfloat16()}, source / "model.safetensors")
    job, expected, _ = run(stack, sources, SLERP, tmp_path / "whole" / "out")
    least, largest = int(job.least_bytes.max()), int(job.memory_bytes.max())
    backend = Staged(MIB, 4096, 2)
    monkeypatch.setattr(Worker, "_open_backend", lambda worker: backend)
    peaks = list[int]()
    close = Worker.close
    monkeypatch.setattr(Worker, "close", lambda worker: (peaks.append(worker._peak_part_bytes), close(worker)))
    memory_bytes = least + backend.staged_bytes
    assert memory_bytes < largest
    _, found, _ = run(stack, sources, SLERP, tmp_path / "parts" / "out", memory_bytes=memory_bytes)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert 0 < peaks[-1] <= memory_bytes - backend.staged_bytes
    with pytest.raises(BudgetTooSmall) as caught:
        run(stack, sources, SLERP, tmp_path / "refused", memory_bytes=memory_bytes - 1)
    assert caught.value.minimum_bytes == memory_bytes


def test_worker_reports_out_of_memory(stack, tmp_path, monkeypatch) -> None:
    def none(buffers: Buffers, nbytes: int) -> torch.Tensor:
        raise MemoryError(nbytes)

    sets = opened(stack, [write(tmp_path / "source", 1)])
    job = plan_job(operation_of(FP8), [one.manifest for one in sets])
    out = OutputSet(tmp_path / "out", job.files.table, job.files.body_nbytes, METADATA, job.files.groups)
    todo: SimpleQueue[int | None] = SimpleQueue()
    with Worker(
        job,
        sets,
        out,
        device=torch.device("cpu"),
        memory_bytes=64 * MIB,
        stall_s=60.0,
        on_began=lambda task: None,
        on_done=lambda task, digests: None,
        trace=Trace(enabled=False),
    ) as worker:
        monkeypatch.setattr(Buffers, "get", none)
        todo.put(0)
        _post_all(worker, todo)
        with pytest.raises(RuntimeError) as caught:
            worker.ticket.check()
        assert isinstance(caught.value.__cause__, MemoryError)


def raw(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name.partition("/")[2]: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


@pytest.mark.parametrize("leaf_bytes", [1000, 4096, 1 << 30])
@pytest.mark.parametrize(("words", "count"), [([], 1), (FP8, 1), (LINEAR, 2), (SLERP, 2)])
def test_verified_and_unverified_jobs_are_bit_identical(words, count, leaf_bytes, stack, tmp_path) -> None:
    sources = [write(tmp_path / f"s{i}", i, leaf_bytes) for i in range(count)]
    plain, without, _ = run(stack, sources, words, tmp_path / "plain", verify=False)
    job, made, peak_bytes = run(stack, sources, words, tmp_path / "made")
    assert raw(made) == raw(without) and len(job.tasks) > 2
    assert job.leaf_sizes == (leaf_bytes,) * count and plain.leaf_sizes == (0,) * count
    assert (job.read_bytes >= plain.read_bytes).all()
    assert (job.read_bytes.sum() > plain.read_bytes.sum()) == (words is not SLERP)  # which takes tensors whole
    assert plain.read_bytes.sum() == job.tasks.in_bytes.sum()
    assert peak_bytes <= job.memory_bytes.sum()


@pytest.mark.parametrize("at", [0, 999, 1000, 131_072, 384 * 256 * 2 - 1])
@pytest.mark.parametrize(("words", "count"), [([], 1), (FP8, 1), (LINEAR, 2), (SLERP, 2)])
def test_flipped_input_bit_fails_job(words, count, at, stack, tmp_path) -> None:
    sources = [write(tmp_path / f"s{i}", i, 1000) for i in range(count)]
    flip(sources[-1], "layers.0.q_proj.weight", at)
    with pytest.raises(IntegrityError) as caught:
        run(stack, sources, words, tmp_path / "out")
    assert caught.value.tensor == "layers.0.q_proj.weight"
    assert caught.value.uri == str(sources[-1] / "model.safetensors")
    leaf = at // 1000 * 1000
    assert f"[{leaf}, {min(leaf + 1000, 384 * 256 * 2)})" in caught.value.message


def test_only_sources_with_digests_are_verified(stack, tmp_path) -> None:
    whole = write(tmp_path / "whole", 1)
    run(stack, [whole], RESHARD, tmp_path / "ranks")
    ranks = sorted((tmp_path / "ranks").iterdir())
    with open_weights(str(ranks[1]), settings=Settings()) as weights:
        (ranks[1] / "penstock.manifest").write_bytes(encode(build(weights, leaf_bytes=512)))
    back = [{"op": "reshard", "to": 1}]
    job, made, _ = run(stack, ranks, back, tmp_path / "back")
    assert job.leaf_sizes == (0, 512)
    assert raw(made) == {
        name: one.reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, one in load_file(whole / "model.safetensors").items()
    }
    flip(ranks[1], "layers.0.o_proj.weight", 77)
    with pytest.raises(IntegrityError, match=r"\[0, 512\)"):
        run(stack, ranks, back, tmp_path / "again")
    flip(ranks[1], "layers.0.o_proj.weight", 77)
    flip(ranks[0], "layers.0.o_proj.weight", 77)  # nothing says that it is wrong
    run(stack, ranks, back, tmp_path / "unseen")


def test_unread_tensors_are_not_verified(stack, tmp_path) -> None:
    source = write(tmp_path / "source", 1, 1000)
    flip(source, "layers.0.q_proj.weight", 5000)
    _, made, _ = run(stack, [source], [{"op": "rename", "rules": [["^.*q_proj.*$", ""]]}], tmp_path / "out")
    assert len(made) == 3


def test_verification_buffers_count_toward_memory_budget(stack, tmp_path) -> None:
    source = write(tmp_path / "source", 1, 1 << 30)
    with pytest.raises(BudgetTooSmall) as caught:
        run(stack, [source], [], tmp_path / "out", memory_bytes=200_000)
    need = caught.value.minimum_bytes
    assert need > 384 * 256 * 2  # a leaf is the whole tensor, and a task has some of its rows
    job, _, peak_bytes = run(stack, [source], [], tmp_path / "out", memory_bytes=need)
    assert peak_bytes <= need == int(job.memory_bytes.max())
    run(stack, [source], [], tmp_path / "fits", verify=False, memory_bytes=200_000)


def test_verifying_job_does_not_resume_unverified_job(stack, tmp_path) -> None:
    (with_leaves, without) = opened(stack, [write(tmp_path / "a", 1, 1000), write(tmp_path / "b", 1)])
    keys = [
        plan_job(operation_of([]), [one.manifest], verify=verify).key
        for one in (with_leaves, without)
        for verify in (True, False)
    ]
    assert keys[0] != keys[1] and keys[2] == keys[3] and keys[0] != keys[2]
