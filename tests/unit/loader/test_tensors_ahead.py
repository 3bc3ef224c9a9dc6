"""Tensors that are requested one after another are read ahead, stay bit-identical, and stay within their limit.

The runs read into host memory here. `tests/gpu/test_safe_open_gpu.py` reads to a device.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file as theirs_load_file
from safetensors.torch import save_file

from penstock.engine.place import HostPlace
from penstock.engine.trace import Trace
from penstock.errors import SourceError
from penstock.loader.run import LoadRun, Readers
from penstock.loader.safe_open import safe_open
from penstock.loader.tensors_ahead import TensorsAhead
from penstock.plan.schedule import LoadPlan, plan_load
from penstock.storage.files import FileSource
from penstock.storage.safetensors import read_header
from penstock.types import MIB

LIMIT = 8 * MIB
STALL_S = 20.0
NUM_LARGE = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with tensors of 2 MiB, small tensors, a tensor above the limit, and an empty tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for index in range(NUM_LARGE):
        tensors[f"layer.{index}.weight"] = torch.randint(0, 256, (2 * MIB,), dtype=torch.uint8, generator=generator)
        tensors[f"layer.{index}.norm"] = torch.rand(100, generator=generator)
    tensors["embedding"] = torch.randint(0, 256, (12 * MIB,), dtype=torch.uint8, generator=generator)
    tensors["nothing"] = torch.empty(0, 4)
    file = tmp_path_factory.mktemp("ahead") / "model.safetensors"
    save_file(tensors, file)
    return file


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[str, torch.Tensor]:
    return theirs_load_file(path)


class Reader:
    """A file whose tensors real runs read ahead, like `safe_open` for a GPU."""

    def __init__(self, path: Path, enough_bytes: int) -> None:
        self.source = FileSource.open(str(path))
        self.rows = read_header(self.source).tensors
        self.ahead = TensorsAhead(self.rows, limit_bytes=LIMIT, enough_bytes=enough_bytes)
        self.run: LoadRun | None = None
        self._turn = threading.Lock()

    def take(self, row: int) -> torch.Tensor | None:
        """Return the bytes of a row if a run has read them ahead."""
        with self._turn:
            return self.ahead.take(row, self._plan, self._start)

    def read(self, row: int) -> torch.Tensor:
        """Return the bytes of a row, from a run or from the file."""
        found = self.take(row)
        if found is None:
            found = torch.empty(int(self.rows.nbytes[row]), dtype=torch.uint8)
            if found.numel():
                self.source.readv(int(self.rows.offset[row]), [found.numpy().data])
        return found

    def close(self) -> None:
        self.ahead.close()
        self.source.close()

    def _plan(self, rows: Sequence[int]) -> LoadPlan:
        return plan_load(self.rows.take(rows), file_nbytes=[self.source.nbytes], chunk_bytes=MIB)

    def _start(self, plan: LoadPlan, order: Sequence[int]) -> LoadRun:
        place, trace = HostPlace(plan.slab_nbytes.tolist()), Trace(enabled=False)
        readers, sources = Readers(pool=None, num_threads=2), [self.source]
        self.run = LoadRun(plan, sources, place, readers, stall_s=STALL_S, trace=trace, window_bytes=LIMIT, order=order)
        self.run.start()
        return self.run


Open = Callable[..., Reader]


@pytest.fixture
def open_file(path: Path) -> Iterator[Open]:
    """Yield a function that opens the file."""
    with ExitStack() as stack:

        def opened(file: Path = path, enough_bytes: int = MIB) -> Reader:
            reader = Reader(file, enough_bytes)
            stack.callback(reader.close)
            return reader

        yield opened


def names_of(path: Path) -> list[str]:
    with safe_open(path) as file:
        return file.offset_keys()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.fixture(scope="module")
def large(path: Path, expected: dict[str, torch.Tensor]) -> list[int]:
    """The rows with 2 MiB, in file order."""
    return [row for row, name in enumerate(names_of(path)) if expected[name].nbytes == 2 * MIB]


def test_request_for_first_tensor_starts_reading(
    open_file: Open, path: Path, expected: dict[str, torch.Tensor]
) -> None:
    names, file = names_of(path), open_file()
    first = next(row for row, name in enumerate(names) if expected[name].nbytes >= MIB)
    found = file.take(first)
    assert found is not None and torch.equal(found, bytes_of(expected[names[first]]))
    assert file.ahead.is_reading


def test_second_request_in_order_starts_reading(
    open_file: Open, large: list[int], path: Path, expected: dict[str, torch.Tensor]
) -> None:
    names, file = names_of(path), open_file()
    assert file.take(large[0]) is None and not file.ahead.is_reading
    for row in large[1:]:
        found = file.take(row)
        assert found is not None and torch.equal(found, expected[names[row]])
    last = names.index("embedding")
    if last > large[-1]:
        assert file.take(last) is not None
    # The run ends with its last tensor, so the threads and the staging of the file are free again.
    assert not file.ahead.is_reading


def test_scattered_requests_start_no_reading(open_file: Open, large: list[int]) -> None:
    file = open_file()
    assert [file.take(row) for row in large[::2]] == [None] * len(large[::2])
    assert not file.ahead.is_reading


def test_small_tensors_are_never_read_ahead(open_file: Open, path: Path, expected: dict[str, torch.Tensor]) -> None:
    file = open_file()
    small = [row for row, name in enumerate(names_of(path)) if expected[name].nbytes < MIB]
    file.ahead.expect(small)
    assert [file.take(row) for row in small] == [None] * len(small) and not file.ahead.is_reading


def test_small_rest_is_not_read_ahead(open_file: Open, large: list[int]) -> None:
    file = open_file(enough_bytes=100 * MIB)
    assert [file.take(row) for row in large] == [None] * len(large)


def test_announced_order_is_read_ahead(
    open_file: Open, large: list[int], path: Path, expected: dict[str, torch.Tensor]
) -> None:
    names, file, order = names_of(path), open_file(), list(large)
    random.Random(0).shuffle(order)
    file.ahead.expect([*order, *order])
    for row in order:
        found = file.take(row)
        assert found is not None and torch.equal(found, expected[names[row]])


def test_reading_in_announced_order_stays_within_limit(open_file: Open, large: list[int]) -> None:
    file, order = open_file(), large[::-1]
    file.ahead.expect(order)
    assert file.take(order[0]) is not None
    assert file.run is not None
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        # The tensor of the request counts until the next request. The threads may have begun one more chunk each.
        assert file.run.ticket.moved_bytes <= LIMIT + 2 * MIB + 2 * MIB
        time.sleep(0.01)


def test_repeated_request_returns_none(open_file: Open, large: list[int]) -> None:
    file = open_file()
    file.ahead.expect(large)
    assert file.take(large[1]) is not None
    assert file.take(large[1]) is None and file.ahead.is_reading


def test_reading_continues_at_new_place(open_file: Open, large: list[int]) -> None:
    file = open_file()
    for row in large[:6]:
        file.take(row)
    assert file.take(large[-4]) is None
    # The second request at the new place moves the run there.
    assert [file.take(row) is not None for row in large[-3:]] == [True] * 3


def test_useless_run_is_last_one(open_file: Open, large: list[int]) -> None:
    file = open_file()
    for first, second in [(0, 1), (12, 13), (5, 6), (18, 19)]:
        file.take(large[first])
        file.take(large[second])
    assert not file.ahead.is_reading
    assert [file.take(row) for row in large] == [None] * len(large)


def test_skipped_tensors_stay_within_limit(open_file: Open, large: list[int]) -> None:
    file = open_file()
    file.ahead.expect(large)
    for row in large[::2]:
        assert file.take(row) is not None
    # Half of the tensors were skipped. The limit holds the newest of them.
    kept = [row for row in large[1:-1:2] if file.take(row) is not None]
    assert kept == large[1:-1:2][-LIMIT // (2 * MIB) :]


def test_forked_child_takes_nothing(open_file: Open, large: list[int]) -> None:
    file = open_file()
    file.ahead.expect(large)
    assert file.take(large[0]) is not None
    child = os.fork()
    if not child:
        is_none = file.take(large[1]) is None
        file.ahead.close()
        os._exit(0 if is_none else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert file.take(large[1]) is not None


def in_natural_order(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")])


ORDERS: dict[str, Callable[[list[str]], list[str]]] = {
    "file order": lambda names: names,
    "reverse": lambda names: names[::-1],
    "each twice": lambda names: [name for name in names for _ in range(2)],
    "whole file twice": lambda names: [*names, *names],
    "every third": lambda names: names[::3],
    "two halves in turns": lambda names: [
        name for pair in zip(names[: len(names) // 2], names[len(names) // 2 :], strict=False) for name in pair
    ],
    "natural order": in_natural_order,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("is_announced", [False, True])
def test_every_order_returns_same_bits(
    order: str, is_announced: bool, open_file: Open, path: Path, expected: dict[str, torch.Tensor]
) -> None:
    names, file = names_of(path), open_file()
    wanted = [names.index(name) for name in ORDERS[order](names)]
    if is_announced:
        file.ahead.expect(wanted)
    for row in wanted:
        assert torch.equal(file.read(row), bytes_of(expected[names[row]])), names[row]


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_random_requests_return_same_bits(data: st.DataObject, path: Path, expected: dict[str, torch.Tensor]) -> None:
    names, file, row = names_of(path), Reader(path, MIB), 0
    try:
        for _ in range(data.draw(st.integers(1, 80))):
            row = data.draw(st.one_of(st.just((row + 1) % len(names)), st.integers(0, len(names) - 1)))
            assert torch.equal(file.read(row), bytes_of(expected[names[row]]))
    finally:
        file.close()


def test_four_threads_read_same_bits(open_file: Open, path: Path, expected: dict[str, torch.Tensor]) -> None:
    names, file = names_of(path), open_file()
    with ThreadPoolExecutor(4) as threads:
        for name, found in zip(names, threads.map(file.read, range(len(names))), strict=True):
            assert torch.equal(found, bytes_of(expected[name])), name


def test_tensors_own_their_memory(open_file: Open, large: list[int]) -> None:
    file = open_file()
    tensors = [file.read(row) for row in large]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(large)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


def test_truncated_file_returns_no_wrong_bytes(
    open_file: Open, large: list[int], path: Path, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    copy, names, num_errors = tmp_path / "model.safetensors", names_of(path), 0
    copy.write_bytes(path.read_bytes())
    file = open_file(copy)
    for row in large:
        if row == large[len(large) // 2]:
            os.truncate(copy, os.path.getsize(path) // 2)
        try:
            assert torch.equal(file.read(row), expected[names[row]])
        except SourceError as error:
            assert error.uri is not None and str(copy) in error.uri
            num_errors += 1
    # Only tensors that were read before the file was truncated are returned after it.
    assert num_errors > 2


def test_closing_ends_all_threads(open_file: Open, large: list[int]) -> None:
    before = threading.active_count()
    file = open_file()
    for row in large[:6]:
        file.read(row)
    assert threading.active_count() > before
    file.close()
    assert threading.active_count() <= before
