"""A CUDA driver that uses host memory, to test `cuda_ipc` without a device, also between processes.

It implements the calls of `CudaDriver` with memfds. Copies run when their event is queried. `tests/gpu` tests what
needs a real device, such as rates and refusals by drivers.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from penstock.cuda.driver import IPC_HANDLE_BYTES, CudaDriver
from penstock.errors import DestinationError, DeviceOutOfMemory, PeerLost
from penstock.memory.memfd import MappedMemfd, create_memfd, shared_at
from penstock.segments import Rectangles
from penstock.transport.protocol import Memory
from penstock.types import U64

_HANDLE = struct.Struct("<QQQ")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED = 0x10
_numbers = itertools.count(1)

PIECE_BYTES = 1 << 20
"""Size of a piece of virtual memory in bytes. torch's pieces have 20 MiB."""
UNIT_BYTES = 1 << 16
"""Allocation unit of physical memory in bytes. A device's unit is 2 MiB."""


class FakeCuda(CudaDriver):
    """Any number of devices, all with this host's memory.

    Attributes:
        is_stuck: no copy ever finishes, as on a device that hangs.
        pinned: addresses of page-locked host memory.
        num_opened: number of open mappings of peers' memory.
        is_shareable: whether virtual memory is created with POSIX handles.
        num_handles: number of unreleased handles of physical memory.
        num_waits: number of waits for all work on a device.
        most_bytes: size limit for one piece of physical memory.
        refuses: the next call that fails, once, such as `allow`.
    """

    def __init__(self) -> None:
        self.is_stuck, self.is_shareable, self.num_opened = False, True, 0
        self.num_handles = self.num_waits = 0
        self.most_bytes, self.refuses = 1 << 40, ""
        self.pinned: set[int] = set()
        self._queued: dict[int, list[tuple[int, int, int]]] = {}
        self._events: dict[int, int] = {}
        self._pieces: dict[int, tuple[int, int]] = {}
        self._opened: dict[int, int] = {}

    def allocate(self, nbytes: int, device: str = "cuda:0") -> Memory:
        """Allocate memory as cudaMalloc does."""
        mapped = create_memfd("penstock-fake", nbytes)
        return Memory(address=mapped.address, nbytes=nbytes, device=device, owner=mapped)

    def allocate_virtual(self, nbytes: int, device: str = "cuda:0") -> Memory:
        """Allocate adjacent pieces as `expandable_segments` does. The first bytes belong to another owner."""
        num_pieces = -(-(nbytes + 5000) // PIECE_BYTES)
        base = self.reserve(num_pieces * PIECE_BYTES)
        for at in range(base, base + num_pieces * PIECE_BYTES, PIECE_BYTES):
            fd = os.memfd_create("penstock-piece")
            os.ftruncate(fd, PIECE_BYTES)
            self.map_fd(at, PIECE_BYTES, fd)
            self._pieces[at] = (PIECE_BYTES, fd)
        return Memory(address=base + 5000, nbytes=nbytes, device=device)

    # The methods below implement `CudaDriver`.

    @contextmanager
    def entered(self, device: int) -> Iterator[None]:
        yield

    def enable_peer(self, device: int) -> None:
        pass

    def _piece_at(self, address: int) -> tuple[int, int, int] | None:
        pieces = [(at, n, fd) for at, (n, fd) in self._pieces.items() if at <= address < at + n]
        return pieces[0] if pieces else None

    def address_range(self, address: int) -> tuple[int, int]:
        piece = self._piece_at(address)
        if piece is not None:
            return piece[:2]
        if address in self._opened:
            return address, self._opened[address]
        mapped = self._allocation(address)
        return mapped.address, mapped.nbytes

    def _allocation(self, address: int) -> MappedMemfd:
        mapped = shared_at(address, 1)
        if mapped is None:
            self.fail("cuMemGetAddressRange_v2", 1)
        assert mapped is not None
        return mapped

    def fail(self, name: str, code: int) -> None:
        raise ValueError(f"{name}: {code}")

    def ipc_handle(self, base: int) -> bytes | None:
        if self._piece_at(base) is not None:
            return None
        mapped = self._allocation(base)
        return _HANDLE.pack(os.getpid(), mapped.fd, mapped.nbytes).ljust(IPC_HANDLE_BYTES, b"\0")

    def ipc_open(self, handle: bytes) -> int:
        pid, fd, nbytes = _HANDLE.unpack_from(handle)
        if pid == os.getpid():
            # CUDA refuses it too: cudaIpcOpenMemHandle fails in the process that made the handle.
            raise PeerLost("a process cannot open its own handles")
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise PeerLost(f"fake: {error}") from error
        address = _map(0, nbytes, opened, mmap.PROT_READ, mmap.MAP_SHARED)
        os.close(opened)
        self.num_opened += 1
        self._opened[address] = nbytes
        return address

    def ipc_close(self, address: int) -> None:
        _libc.munmap(address, self._opened.pop(address))
        self.num_opened -= 1

    def export_fd(self, address: int) -> int | None:
        piece = self._piece_at(address)
        return os.dup(piece[2]) if piece is not None and self.is_shareable else None

    def reserve(self, nbytes: int) -> int:
        self.num_opened += 1
        return _map(0, nbytes, -1, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def map_fd(self, address: int, nbytes: int, fd: int) -> None:
        _map(address, nbytes, fd, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED)

    def allow(self, address: int, nbytes: int, device: int) -> None:
        if self.refuses == "allow":
            self.refuses = ""
            raise DestinationError("fake: cuMemSetAccess")

    def has_virtual_memory(self, device: int) -> bool:
        return True

    def virtual_unit(self, device: int) -> int:
        return UNIT_BYTES

    def create(self, nbytes: int, device: int) -> int:
        if nbytes > self.most_bytes:
            raise DeviceOutOfMemory("fake: cuMemCreate")
        fd = os.memfd_create("penstock-physical")
        os.ftruncate(fd, nbytes)
        self.num_handles += 1
        return fd

    def retain(self, address: int) -> int:
        self.num_handles += 1
        return os.dup(self._pieces[address][1])

    def release(self, handle: int) -> None:
        self.num_handles -= 1
        os.close(handle)

    def map_handle(self, address: int, nbytes: int, handle: int) -> None:
        assert address not in self._pieces, "memory is already mapped at this address"
        self.map_fd(address, nbytes, handle)
        self._pieces[address] = (nbytes, os.dup(handle))

    def unmap_handle(self, address: int, nbytes: int) -> None:
        assert self.num_waits, "memory was unmapped without waiting for the device"
        os.close(self._pieces.pop(address)[1])
        _map(address, nbytes, -1, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED)

    def synchronize(self) -> None:
        self.num_waits += 1

    def unmap(self, address: int, mapped_nbytes: int, nbytes: int) -> None:
        piece = self._pieces.pop(address, None) if mapped_nbytes else None
        if piece is not None:
            os.close(piece[1])
        _libc.munmap(address, nbytes)
        self.num_opened -= 1

    def sees_host(self, device: int) -> bool:
        return True

    def pin(self, address: int, nbytes: int, *, is_read_only: bool = False) -> None:
        self.pinned.add(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)

    def make_stream(self) -> int:
        number = next(_numbers)
        self._queued[number] = []
        return number

    def make_event(self) -> int:
        return next(_numbers)

    def free(self, streams: Sequence[int], events: Sequence[int]) -> None:
        assert not any(self._queued.pop(stream) for stream in streams), "a stream was freed before its copies ended"

    def record(self, event: int, stream: int) -> None:
        self._events[event] = stream

    def is_done(self, event: int) -> bool:
        stream = self._events[event]
        if self.is_stuck and stream:
            return False
        queue = self._queued.get(stream, [])
        while queue:
            ctypes.memmove(*queue.pop(0))
        return True

    def gather(self, dst: U64, src: U64, nbytes: U64, device: int, stream: int) -> None:
        self.copy(dst, src, nbytes, stream)

    def lay_out_rectangles(self, rows: Rectangles, device: int, stream: int) -> Callable[[], None]:
        runs = rows.segments()
        dst, src, nbytes = (column.astype(np.uint64) for column in (runs.dst, runs.src, runs.nbytes))
        return functools.partial(self.copy, dst, src, nbytes, stream)

    def num_devices(self) -> int:
        return 8

    def has_context(self, device: int) -> bool:
        return device == 2

    def copy(self, dst: U64, src: U64, nbytes: U64, stream: int) -> None:
        self._queued[stream].extend(zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True))


def _map(address: int, nbytes: int, fd: int, protection: int, flags: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    assert found is not None
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)
