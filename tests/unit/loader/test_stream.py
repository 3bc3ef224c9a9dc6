"""`stream` on the CPU yields the tensors of `load` one by one, and releases everything when it is closed early."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.compare import own_threads

import penstock
from penstock.config import Settings
from penstock.errors import SourceUnavailable
from penstock.storage import weight_set
from penstock.storage.files import FileSource
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

NUM_TENSORS, TENSOR_BYTES = 12, 2 * MIB


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "model.safetensors"
    torch.manual_seed(3)
    save_file({f"t{i:02}": torch.randint(0, 1 << 62, (TENSOR_BYTES // 8,)) for i in range(NUM_TENSORS)}, path)
    return path


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_stream_signature_matches_load(big: Path) -> None:
    assert inspect.signature(penstock.stream).parameters == inspect.signature(penstock.load).parameters
    assert inspect.signature(penstock.stream).return_annotation == "TensorStream"
    with pytest.raises(TypeError, match="devise"):
        penstock.stream(big, devise="cpu")  # type: ignore[call-arg]
    with penstock.stream(big, names=["t0[01]"], settings=penstock.ReadSettings(copy=True)) as tensors:
        assert [name for name, _ in tensors] == ["t00", "t01"]
        assert {file.path for file in tensors.report.files} <= {"page-cache", "buffered", "direct"}


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("memory_bytes", [None, "1M"])
def test_stream_yields_loaded_tensors_in_file_order(tmp_path: Path, copy: bool, memory_bytes: str | None) -> None:
    write_llama(tmp_path, num_layers=2, hidden=128, shards=3)
    whole = penstock.load(tmp_path)
    with penstock.stream(tmp_path, settings=penstock.ReadSettings(copy=copy, memory_bytes=memory_bytes)) as tensors:
        assert tensors.manifest.nbytes == whole.report.nbytes
        with pytest.raises(penstock.errors.Cancelled):
            _ = tensors.report
        found = list(tensors)
        assert next(tensors, None) is None, "an exhausted stream stays so"
        report = tensors.report
    assert [name for name, _ in found] == list(whole)
    assert all(torch.equal(t.contiguous().view(torch.uint8), whole[n].view(torch.uint8)) for n, t in found if t.dim())
    assert (report.num_tensors, report.nbytes) == (len(whole), whole.report.nbytes)
    assert sum(report.phases.values()) == pytest.approx(report.wall_s)
    assert tensors.report is report and not own_threads()


def test_stream_reads_nothing_before_iteration(big: Path) -> None:
    with pytest.raises(penstock.PlanError):
        penstock.stream(big, names=["nothing"])
    tensors = penstock.stream(big)
    assert not own_threads() and not is_mapped(big)
    tensors.close()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["break", "close", "drop", "raise", "with"])
@pytest.mark.parametrize("copy", [True, False])
def test_closing_stream_frees_all_but_yielded_tensors(big: Path, how: str, copy: bool) -> None:
    tensors = penstock.stream(big, settings=penstock.ReadSettings(copy=copy))
    first = next(tensors)
    kept = first[1].clone()
    if how == "break":
        for _ in tensors:
            break
        tensors.close()
    elif how == "raise":
        with pytest.raises(ZeroDivisionError), tensors:
            for _ in tensors:
                raise ZeroDivisionError
    elif how == "with":
        with tensors:
            next(tensors)
    elif how == "close":
        tensors.close()
        tensors.close()
    if how != "drop":
        for _ in range(2):
            with pytest.raises(penstock.errors.Cancelled):
                next(tensors)
        with pytest.raises(penstock.errors.Cancelled):
            _ = tensors.report
    del tensors
    assert not own_threads()
    assert torch.equal(first[1], kept), "what was given is the caller's"
    assert is_mapped(big) == (not copy)
    del first
    assert not is_mapped(big)


@pytest.mark.usefixtures("no_collector")
def test_dropped_tensors_are_freed_during_iteration(big: Path) -> None:
    def mapped_bytes() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in lines if str(big) in line]
        return sum(int(stop, 16) - int(start, 16) for start, stop in spans)

    seen = []
    tensors = penstock.stream(big)
    for _, tensor in tensors:
        del tensor
        seen.append(mapped_bytes())
    assert seen[0] - seen[-1] >= (NUM_TENSORS - 2) * TENSOR_BYTES
    tensors.close()
    del tensors
    assert mapped_bytes() == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("copy", [True, False])
def test_stream_reads_stay_within_read_ahead(big: Path, copy: bool) -> None:
    tensors = penstock.stream(big, settings=penstock.ReadSettings(copy=copy, memory_bytes=2 * TENSOR_BYTES))
    next(tensors)
    threading.Event().wait(0.1)
    run = tensors._session.run
    assert run is not None and run.ticket.moved_bytes <= 4 * TENSOR_BYTES
    assert len(list(tensors)) == NUM_TENSORS - 1


def test_stream_failure_is_raised_only_once(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FileSource.readv

    def readv(self: FileSource, offset: int, buffers: Any) -> str:
        if offset > 8 * TENSOR_BYTES:
            raise SourceUnavailable("the disk is gone", uri=self.uri)
        return original(self, offset, buffers)

    monkeypatch.setattr(FileSource, "readv", readv)
    names = []
    with penstock.stream(big, settings=penstock.ReadSettings(copy=True, memory_bytes="1M")) as tensors:
        with pytest.raises(SourceUnavailable) as caught:
            names.extend(name for name, _ in tensors)
        assert not own_threads() and caught.value.uri == str(big) and not caught.value.mutated
        with pytest.raises(penstock.errors.Cancelled):
            next(tensors)
    assert len(names) <= 8


def test_tensors_before_corrupt_tensor_are_yielded(big: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(big.read_bytes())
    with weight_set.open_weights(str(path), settings=Settings.read()) as weights:
        raw = weight_set.encode(weight_set.build(weights))
    Path(weight_set.sidecar_uri(str(path))).write_bytes(raw)
    data = bytearray(path.read_bytes())
    data[-TENSOR_BYTES // 2] ^= 1
    path.write_bytes(data)
    wanted = load_file(big)
    given: dict[str, torch.Tensor] = {}
    bad = pytest.raises(penstock.IntegrityError, match="t11")
    with bad, penstock.stream(path, settings=penstock.ReadSettings(copy=True, memory_bytes="1M")) as tensors:
        for name, tensor in tensors:
            given[name] = tensor
    assert "t11" not in given and len(given) >= 6
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in given.items())


def test_interleaved_streams_yield_equal_tensors(big: Path) -> None:
    with penstock.stream(big) as one, penstock.stream(big, settings=penstock.ReadSettings(copy=True)) as two:
        assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one, two, strict=True))
