"""A fetch and a sync from a process whose weights are on a device into host memory of another process of the host.

Both processes use a driver for tests. tests/gpu has the same with a device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.support.fake_cuda import FakeCuda

import penstock as ps
from penstock.config import ConnectionSettings
from penstock.transport import cuda_ipc, into_device

pytestmark = pytest.mark.timeout(120)
HOLDER = """
import ctypes, sys

import msgspec
import torch
from tests.support.fake_cuda import FakeCuda

import penstock as ps
from penstock.config import ConnectionSettings
from penstock.transport import cuda_ipc

driver = FakeCuda()
cuda_ipc.load_driver = lambda: driver
register = cuda_ipc.CudaIpcTransport.register


def on_device(self, memory):
    # This process has no device, so call its memory that of a device.
    return register(self, msgspec.structs.replace(memory, device="cuda:0"))


cuda_ipc.CudaIpcTransport.register = on_device
memory = driver.allocate(16_000_000)
numbers = torch.frombuffer((ctypes.c_ubyte * memory.nbytes).from_address(memory.address), dtype=torch.float32)
numbers.copy_(torch.arange(len(numbers)))
connection = ConnectionSettings(transports=["cuda_ipc"], stall_s=20.0)
weights = {"w": numbers.view(2000, 2000)}
if sys.argv[1] == "fetch":
    with ps.join("model", connection=connection) as fleet:
        fleet.offer(weights)
        print("ready", flush=True)
        sys.stdin.read()
else:
    with ps.publisher("policy", weights, mode="live", connection=connection) as publisher:
        print("ready", flush=True)
        for version in map(int, sys.stdin):
            publisher.publish(version)
"""
EXPECTED = torch.arange(4_000_000, dtype=torch.float32).view(2000, 2000)


@contextmanager
def holder(what: str) -> Iterator[subprocess.Popen[str]]:
    """Run the process with the weights, until the block ends."""
    command = [sys.executable, "-c", HOLDER, what]
    process = subprocess.Popen(command, env={**os.environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConnectionSettings:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    driver = FakeCuda()
    for module in (cuda_ipc, into_device):
        monkeypatch.setattr(module, "load_driver", lambda: driver)
    return ConnectionSettings(stall_s=20.0)


@pytest.mark.parametrize("is_own", [False, True], ids=["new memory", "own tensor"])
def test_weights_on_device_are_fetched_into_host_memory(connection: ConnectionSettings, is_own: bool) -> None:
    target = {"w": torch.zeros(2000, 2000)} if is_own else {}
    with holder("fetch"), ps.join("model", connection=connection) as fleet:
        report = fleet.fetch(target, device="cpu", timeout_s=30)
    assert torch.equal(target["w"], EXPECTED)
    assert all(path.startswith("staged_cuda_ipc") for path in report.nbytes_by_path), report


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_version_on_device_is_received_into_host_memory(connection: ConnectionSettings, mode: str) -> None:
    served = torch.nn.Module()
    served.w = torch.nn.Parameter(torch.zeros(2000, 2000), requires_grad=False)
    with holder("sync") as process, ps.subscriber("policy", served, mode=mode, connection=connection) as subscriber:
        assert process.stdin is not None
        print(1, file=process.stdin, flush=True)
        report = subscriber.update(1, timeout_s=30)
    assert torch.equal(served.w, EXPECTED)
    assert "staged_cuda_ipc" in report.path
