"""Checkers locate any wrong byte of a tensor by its leaf. The device's checker runs with a fake device, and
`tests/gpu` tests the real device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar, cast

import numpy as np
import pytest
import torch

from penstock.digest.cuda import DEFAULT_TUNING, Tuning
from penstock.digest.leaf import leaf_digests, num_leaves
from penstock.engine import check
from penstock.engine.check import SMALL_SLAB_BLOCKS, CudaChecker, Expected, TensorChecker
from penstock.engine.place import CudaPlace
from penstock.errors import DeviceOutOfMemory, IntegrityError
from penstock.types import DType, Manifest, TensorTable

LEAF_BYTES = 10
SIZES = [25, 0, 10, 3]


@pytest.fixture
def body() -> bytearray:
    return bytearray(np.random.default_rng(1).bytes(sum(SIZES)))


def checker(body: bytearray) -> TensorChecker:
    nbytes = np.array(SIZES, np.int64)
    offset = np.cumsum(nbytes) - nbytes
    table = TensorTable(
        names=("a", "none", "b", "c"),
        dtypes=(DType.U8,) * 4,
        shapes=tuple((size,) for size in SIZES),
        file_index=np.zeros(4, np.int64),
        offset=offset + 100,
        nbytes=nbytes,
    )
    leaves = [np.zeros(count, np.uint64) for count in num_leaves(nbytes, LEAF_BYTES).tolist()]
    for start, size, out in zip(offset.tolist(), SIZES, leaves, strict=True):
        leaf_digests(memoryview(body)[start : start + size], LEAF_BYTES, out)
    found = Manifest(files=(), tensors=table, leaf_bytes=LEAF_BYTES, leaves=np.concatenate(leaves), revision="")
    return TensorChecker(found)


def test_correct_leaves_pass_in_batches_of_any_size(body: bytearray) -> None:
    held, view = checker(body), memoryview(body)
    held.check(0, 0, view[:25], uri="f")
    held.check(0, 10, view[10:20], uri="f")
    held.check(0, 20, view[20:25], uri="f")
    held.check(1, 0, view[25:25], uri="f")
    held.check(2, 0, view[25:35], uri="f")
    held.check(3, 0, view[35:], uri="f")


@pytest.mark.parametrize("at", range(sum(SIZES)))
def test_verification_locates_flipped_bit(body: bytearray, at: int) -> None:
    held = checker(body)
    body[at] ^= 4
    row, start, name = (0, 0, "a") if at < 25 else (2, 25, "b") if at < 35 else (3, 35, "c")
    with pytest.raises(IntegrityError) as caught:
        held.check(row, 0, memoryview(body)[start : start + SIZES[row]], uri="weights")
    leaf = (at - start) // LEAF_BYTES * LEAF_BYTES
    stop = min(leaf + LEAF_BYTES, SIZES[row])
    error = caught.value
    assert (error.tensor, error.uri, error.byte_range) == (name, "weights", (100 + start + leaf, 100 + start + stop))
    assert error.message.startswith(f"bytes [{leaf}, {stop}) of the tensor differ")
    assert error.blame == "source" and not error.mutated and error.hint


def test_wrong_leaf_in_partial_batch_raises_integrity_error(body: bytearray) -> None:
    with pytest.raises(IntegrityError, match=r"\[10, 20\)"):
        checker(body).check(0, 10, memoryview(body)[:10], uri="f")


class Place:
    """The slabs of a `CudaPlace`, in host memory."""

    def __init__(self, num_slabs: int, *, has_all: bool) -> None:
        self.device = torch.device("cpu")
        self.is_out_of_memory = False
        self.num_made = 0
        self._slabs = [torch.zeros(16, dtype=torch.uint8) for _ in range(num_slabs)]
        self._has_all = has_all

    def wait_for_slabs(self) -> bool:
        return self._has_all

    def slab(self, index: int) -> torch.Tensor:
        self.num_made += 1
        return self._slabs[index]

    def memory_error(self, nbytes: int) -> DeviceOutOfMemory:
        return DeviceOutOfMemory(f"{nbytes} are needed")


class FakeLayout:
    """A fake layout that rejects digest slabs above `most` blocks."""

    most = 0
    made: ClassVar[list[tuple[list[int], int]]] = []

    def __init__(self, expected: object, slabs: Sequence[int], addresses: object, device: object, tuning: Tuning):
        if tuning.slab_blocks > self.most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self.made.append((list(slabs), tuning.slab_blocks))

    def warm_up(self) -> None: ...

    def ranges(self, slabs: Sequence[int]) -> list[tuple[int, int]]:
        return []


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's CUDA functions that a `CudaChecker` calls."""
    event = SimpleNamespace(record=lambda stream: None, query=lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(check, "make_stream", lambda device: object())
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda of: nullcontext())
    monkeypatch.setattr(check, "_Layout", FakeLayout)
    monkeypatch.setattr(check, "warm_up", lambda device: None)
    monkeypatch.setattr(FakeLayout, "made", [])
    check._stream_of.cache_clear()


PLAN = cast("Expected", SimpleNamespace(plan=SimpleNamespace(slab_nbytes=[16, 16, 16])))


def checker_of(place: Place, monkeypatch: pytest.MonkeyPatch, most: int) -> CudaChecker:
    monkeypatch.setattr(FakeLayout, "most", most)
    return CudaChecker(PLAN, cast("CudaPlace", place))


def test_verification_of_complete_slabs_is_planned_once(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    held = checker_of(Place(3, has_all=True), monkeypatch, DEFAULT_TUNING.slab_blocks)
    pending = held.prepare()
    assert pending is not None and pending.done()
    assert held.check([1]) is None
    assert FakeLayout.made == [([0, 1, 2], DEFAULT_TUNING.slab_blocks)]


def test_leaves_of_incomplete_slabs_are_planned_per_batch(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(3, has_all=False)
    held = checker_of(place, monkeypatch, DEFAULT_TUNING.slab_blocks)
    held.prepare()
    assert place.num_made == 0
    held.check([2, 1])
    assert [slabs for slabs, _ in FakeLayout.made] == [[2, 1]]


def test_verification_with_low_memory_uses_less_scratch(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    checker_of(Place(3, has_all=True), monkeypatch, SMALL_SLAB_BLOCKS).prepare()
    assert FakeLayout.made == [([0, 1, 2], SMALL_SLAB_BLOCKS)]


def test_failed_scratch_allocation_raises_typed_error(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceOutOfMemory, match=f"{4 << 20} are needed"):
        checker_of(Place(3, has_all=True), monkeypatch, 0).prepare()


def test_failed_slab_allocation_prepares_no_kernels(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "warm_up", lambda device: pytest.fail("kernels were loaded"))
    place = Place(3, has_all=False)
    place.is_out_of_memory = True
    assert checker_of(place, monkeypatch, DEFAULT_TUNING.slab_blocks).prepare() is None
    assert not FakeLayout.made


def test_failed_kernel_load_raises_typed_error(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(device: torch.device) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(check, "warm_up", warm_up)
    with pytest.raises(DeviceOutOfMemory, match=f"{2 << 20} are needed"):
        checker_of(Place(3, has_all=False), monkeypatch, DEFAULT_TUNING.slab_blocks).prepare()
