"""A region of memory for many tensors, so that peers reach all of them with one registration.

Host arenas are shared memfds. A device arena is one torch allocation, or `cuda.device_memory` if its physical memory
can be exchanged. `populate` faults in shared memory ahead, because page faults cost 0.7 s per GB without huge pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from penstock.errors import BudgetTooSmall, ConfigError, DestinationError, DeviceOutOfMemory
from penstock.memory.memfd import MappedMemfd, create_memfd
from penstock.waits import start_thread

if TYPE_CHECKING:
    import torch

    from penstock.cuda.device_memory import DeviceMemory

_MADV_POPULATE_WRITE = 23
"""Faults in the pages with one call. Source: Linux 5.14, include/uapi/asm-generic/mman-common.h."""

STEP_BYTES = 1 << 20
"""Bytes per call. A call takes about 0.1 ms and holds the lock of the address space."""

_libc = ctypes.CDLL(None, use_errno=True)


def populate(address: int, nbytes: int, *, is_over: Callable[[], bool] | None = None) -> None:
    """Fault in `nbytes` of writable memory from `address`, until `is_over` returns True.

    Two threads take 0.37 s per GB of shared memory, while faulting page by page takes 0.85 to 1.5 s.
    """
    for at in range(address, address + nbytes, STEP_BYTES):
        if is_over is not None and is_over():
            return
        # Ignore errors, because the first use also faults in the pages and fails where a caller can handle it.
        length = ctypes.c_size_t(min(STEP_BYTES, address + nbytes - at))
        _libc.madvise(ctypes.c_void_p(at), length, _MADV_POPULATE_WRITE)


ALIGN_BYTES = 512
"""Alignment of each tensor. Torch's CUDA caching allocator rounds to 512 bytes, and kernels rely on it."""

WARM_STEPS = 16
"""Number of consecutive steps of a thread in `Arena.warm`, which cover one chunk of a fetch."""


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
        step = STEP_BYTES * WARM_STEPS

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
        owner = self._owner
        whole = torch.frombuffer(owner, dtype=torch.uint8) if isinstance(owner, MappedMemfd) else owner
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
