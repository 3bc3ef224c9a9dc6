"""The window of a shared read: which tensors it keeps, drops and returns, and how its waits end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.config import Settings
from penstock.errors import Cancelled, SourceUnavailable
from penstock.loader.shared_window import TensorWindow, TurnPiece, region_of
from penstock.types import Box

NBYTES = 100
SETTINGS = replace(Settings.read(), memory_bytes=5 * NBYTES, stall_s=60.0)
"""The limit of the window is two and a half tensors."""


def new_window(settings: Settings = SETTINGS) -> TensorWindow:
    return TensorWindow([NBYTES] * 6, range(6), settings, NBYTES)


def piece_of(row: int) -> TurnPiece:
    return TurnPiece(row, 0, NBYTES, 0)


def arrive(window: TensorWindow, *rows: int) -> None:
    window.keep((piece_of(row), torch.full((NBYTES,), row, dtype=torch.uint8)) for row in rows)
    window.arrived(map(piece_of, rows))


def has_space(window: TensorWindow, row: int) -> bool:
    return window.wait_for_space([piece_of(row)], time.monotonic())


def take(window: TensorWindow, row: int) -> torch.Tensor | None:
    return window.take(row, None, lambda buffer, region: buffer, is_whole=True)


def take_slice(window: TensorWindow, row: int) -> torch.Tensor | None:
    return window.take(row, None, lambda buffer, region: buffer[:10], is_whole=False)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def take_in_thread(pool: ThreadPoolExecutor, window: TensorWindow, row: int) -> Future[torch.Tensor | None]:
    """Return once the window knows that the thread waits: a later round then finds space."""
    future = pool.submit(take, window, row)
    assert window.wait_for_space([piece_of(row - 1)], time.monotonic() + 20)
    return future


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_region_keeps_bytes_of_slice(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    stop = data.draw(st.integers(start + 1, shape[dim]))
    full = Box.full(tuple(shape))
    box = Box(
        start=(*full.start[:dim], start, *full.start[dim + 1 :]),
        stop=(*full.stop[:dim], stop, *full.stop[dim + 1 :]),
    )
    tensor = torch.arange(math.prod(shape), dtype=torch.int16).view(shape)
    region = region_of(box, shape, tensor.nbytes)
    if region is None:
        assert box == full
        return
    raw, kept = tensor.view(-1).view(torch.uint8), torch.zeros(region.nbytes, dtype=torch.uint8)
    cuts = sorted({0, tensor.nbytes, *data.draw(st.lists(st.integers(0, tensor.nbytes), max_size=4))})
    for first, last in pairwise(cuts):
        region.place(kept, first, raw[first:last])
    assert torch.equal(kept.view(torch.int16).view(box.shape), tensor[box.slices])


def test_full_window_has_space_after_take() -> None:
    window = new_window()
    arrive(window, 0, 1)
    assert not has_space(window, 2)
    tensor = take(window, 0)
    assert tensor is not None
    assert not tensor.any()
    assert has_space(window, 2)
    assert window.peak_bytes == 2 * NBYTES


def test_taken_slice_lets_window_drop_tensor() -> None:
    window = new_window()
    arrive(window, 0, 1)
    assert take_slice(window, 1) is not None
    assert has_space(window, 2)
    assert take(window, 1) is None
    assert window.again_bytes == NBYTES


def test_wait_for_later_tensor_drops_earlier(pool: ThreadPoolExecutor) -> None:
    window = new_window()
    arrive(window, 0, 1)
    future = take_in_thread(pool, window, 5)
    assert take(window, 0) is None
    arrive(window, 4, 5)
    assert future.result(20) is not None


def test_silent_program_loses_tensors_after_stall() -> None:
    window = new_window(replace(SETTINGS, stall_s=0.0))
    arrive(window, 0, 1)
    assert has_space(window, 2)
    assert take(window, 0) is None


def test_failure_ends_waits_of_all_threads(pool: ThreadPoolExecutor) -> None:
    window = new_window()
    arrive(window, 0, 1)
    future = take_in_thread(pool, window, 5)
    window.fail(SourceUnavailable("the disk is gone"))
    window.fail(Cancelled("later"))
    for wait in (future.result, lambda: has_space(window, 2), lambda: take(window, 3)):
        with pytest.raises(SourceUnavailable, match="the disk is gone"):
            wait()


def test_discard_cancels_waits_and_drops_bytes(pool: ThreadPoolExecutor) -> None:
    window = new_window()
    arrive(window, 0, 1)
    future = take_in_thread(pool, window, 5)
    window.discard()
    with pytest.raises(Cancelled):
        future.result(20)
    arrive(window, 2, 3, 4)
    assert has_space(window, 5)
    assert take(window, 2) is None
    assert window.peak_bytes <= 2 * NBYTES
