"""A region of memory for many tensors, so that peers reach all of them by one registration.

In: lengths and a device. Out: offsets, and flat views that keep the memory alive.
Not here: moving live tensors into an arena (`rehome`), registering it (`transport`), staging buffers (`staging`).

Host arenas are memfds mapped shared, which other processes of the host can map once they are registered; device arenas
are one allocation of torch's. The first touch of shared memory costs 0.7 s a GB where the kernel gives it no huge pages
(`/sys/kernel/mm/transparent_hugepage/shmem_enabled`; the arena asks for them), so `populate` touches it in bulk and
outside the GIL, ahead of the bytes that arrive. Arenas of staged updates on a device are `cuda.device_memory`.
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
"""Fault the pages in one call. Source: Linux 5.14, include/uapi/asm-generic/mman-common.h."""

STEP_BYTES = 1 << 20
"""Bytes of one call, which takes about 0.1 ms and holds the address space's lock, which others need to allocate."""

_libc = ctypes.CDLL(None, use_errno=True)


def populate(address: int, nbytes: int, *, is_over: Callable[[], bool] | None = None) -> None:
    """Make `nbytes` of writable memory from `address` present, until `is_over` returns True.

    Cost: a GB of shared memory 0.6 s, of which two threads take 0.37; faulting it page by page 0.85 to 1.5 s.
    """
    for at in range(address, address + nbytes, STEP_BYTES):
        if is_over is not None and is_over():
            return
        # The result is ignored. A kernel without MADV_POPULATE_WRITE answers EINVAL, and there may be no memory left:
        # pages that stay absent are made by their first use, or fail there where a caller can be told.
        _libc.madvise(
            ctypes.c_void_p(at), ctypes.c_size_t(min(STEP_BYTES, address + nbytes - at)), _MADV_POPULATE_WRITE
        )


ALIGN_BYTES = 512
"""Alignment of each tensor's start. Source: torch's CUDA caching allocator rounds to 512 bytes; kernels rely on it."""

WARM_STEPS = 16
"""Steps that a thread of `Arena.warm` takes in a row: 16 MiB, a chunk of a fetch."""


class Arena:
    """A region of memory in which tensors are placed one after the other. Made by `allocate`, freed only as a whole.

    Attributes:
        address, nbytes, device: the region; `device` is `"cpu"` or `"cuda:N"`.

    Ownership: the memory lives as long as the arena or any tensor in it, and can be registered for as long.
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
        """Allocate an arena of `nbytes`, untouched.

        Args:
            is_remappable: on a device: let its physical memory be exchanged; see `cuda.device_memory`. Torch's memory,
                whose cannot, where the device has no memory of that kind.

        Raises:
            ConfigError: no arenas on this kind of device.
            DestinationError: the host cannot map that much; no file descriptor is left.
            DeviceOutOfMemory: the device has no room.
        """
        name = str(device)
        if nbytes < 0:
            raise ConfigError(f"cannot make an arena of {nbytes} bytes: the length is negative")
        if name == "cpu":
            return cls._on_host(nbytes)
        if name.partition(":")[0] == "cuda":
            return cls._remappable(nbytes, name) if is_remappable else cls._on_cuda(nbytes, name)
        raise ConfigError(f"cannot make an arena on {name}", hint="use cpu or cuda")

    @classmethod
    def _on_host(cls, nbytes: int) -> Arena:
        _check_room(nbytes)
        # Sealed at its registration: until then the workers of a conversion write to it by its path.
        mapped = create_memfd("penstock-arena", nbytes, sealed=False)
        # Advice only: many systems allow no huge pages for shared memory, and the first touch is slower there.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return cls("cpu", mapped.address, nbytes, mapped)

    @classmethod
    def _on_cuda(cls, nbytes: int, name: str) -> Arena:
        import torch

        device = torch.device(name)
        try:
            # At least one tensor's bytes: torch gives an empty allocation no address, and peers register this one.
            region = torch.empty(max(nbytes, ALIGN_BYTES), dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            message = f"{device} has {free} of {total} bytes free; {nbytes} contiguous bytes are needed"
            raise DeviceOutOfMemory(message, hint="free memory there, or go without an arena") from error
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
            # What torch has kept of freed tensors is of use here too.
            torch.cuda.empty_cache()
            memory = DeviceMemory(nbytes, number)
        return cls.over(memory)

    @classmethod
    def over(cls, memory: DeviceMemory) -> Arena:
        """Return an arena of all of a device's memory, which it keeps."""
        import torch

        region = torch.as_tensor(memory, device=f"cuda:{memory.device}")
        return cls(str(region.device), memory.address, memory.nbytes, region)

    @property
    def path(self) -> str:
        """Return a host arena's path, for processes of this user that write to it, until it is registered."""
        assert isinstance(self._owner, MappedMemfd)
        # By /proc: the memfd has no path of its own, and this one ends with the process.
        return f"/proc/{os.getpid()}/fd/{self._owner.fd}"

    def warm(self, is_over: Callable[[], bool], num_threads: int = 2) -> None:
        """Begin to make a host arena's pages present, from its start on, before they are written; returns at once.

        Args:
            is_over: called often by the threads, which keep the memory alive until it returns True or they are done.
            num_threads: threads at once; more than two wait for each other in the kernel.
        """
        if self.device != "cpu":
            return
        step = STEP_BYTES * WARM_STEPS

        def work(first: int, owner: object) -> None:
            # Threads take steps in turns, not halves of the arena: arriving bytes fill it from the start on, and both
            # threads must stay ahead of them.
            for at in range(first * step, self.nbytes, num_threads * step):
                populate(self.address + at, min(step, self.nbytes - at), is_over=is_over)

        for first in range(num_threads):
            args = (first, self._owner)
            # Without it, the first write to a page makes that page present.
            start_thread(
                threading.Thread(target=work, args=args, name=f"penstock-warm-{first}", daemon=True), is_needed=False
            )

    @property
    def free_bytes(self) -> int:
        """Return the bytes left for `place`."""
        return self.nbytes - self._used_bytes

    def place(self, nbytes: Iterable[int]) -> list[int]:
        """Return offsets for runs of these lengths, in this order, each aligned to `ALIGN_BYTES`.

        Raises:
            BudgetTooSmall: they do not fit; nothing was placed. `needed_bytes` says what would do.
        """
        # All or nothing: a model that fits in part is of no use, and runs are never given back one by one.
        with self._lock:
            offsets, at = offsets_of(nbytes, self._used_bytes)
            if at > self.nbytes:
                message = f"an arena of {self.nbytes} bytes has {self.free_bytes} left"
                raise BudgetTooSmall(message, minimum_bytes=at)
            self._used_bytes = at
        return offsets

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a run as a tensor: flat uint8 `[nbytes]`, a view that keeps the memory alive."""
        import torch

        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            message = f"bytes [{offset}, {offset + nbytes}) lie outside of an arena of {self.nbytes} bytes"
            raise ConfigError(message)
        # Made anew each time: the garbage collector cannot see torch's reference to the mapping, so a tensor kept here
        # would be a cycle that is never freed.
        whole = (
            torch.frombuffer(self._owner, dtype=torch.uint8) if isinstance(self._owner, MappedMemfd) else self._owner
        )
        return whole[offset : offset + nbytes]

    def runs_at(self, offsets: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return runs as tensors, each as `bytes_at` returns one; `offsets` ascend, as those of `place` do.

        Cost: 0.5 us each, where `bytes_at` takes 1.5 us.
        """
        # One call of torch cuts them all apart, with the gaps between them.
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
    """Return the bytes that an arena needs for runs of these lengths."""
    return offsets_of(nbytes)[1]


def offsets_of(nbytes: Iterable[int], start: int = 0) -> tuple[list[int], int]:
    """Return where `Arena.place` puts runs of these lengths after `start` bytes, and where the last ends."""
    offsets, at = [], start
    for length in nbytes:
        at = -(-at // ALIGN_BYTES) * ALIGN_BYTES
        offsets.append(at)
        at += length
    return offsets, at


def _check_room(nbytes: int) -> None:
    """Raise DestinationError if the host has less memory free: shared memory that runs out ends in SIGBUS."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            room = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    except OSError:
        room = None
    if room is not None and nbytes > room:
        raise DestinationError(f"an arena of {nbytes} bytes does not fit the host's {room} that are available")
