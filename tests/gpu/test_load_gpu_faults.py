"""Faults while loading to one GPU: typed errors, no leaks, and correct streams."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support import compare
from tests.support.compare import by_safetensors, own_threads

import penstock
from penstock.config import Settings
from penstock.engine.place import CudaPlace
from penstock.errors import SourceUnavailable
from penstock.storage import weight_set
from penstock.storage.files import FileSource
from penstock.types import MIB, Box

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
assert_same = partial(compare.assert_same, device=DEVICE)
NUM_TENSORS = 12
TENSOR_BYTES = 8 * MIB


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return two files of six tensors of 8 MiB."""
    torch.manual_seed(2)
    for part in range(2):
        tensors = {f"t{part}{i}": torch.randint(0, 1 << 62, (TENSOR_BYTES // 8,)) for i in range(NUM_TENSORS // 2)}
        save_file(tensors, tmp_path / f"model-{part}.safetensors")
    return tmp_path


def settled() -> int:
    """Return the allocated device bytes after garbage is freed."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def no_threads_left() -> bool:
    deadline = time.monotonic() + 10
    while own_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not own_threads()


def digested(directory: Path) -> None:
    with weight_set.open_weights(str(directory), settings=Settings.read()) as weights:
        raw = weight_set.encode(weight_set.build(weights))
    Path(weight_set.sidecar_uri(str(directory))).write_bytes(raw)


def flip_a_bit(path: Path, at: int = -TENSOR_BYTES // 2) -> None:
    """Flip a byte of the file (below 0 from its end), keeping size and times, so that only digests can detect it."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def failing_reads(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """A source whose body reads fail from the `after`-th on."""
    original, count = FileSource.readv, [0]

    def readv(self: FileSource, offset: int, buffers: Any) -> str:
        if sum(len(b) for b in buffers) >= MIB:
            count[0] += 1
            if count[0] > after:
                raise SourceUnavailable("the disk is gone", uri=self.uri)
        return original(self, offset, buffers)

    monkeypatch.setattr(FileSource, "readv", readv)


def targets() -> dict[str, torch.Tensor]:
    return {
        f"t{part}{i}": torch.zeros(TENSOR_BYTES // 8, dtype=torch.int64, device=DEVICE)
        for part in range(2)
        for i in range(NUM_TENSORS // 2)
    }


def do_load(path: Path, **options: Any) -> None:
    penstock.load(path, device=DEVICE, **options)


def do_stream(path: Path, **options: Any) -> None:
    with penstock.stream(path, device=DEVICE, **options) as tensors:
        for _ in tensors:
            pass


def do_load_into(path: Path, **options: Any) -> None:
    penstock.load_into(targets(), path, **options)


DOES = [do_load, do_stream, do_load_into]


def test_dropped_tensor_frees_device_memory(checkpoint: Path, allocated: int) -> None:
    weights = penstock.load(checkpoint, device=DEVICE)
    held = settled() - allocated
    assert NUM_TENSORS * TENSOR_BYTES <= held <= NUM_TENSORS * TENSOR_BYTES + 2 * MIB
    for count, name in enumerate(list(weights), start=1):
        del weights[name]
        assert held - (settled() - allocated) >= count * TENSOR_BYTES - 2 * MIB
    assert settled() == allocated


def test_staging_stays_within_memory_bytes(checkpoint: Path) -> None:
    weights = penstock.load(checkpoint, device=DEVICE, settings=penstock.ReadSettings(memory_bytes=24 * MIB))
    assert 0 < weights.report.peak_staging_bytes <= 24 * MIB
    assert_same(weights, by_safetensors(checkpoint))


def test_too_small_budget_is_refused(checkpoint: Path, allocated: int) -> None:
    with pytest.raises(penstock.errors.BudgetTooSmall) as caught:
        penstock.load(checkpoint, device=DEVICE, settings=penstock.ReadSettings(memory_bytes=4096))
    assert settled() == allocated
    found = penstock.load(
        checkpoint, device=DEVICE, settings=penstock.ReadSettings(memory_bytes=caught.value.minimum_bytes)
    )
    assert_same(found, by_safetensors(checkpoint))


def test_first_tensors_survive_later_allocations() -> None:
    """Copies start before the memory of all slabs is allocated, and must keep the bytes that have arrived."""
    place = CudaPlace(torch.device(DEVICE), [MIB, MIB, MIB])
    early = place.slab(1)
    early.fill_(7)
    place.allocate()
    assert place.slab(1) is early
    assert {place.slab(index).numel() for index in range(3)} == {MIB}
    assert len({place.slab(index).data_ptr() for index in range(3)}) == 3


@pytest.mark.parametrize("do", DOES[:2])
def test_device_oom_raises_typed_error_without_leak(checkpoint: Path, allocated: int, do: Callable[..., None]) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    room = torch.cuda.memory_reserved() + NUM_TENSORS * TENSOR_BYTES // 2
    hold = []
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        if do is do_stream:
            # A stream holds only a window of slabs, so leave no space for one slab.
            hold = [torch.empty(NUM_TENSORS * TENSOR_BYTES // 2 - 4 * MIB, dtype=torch.uint8, device=DEVICE)]
        with pytest.raises(penstock.errors.DeviceOutOfMemory) as caught:
            do(checkpoint)
        assert not caught.value.mutated
        del caught  # the traceback holds the frames that hold the tensors
        hold.clear()
        assert settled() == allocated
        assert no_threads_left()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same(penstock.load(checkpoint, device=DEVICE), by_safetensors(checkpoint))


@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("how", ["break", "close", "drop"])
def test_abandoned_stream_frees_threads_and_device_memory(
    checkpoint: Path, allocated: int, how: str, taken: int
) -> None:
    tensors = penstock.stream(checkpoint, device=DEVICE, settings=penstock.ReadSettings(memory_bytes=32 * MIB))
    kept = [next(tensors) for _ in range(taken)]
    if how == "break":
        for pair in tensors:
            del pair
            break
    if how == "close":
        tensors.close()
    del tensors
    assert no_threads_left()
    wanted = by_safetensors(checkpoint)
    assert all(torch.equal(tensor.cpu(), wanted[name]) for name, tensor in kept)
    kept.clear()
    assert settled() == allocated
    assert_same(penstock.load(checkpoint, device=DEVICE), wanted)


@pytest.mark.parametrize("do", DOES)
def test_source_failing_midway_raises_and_frees_device_memory(
    checkpoint: Path, allocated: int, monkeypatch: pytest.MonkeyPatch, do: Callable[..., None]
) -> None:
    monkeypatch.setenv("PENSTOCK_IO_URING", "0")  # reads by the kernel cannot be made to fail here
    failing_reads(monkeypatch, after=4)
    with pytest.raises(SourceUnavailable) as caught:
        do(checkpoint, settings=penstock.ReadSettings(memory_bytes=16 * MIB))
    assert caught.value.mutated is (do is do_load_into)
    assert "model-" in str(caught.value)
    del caught
    assert no_threads_left()
    assert settled() == allocated


@pytest.mark.parametrize("do", DOES)
def test_device_digests_detect_flipped_bit(checkpoint: Path, do: Callable[..., None]) -> None:
    digested(checkpoint)
    do(checkpoint, verify=True)
    flip_a_bit(checkpoint / "model-1.safetensors")
    do(checkpoint, verify=False)
    for options in ({}, {"verify": True}):
        with pytest.raises(penstock.IntegrityError) as caught:
            do(checkpoint, **options)
        assert caught.value.mutated is (do is do_load_into)
        assert caught.value.tensor is not None


@pytest.mark.parametrize("verb", ["load", "stream"])
def test_short_long_and_sliced_tensors_are_verified(tmp_path: Path, verb: str) -> None:
    """Scalars, short and long tensors share slabs. Matrices have separate slabs, and one is sliced."""
    path = tmp_path / "model.safetensors"
    torch.manual_seed(4)
    shapes = {
        f"{i:02}.{kind}": n for i in range(20) for kind, n in (("scale", 4), ("weight", 70_001 + i), ("b", 239 + i))
    }
    tensors = {name: torch.randint(0, 256, (n,), dtype=torch.uint8) for name, n in shapes.items()}
    tensors |= {f"matrix.{i}": torch.randint(0, 256, (3 * MIB, 4), dtype=torch.uint8) for i in range(3)}
    save_file(tensors, path)
    digested(tmp_path)
    boxes = {"matrix.1": Box(start=(MIB, 0), stop=(2 * MIB, 4))}
    wanted = tensors | {"matrix.1": tensors["matrix.1"][MIB : 2 * MIB]}

    def found() -> dict[str, torch.Tensor]:
        if verb == "load":
            return dict(penstock.load(path, device=DEVICE, boxes=boxes))
        with penstock.stream(path, device=DEVICE, boxes=boxes) as stream:
            return dict(stream)

    assert_same(found(), wanted)
    table = penstock.inspect(path).manifest.tensors
    for name in ("00.scale", "07.weight", "07.b", "19.b", "matrix.0", "matrix.2"):
        row = table.names.index(name)
        at = int(table.offset[row] + table.nbytes[row] - 1)
        flip_a_bit(path, at)
        with pytest.raises(penstock.IntegrityError) as caught:
            found()
        assert caught.value.tensor == name
        flip_a_bit(path, at)
    assert_same(found(), wanted)


def test_verified_stream_limits_read_ahead(checkpoint: Path, allocated: int) -> None:
    digested(checkpoint)
    torch.cuda.reset_peak_memory_stats()
    with penstock.stream(checkpoint, device=DEVICE, settings=penstock.ReadSettings(memory_bytes=16 * MIB)) as stream:
        for _, tensor in stream:
            del tensor
    assert torch.cuda.max_memory_allocated() - allocated < NUM_TENSORS * TENSOR_BYTES // 2


def test_unverified_load_report_contains_reason(checkpoint: Path) -> None:
    plain = penstock.load(checkpoint, device=DEVICE).report
    assert not plain.verified
    assert plain.why
    digested(checkpoint)
    assert penstock.load(checkpoint, device=DEVICE).report.verified


def test_tensors_are_usable_on_any_stream(checkpoint: Path) -> None:
    wanted = {name: int(tensor.sum()) for name, tensor in by_safetensors(checkpoint).items()}
    streams = [torch.cuda.Stream() for _ in range(3)]
    for side in (torch.cuda.default_stream(), *streams):
        with torch.cuda.stream(side):
            weights = penstock.load(checkpoint, device=DEVICE)
        other = streams[0] if side is not streams[0] else streams[1]
        with torch.cuda.stream(other):
            sums = {name: tensor.sum() for name, tensor in weights.items()}
        torch.cuda.synchronize()
        assert {name: int(value) for name, value in sums.items()} == wanted
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_memory_of_queued_kernels_is_not_reused(checkpoint: Path) -> None:
    """The load may reuse a block freed on the caller's stream only after the work queued on that stream."""
    wanted = by_safetensors(checkpoint)
    torch.cuda.empty_cache()
    blocks = [torch.empty(TENSOR_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(NUM_TENSORS)]
    torch.cuda._sleep(400_000_000)
    for block in blocks:
        block.fill_(255)
    del block
    blocks.clear()
    assert_same(penstock.load(checkpoint, device=DEVICE), wanted)


def test_load_into_waits_for_kernels_using_targets(checkpoint: Path) -> None:
    found = targets()
    torch.cuda._sleep(400_000_000)
    for tensor in found.values():
        tensor.fill_(-1)
    penstock.load_into(found, checkpoint)
    assert_same(found, by_safetensors(checkpoint))
