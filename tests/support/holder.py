"""A holder in its own process, which tests and benchmarks read from, fence, stop and kill.

    with HolderProcess("shm", nbytes=1 << 20) as holder:
        transport.post_read(into, holder.descriptor, segments([(0, 0, 1 << 20)]))
        holder.fence(seed=2)                    # begins a generation, then changes every byte
        holder.process.kill()

Its memory has a known pattern that depends on a seed. `transport_suite` tests transports within one process.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt
from tests.support.fake_cuda import FakeCuda

from penstock.memory.arena import Arena
from penstock.transport.cuda_ipc import CudaIpcTransport
from penstock.transport.host_endpoint import FencedHandle
from penstock.transport.protocol import Descriptor, Memory, Transport, decode, encode
from penstock.transport.shm import ShmTransport
from penstock_nixl.transport import NixlTransport

TILE_BYTES = (1 << 20) + 13
"""The pattern's period in bytes. It is odd, so that a misplaced chunk is detected."""


def tile(seed: int) -> npt.NDArray[np.uint8]:
    """Return one period of the pattern."""
    return np.random.default_rng(seed).integers(0, 256, TILE_BYTES, np.uint8)


def pattern(nbytes: int, seed: int = 1) -> bytes:
    """Return the first bytes of the pattern."""
    return np.resize(tile(seed), nbytes).tobytes()


_fake = FakeCuda()


def open_transport(name: str) -> Transport:
    """Return a transport by name. `fake_cuda` and `fake_virtual` are `cuda_ipc` without a device."""
    if name == "shm":
        return ShmTransport()
    if name == "nixl":
        return NixlTransport.open()
    return CudaIpcTransport(_fake if name.startswith("fake") else None)


def allocate(nbytes: int, device: str, transport: str = "") -> Memory:
    """Allocate memory in its own arena or on the fake device."""
    if transport.startswith("fake"):
        device = device if device.startswith("cuda") else "cuda:0"
        return (_fake.allocate_virtual if transport == "fake_virtual" else _fake.allocate)(nbytes, device)
    arena = Arena.allocate(nbytes, device)
    return Memory(address=arena.address, nbytes=nbytes, device=arena.device, owner=arena)


def fill(memory: Memory, seed: int) -> None:
    """Fill all of the memory with the pattern, visible to everyone on return."""
    if not isinstance(memory.owner, Arena) or memory.device == "cpu":
        one = tile(seed)
        for at in range(0, memory.nbytes, TILE_BYTES):
            ctypes.memmove(memory.address + at, one.ctypes.data, min(TILE_BYTES, memory.nbytes - at))
        return
    import torch

    whole = memory.owner.bytes_at(0, memory.nbytes)
    one_period = torch.from_numpy(tile(seed)).to(memory.device)
    for at in range(0, memory.nbytes, TILE_BYTES):
        whole[at : at + TILE_BYTES] = one_period[: memory.nbytes - at]
    torch.cuda.synchronize(whole.device)


class HolderProcess:
    """A child process that holds `nbytes` of the pattern for seed 1. It is killed when the context ends.

    Args:
        transport: name as in `open_transport`.
        device: device of the memory.
        env: added to this process's environment.
        forks: whether it forks a child that keeps sleeping, as data loaders do.
    """

    def __init__(
        self,
        transport: str,
        *,
        nbytes: int,
        device: str = "cpu",
        env: dict[str, str] | None = None,
        forks: bool = False,
    ) -> None:
        command = [sys.executable, "-m", "tests.support.holder", transport, device, str(nbytes), str(int(forks))]
        environment = ["env", *(f"{name}={value}" for name, value in (env or {}).items())]
        self.process = subprocess.Popen(
            [*environment, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.descriptor = self._answer()

    def _answer(self) -> Descriptor:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError(f"the holder ended with {self.process.wait(10)}")
        return decode(bytes.fromhex(line))

    def call(self, line: str) -> Descriptor:
        """Send a command: `fence SEED`, `lie NBYTES`, or `close`. Return its descriptor afterwards."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def fence(self, seed: int) -> Descriptor:
        """Begin a generation and fill it with the pattern for another seed."""
        self.descriptor = self.call(f"fence {seed}")
        return self.descriptor

    def lie(self, nbytes: int) -> Descriptor:
        """Begin a generation that claims to have `nbytes` bytes."""
        self.descriptor = self.call(f"lie {nbytes}")
        return self.descriptor

    def __enter__(self) -> HolderProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


def hold(transport_name: str, device: str, nbytes: int, forks: bool) -> None:
    """Run the child. Answer each line of standard input with its descriptor."""
    transport, memory = open_transport(transport_name), allocate(nbytes, device, transport_name)
    fill(memory, 1)
    handle = transport.register(memory)
    if forks and os.fork() == 0:
        # Close the pipe, because the parent waits for its end.
        os.close(1)
        time.sleep(20)
        os._exit(0)
    print(encode(handle.descriptor).hex(), flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "fence":
            handle.fence()
            fill(memory, int(rest[0]))
        elif word == "lie":
            assert isinstance(handle, FencedHandle)
            handle.memory = msgspec.structs.replace(memory, nbytes=int(rest[0]))
            handle.fence()
        else:
            handle.close()
        print(encode(handle.descriptor).hex(), flush=True)
    transport.close()


if __name__ == "__main__":
    hold(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
