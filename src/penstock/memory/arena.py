"""A region of memory for many tensors, so that peers reach all of them by one registration.

In: lengths and a device. Out: offsets, and flat views that keep the memory alive.
Not here: moving live tensors into one (`rehome`), registering it (`transport`), staging buffers (`staging`).

Host arenas are memfds mapped shared, which other processes of the host can map (`memfd`) once they are registered;
device arenas are one allocation of torch's. The first touch of shared memory costs 0.7 s a GB where the kernel gives it
no huge pages (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`; the arena asks for them), so let it be the load's.

Shared memory without a name: sealed memfds of this process, and those of another process of the same user.

In: a length, or the process and number of a memfd. Out: a file descriptor, of memory that can neither shrink nor be
written to through a later opening. Not here: what the bytes are (`arena`, `transport.generation_table`).

A reader opens `/proc/PID/fd/N`: the kernel lets in who may trace that process (the same user), nothing is left behind
when both are gone, and no path comes from a peer. What is opened is looked at before it is opened, for opening a
device or a pipe does something; the seals say that reading the mapping cannot end in SIGBUS.

Pages of host memory made present before their first use, many in one call, outside the GIL.

In: addresses. Out: pages there, zeroed.
Not here: their owners (`staging`, `arena`).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import BudgetTooSmall, ConfigError, DestinationError, DeviceOutOfMemory, PeerLost, PermissionDenied

if TYPE_CHECKING:
    import torch


_SEAL_FUTURE_WRITE = 0x10
"""No new writable mappings. Source: Linux 5.1, include/uapi/linux/fcntl.h; `fcntl` has no name for it before 3.13."""

_NEEDED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


_shared: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()
"""Every mapping of this process, by its address."""


class Mapping(mmap.mmap):
    """The writable mapping of a memfd of this process, made by `create`. Views keep it and the memfd alive.

    Attributes:
        fd: the memfd, open for as long as the mapping lives.
        inode: unlike that of any other memfd of this boot.
    """

    fd: int
    inode: int
    address: int
    nbytes: int
    let_go: Callable[[], object]

    def close(self) -> None:
        """Unmap it and close its descriptors. BufferError: there are views of it. Idempotent."""
        known = _shared.pop(self.address, None)  # before the address is another mapping's
        try:
            super().close()
        except BufferError:
            if known is not None:
                _shared[self.address] = known
            raise
        self.let_go()

    def seal(self) -> None:
        """Forbid writing to all others, so that processes of the host may map it. Idempotent."""
        if _is_sealed(self.fd):
            return
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _NEEDED | _SEAL_FUTURE_WRITE)
        except OSError:  # a kernel before 5.1: readers map it read-only all the same; or another thread was first
            if not _is_sealed(self.fd):
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _NEEDED)


def create(name: str, nbytes: int, *, sealed: bool = True) -> Mapping:
    """Create a memfd of `nbytes` (at least one page), mapped; no pages are touched.

    Args:
        sealed: see `Mapping.seal`; until then processes of the same user can write to it, and none reads it.

    Raises:
        ConfigError: this system has no memfds.
        DestinationError: no file descriptor or no address space is left.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("sharing memory between processes needs memfd_create", hint="use Linux")
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise DestinationError(f"cannot create shared memory: {error}") from error
    try:
        # memfds are made with 0777: without this any user who reaches the /proc entry could open it.
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, max(nbytes, mmap.PAGESIZE))
        mapped = Mapping(fd, max(nbytes, mmap.PAGESIZE))
        # No F_SEAL_WRITE: the kernel refuses it while a writable mapping exists, and ours is to stay.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapped.fd, mapped.inode, mapped.nbytes = fd, os.fstat(fd).st_ino, len(mapped)
        if sealed:
            mapped.seal()
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise DestinationError(f"cannot make {nbytes} bytes of shared memory: {error}") from error
    mapped.address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
    # A finalizer, so that the descriptor is closed once, whether by `close` or with the last reference.
    mapped.let_go = weakref.finalize(mapped, os.close, fd)
    _shared[mapped.address] = mapped
    return mapped


def shared_at(address: int, nbytes: int) -> Mapping | None:
    """Return the mapping of this process that these bytes lie in, if they do."""
    # A copy: another thread may create or drop a mapping while this one looks.
    for mapped in list(_shared.values()):
        if mapped.address <= address and address + nbytes <= mapped.address + mapped.nbytes:
            return mapped
    return None


def open_peer(pid: int, fd: int, min_nbytes: int, uri: str) -> int:
    """Open another process's sealed memfd read-only; the caller closes it.

    Args:
        pid, fd: the process, and the number of the memfd in it.
        min_nbytes: bytes it must have.
        uri: how errors call the peer.

    Raises:
        PeerLost: there is no such process, or this is no sealed memfd of ours, or too short: not the one meant.
        PermissionDenied: the kernel does not let us look into that process.
        DestinationError: no file descriptor is left here.
    """
    what = f"descriptor {fd} of process {pid}"
    try:
        seen = os.open(f"/proc/{pid:d}/fd/{fd:d}", os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerLost(f"{what} is gone", uri=uri) from error
    except PermissionError as error:
        hint = "run both as one user, in one container, and dumpable"
        raise PermissionDenied(f"{what} may not be opened", uri=uri, hint=hint) from error
    except OSError as error:
        raise DestinationError(f"cannot open {what}: {error}", uri=uri) from error
    try:
        state = os.fstat(seen)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_nlink:
            # No links: a memfd has no name. A file of the user that has one is not what a peer can have meant.
            raise PeerLost(f"{what} is no shared memory of this user", uri=uri)
        try:
            # Through the descriptor that was looked at: opened by the peer's path again, it could be another file by
            # now.
            opened = os.open(f"/proc/self/fd/{seen:d}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DestinationError(f"cannot open {what}: {error}", uri=uri) from error
    finally:
        os.close(seen)
    if not _is_sealed(opened) or state.st_size < min_nbytes:
        os.close(opened)
        raise PeerLost(f"{what} is not sealed memory of {min_nbytes} bytes", uri=uri)
    return opened


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _NEEDED == _NEEDED
    except OSError:  # EINVAL: not a memfd
        return False


_MADV_POPULATE_WRITE = 23
"""Fault the pages in one call. Source: Linux 5.14, include/uapi/asm-generic/mman-common.h."""

STEP_BYTES = 1 << 20
"""Zeroing this much takes about 0.1 ms; each call holds the address space's lock, which others need to allocate."""

_SHARE_BYTES = 4 * STEP_BYTES
"""Share of one thread at a time, where several populate."""

_libc = ctypes.CDLL(None, use_errno=True)


def populate(address: int, nbytes: int, *, is_over: Callable[[], bool] | None = None) -> None:
    """Make `nbytes` of writable memory from `address` present, unless `is_over` says to stop.

    A kernel without MADV_POPULATE_WRITE answers EINVAL; the pages are then faulted by their first use.

    Cost: a GB of shared memory 0.6 s, of which two threads take 0.37; faulting it page by page 0.85 to 1.5 s.
    """
    for at in range(address, address + nbytes, STEP_BYTES):
        if is_over is not None and is_over():
            return
        # The answer is ignored: pages that stay absent are made by their first use, and only later.
        _libc.madvise(
            ctypes.c_void_p(at), ctypes.c_size_t(min(STEP_BYTES, address + nbytes - at)), _MADV_POPULATE_WRITE
        )


def populate_by(pool: ThreadPoolExecutor, address: int, nbytes: int) -> None:
    """Do as `populate` by all threads of a pool.

    Cost: where one thread takes 0.55 s a GB, twelve take 0.12. Source: benchmarks/results/h200x2_202611/convert.md.
    """
    starts = range(address, address + nbytes, _SHARE_BYTES)
    for _ in pool.map(lambda at: populate(at, min(_SHARE_BYTES, address + nbytes - at)), starts):
        pass


ALIGN_BYTES = 512
"""Where a tensor may start. Source: torch's CUDA caching allocator rounds to 512 bytes, and kernels rely on it."""

WARM_STEPS = 16
"""Steps a thread of `warm` takes in a row: 16 MiB, a chunk of a fetch."""


class Arena:
    """A region made by `allocate`. Tensors are placed one after the other; it is freed only as a whole.

    Attributes:
        address, nbytes, device: the region; `device` is `"cpu"` or `"cuda:N"`.

    Ownership: the memory lives as long as the arena or any tensor in it, and can be registered for as long.
    """

    def __init__(self, device: str, address: int, nbytes: int, owner: Mapping | torch.Tensor) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self._owner = owner
        self._used_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def allocate(cls, nbytes: int, device: str | torch.device = "cpu") -> Arena:
        """Allocate an arena of `nbytes`, untouched.

        Raises:
            ConfigError: no arenas on this kind of device.
            DestinationError: the host cannot map that much; no file descriptor is left.
            DeviceOutOfMemory: the device has no room.
        """
        name = str(device)
        if nbytes < 0:
            raise ConfigError(f"an arena of {nbytes} bytes")
        if name == "cpu":
            return cls._on_host(nbytes)
        if name.partition(":")[0] == "cuda":
            return cls._on_cuda(nbytes, name)
        raise ConfigError(f"cannot make an arena on {name}", hint="use cpu or cuda")

    @classmethod
    def _on_host(cls, nbytes: int) -> Arena:
        _check_room(nbytes)
        # Sealed at its registration: until then the workers of a conversion write to it by its path.
        mapped = create("penstock-arena", nbytes, sealed=False)
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

    @property
    def path(self) -> str:
        """Return a host arena's path, for processes of this user that write to it, until it is registered."""
        assert isinstance(self._owner, Mapping)
        # By /proc: the memfd has no path of its own, and this one ends with the process.
        return f"/proc/{os.getpid()}/fd/{self._owner.fd}"

    def warm(self, is_over: Callable[[], bool], num_threads: int = 2) -> None:
        """Begin to make a host arena's pages present, from its start on, before they are written; returns at once.

        Args:
            is_over: called often by the threads, which keep the memory alive until it returns True or they are done.
            num_threads: how many; more than two wait for each other.
        """
        if self.device != "cpu":
            return
        step = STEP_BYTES * WARM_STEPS

        def work(first: int, owner: object) -> None:
            # In turns and not by halves: bytes come from the start on, and both threads should be ahead of them.
            for at in range(first * step, self.nbytes, num_threads * step):
                populate(self.address + at, min(step, self.nbytes - at), is_over=is_over)

        for first in range(num_threads):
            threading.Thread(target=work, args=(first, self._owner), name=f"penstock-warm-{first}", daemon=True).start()

    @property
    def free_bytes(self) -> int:
        """Return the bytes left for `place`."""
        return self.nbytes - self._used_bytes

    def place(self, nbytes: Iterable[int]) -> list[int]:
        """Return offsets for runs of these lengths, in this order, each aligned to `ALIGN_BYTES`.

        Raises:
            BudgetTooSmall: they do not fit; nothing was placed. `needed_bytes` says what would do.
        """
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
            raise ConfigError(f"bytes [{offset}, {offset + nbytes}) of an arena of {self.nbytes}")
        # Made anew each time: the garbage collector cannot see torch's reference to the mapping, so a tensor kept here
        # would be a cycle that is never freed.
        whole = torch.frombuffer(self._owner, dtype=torch.uint8) if isinstance(self._owner, Mapping) else self._owner
        return whole[offset : offset + nbytes]


def needed_bytes(nbytes: Iterable[int]) -> int:
    """Return the size of an arena for runs of these lengths."""
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
