"""The kernels that digest an engine's weights are ready when its model is loaded, so the first sleep is not delayed."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.digest import cuda, xxh3_constants
from penstock.errors import DeviceOutOfMemory
from penstock.holding import digester
from penstock.spi.sleep_kernels import kernels_ready
from penstock_sglang import sleep as sglang_sleep

LOG = logging.getLogger("penstock.test")
CUDA = torch.device("cuda:0")


class Digester:
    """A digester without a device. It records the prepared kernels and their threads."""

    ready: list[tuple[str, int]]
    error: Exception | None = None

    def __init__(self, device: str) -> None:
        self._device = device

    def warm_up(self) -> None:
        if self.error is not None:
            raise self.error
        self.ready.append((self._device, threading.get_ident()))


@pytest.fixture
def fake_digester(monkeypatch: pytest.MonkeyPatch) -> type[Digester]:
    fake = type("Digester", (Digester,), {"ready": []})
    monkeypatch.setattr(digester, "Digester", fake)
    return fake


def test_digest_kernels_are_loaded_before_load_returns(fake_digester: type[Digester]) -> None:
    with kernels_ready(CUDA, LOG):
        pass
    [(device, thread)] = fake_digester.ready
    # The loading thread's allocations may be in memory that a sleep releases.
    assert device == "cuda:0" and thread != threading.get_ident()


def test_failed_load_still_waits_for_kernels(fake_digester: type[Digester]) -> None:
    with pytest.raises(ValueError, match="no weights"), kernels_ready(CUDA, LOG):
        raise ValueError("no weights")
    assert len(fake_digester.ready) == 1


def test_kernel_failure_is_logged_and_load_continues(
    fake_digester: type[Digester], caplog: pytest.LogCaptureFixture
) -> None:
    fake_digester.error = DeviceOutOfMemory("cuda:0 has no room for the digests of 2048 bytes")
    with kernels_ready(CUDA, LOG):
        pass
    assert "digest kernels are not ready: cuda:0 has no room" in caplog.text


def test_loading_to_host_prepares_no_kernels(fake_digester: type[Digester]) -> None:
    with kernels_ready(torch.device("cpu"), LOG):
        pass
    assert fake_digester.ready == []


@pytest.mark.parametrize("saver", [True, False])
def test_sglang_prepares_kernels_if_memory_can_be_released(
    fake_digester: type[Digester], monkeypatch: pytest.MonkeyPatch, saver: bool
) -> None:
    context = ModuleType("sglang.srt.runtime_context")
    context.get_exec = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        features=SimpleNamespace(enable_memory_saver=saver)
    )
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, context.__name__, context)
    with sglang_sleep.loading(CUDA, LOG):
        pass
    assert len(fake_digester.ready) == saver


def test_kernel_constants_are_allocated_outside_loading_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, constants = [], xxh3_constants.constants

    def note_thread() -> np.ndarray:
        threads.append(threading.get_ident())
        return constants()

    monkeypatch.setattr(xxh3_constants, "constants", note_thread)
    placed = cuda._constants.__wrapped__(torch.device("cpu"))
    assert placed.numpy().tolist() == constants().tolist()
    assert threads and threads[0] != threading.get_ident()


def test_first_sleep_does_not_import_distributed_tensor_module() -> None:
    # The kernels import 500 modules, including sympy, which would delay the first sleep.
    program = """
import sys, torch
from penstock_vllm.sleep import _digests
assert "torch.distributed.tensor" not in sys.modules, "torch has it by itself"
assert _digests(torch.nn.Linear(4, 4)).is_same()
print(sorted(name for name in sys.modules if name in ("torch.distributed.tensor", "penstock.sync.receive.released")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
