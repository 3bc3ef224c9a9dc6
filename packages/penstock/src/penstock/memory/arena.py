"""A region of memory for many tensors, so that peers reach all of them with one registration.

Host arenas are shared memfds. A device arena is one torch allocation, or `cuda.device_memory` if its physical memory
can be exchanged. `populate` faults in shared memory ahead, in huge pages where the kernel allows them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from penstock.errors import BudgetTooSmall, ConfigError, DestinationError, DeviceOutOfMemory
from penstock.memory.mapping import HUGE_PAGE_BYTES, libc
from penstock.memory.memfd import MappedMemfd, create_memfd
from penstock.waits import start_thread

if TYPE_CHECKING:
    import torch

    from penstock.cuda.device_memory import DeviceMemory

_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
"""Fault in pages, and make a huge page of small ones. Source: Linux 5.14 and 6.1, asm-generic/mman-common.h."""
_STEP_BYTES = 8 * HUGE_PAGE_BYTES
_SLOW_S = 0.01
"""CPU seconds for a step in small pages. Huge pages take 1 ms, or longer if a hypervisor must first provide them."""


def populate(address: int, nbytes: int, *, is_over: Callable[[], bool] | None = None) -> None:
    """Fault in missing pages of writable memory, until `is_over` returns True. The bytes do not change.

    A GiB of shared memory takes 0.06 s of CPU time in huge pages, and 0.62 s in small pages.
    """
    page, stop, may_collapse = mmap.PAGESIZE, address + nbytes, True
    for at in range(-(-address // page) * page, stop, _STEP_BYTES):
        if is_over is not None and is_over():
            return
        step, begun = min(_STEP_BYTES, stop - at), time.thread_time()
        resident = ctypes.create_string_buffer(-(-step // page))
        if libc.mincore(at, step, resident) == 0 and 0 not in resident.raw:
            continue
        # Ignore errors, because the first use also faults in the pages and fails where a caller can handle it.
        if may_collapse:
            # By default, page faults in shared memory get no huge pages. A collapse needs one page that exists.
            for block in range(at, at + step, HUGE_PAGE_BYTES):
                libc.madvise(block, page, _MADV_POPULATE_WRITE)
            libc.madvise(at, step, _MADV_COLLAPSE)
            may_collapse = time.thread_time() - begun < _SLOW_S
        for block in range(at, at + step, HUGE_PAGE_BYTES):
            libc.madvise(block, min(HUGE_PAGE_BYTES, stop - block), _MADV_POPULATE_WRITE)


ALIGN_BYTES = 512
"""Alignment of each tensor. Torch's CUDA caching allocator rounds to 512 bytes, and kernels rely on it."""


class Arena:
    """A region of memory in which tensors are placed one after the other. `allocate` creates it.

    Attributes:
        address, nbytes: the region.
        device: `"cpu"` or `"cuda:N"`.

    Ownership: the memory stays valid, and can be registered, as long as the arena or any tensor in it exists.
    """

    def __init__(self, device: str, address: int, nbytes: int, owner: MappedMemfd | torch.Tensor) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self._owner = owner
        self._used_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def allocate(cls, nbytes: int, device: str | torch.device = "cpu", *, is_remappable: bool = False) -> Arena:
        """Allocate an arena of `nbytes` without touching it.

        If `is_remappable` is set and the device supports it, the physical memory of a device arena can be exchanged,
        see `cuda.device_memory`.

        Raises:
            ConfigError: arenas do not support this kind of device.
            DestinationError: the host cannot map this much, or no file descriptor is left.
            DeviceOutOfMemory: the device does not have enough free memory.
        """
        name = str(device)
        if nbytes < 0:
            raise ConfigError(f"cannot create an arena of {nbytes} bytes, since the length is negative")
        if name == "cpu":
            return cls._on_host(nbytes)
        if name.partition(":")[0] == "cuda":
            return cls._remappable(nbytes, name) if is_remappable else cls._on_cuda(nbytes, name)
        raise ConfigError(f"cannot create an arena on {name}", hint="use cpu or cuda")

    @classmethod
    def _on_host(cls, nbytes: int) -> Arena:
        _check_available(nbytes)
        # Do not seal the memfd yet. A conversion's workers write to its path until the registration seals the memfd.
        mapped = create_memfd("penstock-arena", nbytes, sealed=False)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return cls("cpu", mapped.address, nbytes, mapped)

    @classmethod
    def _on_cuda(cls, nbytes: int, name: str) -> Arena:
        import torch

        device = torch.device(name)
        try:
            # An empty torch allocation has no address that peers could register.
            region = torch.empty(max(nbytes, ALIGN_BYTES), dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            message = f"{device} has {free} of {total} bytes free, but {nbytes} contiguous bytes are needed"
            raise DeviceOutOfMemory(message, hint="free memory on the device, or do without an arena") from error
        return cls(str(region.device), region.data_ptr(), nbytes, region)

    @classmethod
    def _remappable(cls, nbytes: int, name: str) -> Arena:
        import torch

        from penstock.cuda.device_memory import DeviceMemory, is_available

        device = torch.device(name)
        number = torch.cuda.current_device() if device.index is None else device.index
        if not is_available(number):
            return cls._on_cuda(nbytes, name)
        nbytes = max(nbytes, ALIGN_BYTES)
        try:
            memory = DeviceMemory(nbytes, number)
        except DeviceOutOfMemory:
            # Torch's cache may hold the needed memory.
            torch.cuda.empty_cache()
            memory = DeviceMemory(nbytes, number)
        return cls.over(memory)

    @classmethod
    def over(cls, memory: DeviceMemory) -> Arena:
        """Return an arena over a whole `DeviceMemory`, which the arena keeps alive."""
        import torch

        region = torch.as_tensor(memory, device=f"cuda:{memory.device}")
        return cls(str(region.device), memory.address, memory.nbytes, region)

    @property
    def path(self) -> str:
        """Return the path of a host arena, through which processes of this user can write until it is registered."""
        assert isinstance(self._owner, MappedMemfd)
        # A memfd has no path except in /proc.
        return f"/proc/{os.getpid()}/fd/{self._owner.fd}"

    def warm(self, is_over: Callable[[], bool], num_threads: int = 2) -> None:
        """Start to fault in a host arena. The threads keep the memory alive until `is_over` returns True."""
        if self.device != "cpu":
            return
        step = 4 * _STEP_BYTES

        def work(first: int, owner: object) -> None:
            # Arriving bytes fill the arena from the start, so the threads alternate between steps to stay ahead.
            for at in range(first * step, self.nbytes, num_threads * step):
                populate(self.address + at, min(step, self.nbytes - at), is_over=is_over)

        for first in range(num_threads):
            # If a thread cannot start, the first write to each page faults it in.
            thread = threading.Thread(
                target=work, args=(first, self._owner), name=f"penstock-warm-{first}", daemon=True
            )
            start_thread(thread, is_needed=False)

    @property
    def free_bytes(self) -> int:
        """Return the number of bytes that are not placed yet."""
        return self.nbytes - self._used_bytes

    def place(self, nbytes: Iterable[int]) -> list[int]:
        """Return offsets for runs of these lengths, in this order, each aligned to `ALIGN_BYTES`.

        Raises:
            BudgetTooSmall: the runs do not fit, and no run was placed. See `needed_bytes`.
        """
        with self._lock:
            offsets, at = offsets_of(nbytes, self._used_bytes)
            if at > self.nbytes:
                raise BudgetTooSmall(f"an arena of {self.nbytes} bytes has {self.free_bytes} left", minimum_bytes=at)
            self._used_bytes = at
        return offsets

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return these bytes as a flat uint8 tensor `[nbytes]`, a view that keeps the memory alive."""
        import torch

        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ConfigError(f"bytes [{offset}, {offset + nbytes}) are outside an arena of {self.nbytes} bytes")
        # Create the tensor each time, because a stored tensor would form a cycle that the garbage collector cannot see.
        whole = self._owner
        if isinstance(whole, MappedMemfd):
            whole = torch.frombuffer(whole, dtype=torch.uint8, offset=whole.start, count=whole.nbytes)
        return whole[offset : offset + nbytes]

    def runs_at(self, offsets: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return byte ranges like `bytes_at`, each in 0.5 us instead of 1.5 us. `offsets` must ascend."""
        # A single torch call splits the memory into all runs and the gaps between them.
        cuts, numbers, at = list[int](), list[int](), 0
        for offset, length in zip(offsets, lengths, strict=True):
            if offset > at:
                cuts.append(offset - at)
            numbers.append(len(cuts))
            cuts.append(length)
            at = offset + length
        parts = self.bytes_at(0, at).split_with_sizes(cuts)
        return [parts[number] for number in numbers]


def needed_bytes(nbytes: Iterable[int]) -> int:
    """Return the size that an arena needs for runs of these lengths."""
    return offsets_of(nbytes)[1]


def offsets_of(nbytes: Iterable[int], start: int = 0) -> tuple[list[int], int]:
    """Return the offsets of `Arena.place` for runs of these lengths after `start` bytes, and their end."""
    offsets, at = [], start
    for length in nbytes:
        at = -(-at // ALIGN_BYTES) * ALIGN_BYTES
        offsets.append(at)
        at += length
    return offsets, at


def _check_available(nbytes: int) -> None:
    """Raise DestinationError if less than `nbytes` of host memory is free, because exceeding it ends in SIGBUS."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    except OSError:
        return
    if available is not None and nbytes > available:
        raise DestinationError(f"an arena of {nbytes} bytes is larger than the host's {available} available bytes")
