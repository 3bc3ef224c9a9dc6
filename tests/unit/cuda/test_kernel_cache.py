"""Launches of Triton kernels without a device. tests/gpu tests compiled copies."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from penstock.cuda import kernel_cache
from penstock.cuda.kernel_cache import Launch
from penstock.errors import MissingExtra


def test_empty_grid_skips_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    Launch("penstock.cuda.pack_triton", "copy_tiles", 0, (torch.zeros(1),), {}).run()


def test_missing_triton_raises_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "penstock.cuda.pack_triton", raising=False)
    with pytest.raises(MissingExtra, match="need Triton"):
        Launch("penstock.cuda.pack_triton", "copy_tiles", 1, (torch.zeros(1),), {}).run()


class OnDevice(torch.Tensor):
    """A tensor that claims to be on a CUDA device."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize("can_store", [True, False])
def test_compiled_kernel_is_looked_up_once(can_store: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    copies: list[Any] = []

    class Queued:
        def __init__(self, *of: object) -> None:
            pass

        def run(self, more: object, stream: int, num_programs: int) -> None:
            log.append("copy")

    def load(path: object) -> object | None:
        log.append("look")
        return copies[0] if copies else None

    def store(compiled: object, path: object) -> None:
        log.append("store")
        copies.extend([object()] * can_store)

    kernel = {(1,): lambda *arguments, **constants: log.append("triton")}
    monkeypatch.setattr(kernel_cache, "_imported", lambda module: SimpleNamespace(kernel=kernel))
    monkeypatch.setattr(kernel_cache, "_from_wheel", lambda shape, device: None)
    monkeypatch.setattr(kernel_cache, "_load", load)
    monkeypatch.setattr(kernel_cache, "_store", store)
    monkeypatch.setattr(kernel_cache, "_path", lambda shape, device: None)
    monkeypatch.setattr(kernel_cache, "_Queued", Queued)
    monkeypatch.setattr(kernel_cache, "_kernels", {})
    monkeypatch.setattr(kernel_cache, "_compiled", set())
    stream = SimpleNamespace(cuda_stream=1, query=lambda: log.append("context"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    one = Launch("module", "kernel", 1, (torch.zeros(4).as_subclass(OnDevice),), {"WIDTH": 1})
    for _ in range(3):
        one.run()
    first = ["look", "triton", "store", "look"]
    assert log == [*first, *(["context", "copy", "copy"] if can_store else ["triton", "triton"])]


def test_changed_launch_arguments_reach_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def launcher(function: object, *grid_and_more: Any) -> int:
        *grid, stream, pointers, _ = grid_and_more
        kinds = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64)
        values = [ctypes.cast(at, ctypes.POINTER(kind))[0] for at, kind in zip(pointers, kinds, strict=True)]
        seen.append((grid, stream.value, values))
        return 0

    monkeypatch.setattr(kernel_cache, "_launcher", lambda: launcher)
    copy = SimpleNamespace(parameter_bits=(64, 32, 32, 64, 64), num_threads=96, shared_bytes=7)
    table, first, second = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    queued = kernel_cache._Queued(SimpleNamespace(function=None, copy=copy), (table, 11), 2)  # type: ignore[arg-type]
    queued.run((5, first), 1, 3)
    queued.run((6, second), 2, 4)
    assert seen == [
        ([3, 1, 1, 96, 1, 1, 7], 1, [table.data_ptr(), 11, 5, first.data_ptr(), 0]),
        ([4, 1, 1, 96, 1, 1, 7], 2, [table.data_ptr(), 11, 6, second.data_ptr(), 0]),
    ]
