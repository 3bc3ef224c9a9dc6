"""Anonymous shared memory: sealed memfds of this process and of the same user's other processes.

The owner sends readers a read-only descriptor. The seals prove that the file cannot shrink, so reading the mapping
cannot end in SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterator

from penstock import descriptors
from penstock.errors import ConfigError, DestinationError, PeerLost, PenstockError, PermissionDenied
from penstock.memory.mapping import READ_WRITE, map_aligned

_SEAL_FUTURE_WRITE = 0x10
"""Forbids new writable mappings. Source: Linux 5.1, include/uapi/linux/fcntl.h. Python names it from 3.13 on."""

_NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""Seals that a peer's memory must have before it is mapped, so that its size and seals never change."""

_shared: weakref.WeakValueDictionary[int, MappedMemfd] = weakref.WeakValueDictionary()
"""All mappings of this process, by address."""


class MappedMemfd(mmap.mmap):
    """Writable mapping of a memfd of this process, created by `create_memfd`. Views keep the mapping and memfd alive.

    Attributes:
        fd: the memfd, which is open as long as the mapping exists.
        inode: number that is unique until the host reboots.
        address, nbytes: the memory, at a multiple of a huge page if it is as large.
        start: offset of the memory in this buffer, which also covers addresses before and after the memory.
    """

    fd: int
    inode: int
    address: int
    nbytes: int
    start: int
    close_fd: Callable[[], object]

    def close(self) -> None:
        """Unmap the memory and close its descriptors. Idempotent. Raise BufferError if there are views."""
        # Forget the address first, because the kernel may reuse it for another thread's mapping.
        registered = _shared.pop(self.address, None)
        try:
            super().close()
        except BufferError:
            if registered is not None:
                _shared[self.address] = registered
            raise
        self.close_fd()

    def readable(self) -> int:
        """Return a new read-only descriptor for a peer. The caller closes it."""
        # A duplicate descriptor could write and would share this process's locks.
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def export(self) -> Iterator[int]:
        """Yield the descriptor for a peer, see `transport.host_endpoint.Exportable`."""
        yield self.readable()

    def seal(self) -> None:
        """Forbid writes by other processes, so that they may map the memory. Idempotent."""
        if _is_sealed(self.fd):
            return
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _NEEDED_SEALS | _SEAL_FUTURE_WRITE)
        except OSError:
            # Another thread has already sealed the memfd, or the kernel is older than 5.1 and lacks this seal.
            if not _is_sealed(self.fd):
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _NEEDED_SEALS)


def create_memfd(name: str, nbytes: int, *, sealed: bool = True) -> MappedMemfd:
    """Create and map a memfd of `nbytes` (at least one page) without touching its pages.

    Args:
        name: label in `/proc/PID/maps`.
        nbytes: size, which never changes.
        sealed: whether to seal the memfd. Other processes of the same user can write to an unsealed memfd.

    Raises:
        ConfigError: this system has no memfds.
        DestinationError: no file descriptor or no address space is left.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("sharing memory between processes needs memfd_create", hint="use Linux")
    try:
        fd = descriptors.retried(lambda: os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        raise DestinationError(f"cannot create shared memory: {error}", hint=descriptors.hint_of(error)) from error
    try:
        # A memfd has mode 0777, so any user who receives a descriptor could open it again for writing.
        os.fchmod(fd, 0o600)
        size = max(nbytes, mmap.PAGESIZE)
        os.ftruncate(fd, size)
        mapped, start, address = map_aligned(MappedMemfd, fd, READ_WRITE, mmap.MAP_SHARED)
        # The kernel refuses F_SEAL_WRITE while this writable mapping exists.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapped.fd = fd
        mapped.inode = os.fstat(fd).st_ino
        mapped.address, mapped.nbytes, mapped.start = address, size, start
        if sealed:
            mapped.seal()
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise DestinationError(f"cannot create {nbytes} bytes of shared memory: {error}") from error
    # Close the descriptor with the last reference, but not at exit, where other threads may still use it.
    mapped.close_fd = weakref.finalize(mapped, os.close, fd)
    mapped.close_fd.atexit = False
    # A registration knows only the address of its memory, and finds the memfd with `shared_at`.
    _shared[mapped.address] = mapped
    return mapped


def shared_at(address: int, nbytes: int) -> MappedMemfd | None:
    """Return the mapping of this process that contains these bytes, or None."""
    # `valuerefs` copies the dictionary in one step, while other threads may create mappings.
    for reference in _shared.valuerefs():
        mapped = reference()
        if mapped is not None and mapped.address <= address and address + nbytes <= mapped.address + mapped.nbytes:
            return mapped
    return None


def check_peer_memfd(fd: int, min_nbytes: int, uri: str) -> None:
    """Raise PeerLost unless a peer's descriptor is a sealed memfd of this user with at least `min_nbytes`."""
    state = os.fstat(fd)
    _check_kind(state, uri)
    if not _is_sealed(fd) or state.st_size < min_nbytes:
        raise PeerLost(f"the peer's file is not a sealed memfd of at least {min_nbytes} bytes", uri=uri)


def open_memfd_of_process(pid: int, fd: int, uri: str) -> int:
    """Open a memfd of a process that runs the previous release and sends no descriptors. The caller closes it.

    Raise PeerLost if the file is not shared memory of this user, PermissionDenied if the kernel refuses access, and
    DestinationError if no file descriptor is left.
    """
    # Opening with O_PATH has no effect on the file, so check its kind before opening it for reading.
    try:
        path_fd = os.open(f"/proc/{pid:d}/fd/{fd:d}", os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerLost(f"descriptor {fd} of process {pid} no longer exists", uri=uri) from error
    except PermissionError as error:
        hint = "run both processes as one user, in one container, and dumpable"
        raise PermissionDenied(f"no permission to open descriptor {fd} of process {pid}", uri=uri, hint=hint) from error
    except OSError as error:
        raise DestinationError(f"cannot open descriptor {fd} of process {pid}: {error}", uri=uri) from error
    try:
        _check_kind(os.fstat(path_fd), uri)
        # Open the checked file, because the peer's path may refer to a different file by now.
        return os.open(f"/proc/self/fd/{path_fd:d}", os.O_RDONLY | os.O_CLOEXEC)
    except PenstockError:
        raise
    except OSError as error:
        raise DestinationError(f"cannot open descriptor {fd} of process {pid}: {error}", uri=uri) from error
    finally:
        os.close(path_fd)


def _check_kind(state: os.stat_result, uri: str) -> None:
    # A memfd has no hard links. A file with a link is not shared memory.
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_nlink:
        raise PeerLost("the peer's file is not shared memory of this user", uri=uri)


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _NEEDED_SEALS == _NEEDED_SEALS
    except OSError:
        # The file is not a memfd (EINVAL).
        return False
