"""Tensors that are requested one after another are read ahead, stay bit-identical, and stay within their limit."""

from __future__ import annotations

import os
import random
import threading
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
    """A file with tensors of 2 MiB, small tensors that share a slab, a tensor above the limit, and empty tensors."""
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


class Ahead(TensorsAhead):
    """Tensors that real runs read ahead from one file."""

    def __init__(self, source: FileSource, enough_bytes: int) -> None:
        self._source = source
        self._rows = read_header(source).tensors
        super().__init__(self._rows, limit_bytes=LIMIT, enough_bytes=enough_bytes)

    def take_row(self, row: int) -> torch.Tensor | None:
        """Return the bytes of a row that was read ahead."""
        return self.take(row, self._plan, self._begin)

    def _plan(self, rows: Sequence[int]) -> LoadPlan:
        return plan_load(self._rows.take(rows), file_nbytes=[self._source.nbytes], chunk_bytes=MIB)

    def _begin(self, plan: LoadPlan, order: Sequence[int]) -> LoadRun:
        place, trace = HostPlace(plan.slab_nbytes.tolist()), Trace(enabled=False)
        readers = Readers(pool=None, num_threads=2)
        sources = [self._source]
        run = LoadRun(plan, sources, place, readers, stall_s=STALL_S, trace=trace, window_bytes=LIMIT, order=order)
        run.start()
        return run


Make = Callable[..., Ahead]


@pytest.fixture
def make(path: Path) -> Iterator[Make]:
    """Yield a function that makes `TensorsAhead` for the file, with real runs."""
    with ExitStack() as stack:
        source = FileSource.open(str(path))
        stack.callback(source.close)

        def made(enough_bytes: int = MIB) -> Ahead:
            ahead = Ahead(source, enough_bytes)
            stack.callback(ahead.close)
            return ahead

        yield made


def rows_of(path: Path) -> list[str]:
    with safe_open(path) as file:
        return file.offset_keys()


@pytest.fixture(scope="module")
def large(path: Path, expected: dict[str, torch.Tensor]) -> list[int]:
    """The rows with 2 MiB, in file order."""
    return [row for row, name in enumerate(rows_of(path)) if expected[name].nbytes == 2 * MIB]


def test_second_request_in_order_starts_reading(make: Make, path: Path, expected: dict[str, torch.Tensor]) -> None:
    names, ahead = rows_of(path), make()
    first = next(row for row, name in enumerate(names) if expected[name].numel())
    assert ahead.take_row(first) is None and not ahead.is_reading
    for row in range(first + 1, len(names)):
        found = ahead.take_row(row)
        if expected[names[row]].numel():
            assert found is not None and torch.equal(found.view(expected[names[row]].dtype), expected[names[row]])
    # The run ended with the last tensor, so the file's threads and staging are free again.
    assert not ahead.is_reading


def test_scattered_requests_start_no_reading(make: Make, path: Path) -> None:
    ahead = make()
    rows = range(0, len(rows_of(path)), 2)
    assert [ahead.take_row(row) for row in rows] == [None] * len(rows)
    assert not ahead.is_reading


def test_small_rest_is_not_read_ahead(make: Make, path: Path) -> None:
    ahead, num_rows = make(enough_bytes=3 * MIB), len(rows_of(path))
    assert [ahead.take_row(row) for row in range(num_rows - 2, num_rows)] == [None, None]


def test_announced_order_is_read_ahead(make: Make, path: Path, expected: dict[str, torch.Tensor]) -> None:
    names, ahead = rows_of(path), make()
    order = [row for row, name in enumerate(names) if expected[name].numel()]
    random.Random(0).shuffle(order)
    ahead.expect(order)
    for row in order:
        found = ahead.take_row(row)
        assert found is not None and torch.equal(found.view(expected[names[row]].dtype), expected[names[row]])


def test_repeated_request_returns_none(make: Make, large: list[int]) -> None:
    ahead = make()
    ahead.expect(large)
    assert ahead.take_row(large[1]) is not None
    assert ahead.take_row(large[1]) is None and ahead.is_reading


def test_distant_request_ends_reading(make: Make, large: list[int]) -> None:
    ahead = make()
    ahead.expect(large)
    assert ahead.take_row(large[0]) is not None
    assert ahead.take_row(large[-1]) is None and not ahead.is_reading


def test_skipped_tensors_stay_within_limit(make: Make, large: list[int]) -> None:
    ahead = make()
    ahead.expect(large)
    for row in large[::2]:
        assert ahead.take_row(row) is not None
    # Half of the tensors were skipped. The limit holds the newest of them.
    kept = [row for row in large[1:-1:2] if ahead.take_row(row) is not None]
    assert kept == large[1:-1:2][-LIMIT // (2 * MIB) :]


def test_forked_child_takes_nothing(make: Make, large: list[int]) -> None:
    ahead = make()
    ahead.expect(large)
    assert ahead.take_row(large[0]) is not None
    child = os.fork()
    if not child:
        is_none = ahead.take_row(large[1]) is None
        ahead.close()
        os._exit(0 if is_none else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ahead.take_row(large[1]) is not None


ACCESS = {
    "file order": lambda names: names,
    "reverse": lambda names: names[::-1],
    "each twice": lambda names: [name for name in names for _ in range(2)],
    "whole file twice": lambda names: [*names, *names],
    "every third": lambda names: names[::3],
    "two halves in turns": lambda names: [
        n for pair in zip(names[: len(names) // 2], names[len(names) // 2 :], strict=False) for n in pair
    ],
    "natural order": lambda names: sorted(
        names, key=lambda name: [int(p) if p.isdigit() else -1 for p in name.split(".")]
    ),
}


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("is_announced", [False, True])
def test_every_access_order_returns_same_bits(
    access: str, is_announced: bool, path: Path, expected: dict[str, torch.Tensor]
) -> None:
    order = ACCESS[access](rows_of(path))
    with safe_open(path, backend="pread", memory_bytes=2 * LIMIT) as file:
        if is_announced:
            file.expect(dict.fromkeys(order))
        for name in order:
            tensor = file.get_tensor(name)
            assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_random_requests_return_same_bits(data: st.DataObject, path: Path, expected: dict[str, torch.Tensor]) -> None:
    names = rows_of(path)
    with safe_open(path, backend="pread", memory_bytes=2 * LIMIT) as file:
        row = 0
        for _ in range(data.draw(st.integers(1, 60))):
            row = data.draw(st.one_of(st.just((row + 1) % len(names)), st.integers(0, len(names) - 1)))
            name = names[row]
            if data.draw(st.booleans()):
                assert torch.equal(file.get_tensor(name), expected[name])
            else:
                assert torch.equal(file.get_slice(name)[3:50], expected[name][3:50])


def test_four_threads_read_same_bits(path: Path, expected: dict[str, torch.Tensor]) -> None:
    names = rows_of(path)
    with safe_open(path, backend="pread", memory_bytes=2 * LIMIT) as file, ThreadPoolExecutor(4) as threads:
        for name, tensor in zip(names, threads.map(file.get_tensor, names), strict=True):
            assert torch.equal(tensor, expected[name]), name


def test_tensors_are_writable_and_outlive_file(path: Path, expected: dict[str, torch.Tensor]) -> None:
    with safe_open(path, backend="pread", memory_bytes=2 * LIMIT) as file:
        tensors = {name: file.get_tensor(name) for name in rows_of(path)}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name])
        tensor.zero_()
    # A tensor that shared bytes with its neighbour would have changed this one.
    assert all(not tensor.any() for tensor in tensors.values())


def test_truncated_file_returns_no_wrong_bytes(path: Path, tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    copy = tmp_path / "model.safetensors"
    copy.write_bytes(path.read_bytes())
    names = [name for name in rows_of(path) if expected[name].numel()]
    num_errors = 0
    with safe_open(copy, backend="pread", memory_bytes=2 * LIMIT) as file:
        for name in names:
            if name == names[len(names) // 2]:
                os.truncate(copy, os.path.getsize(path) // 2)
            try:
                assert torch.equal(file.get_tensor(name), expected[name])
            except SourceError as error:
                assert error.uri is not None and str(copy) in error.uri
                num_errors += 1
    # Only tensors that were read before the file was truncated are returned after it.
    assert num_errors > 2


def test_closing_ends_all_threads(path: Path) -> None:
    before = threading.active_count()
    with safe_open(path, backend="pread", memory_bytes=2 * LIMIT) as file:
        names = rows_of(path)
        for name in names[:6]:
            file.get_tensor(name)
        assert threading.active_count() > before
    del file
    assert threading.active_count() <= before
