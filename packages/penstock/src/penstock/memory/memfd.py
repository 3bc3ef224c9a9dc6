"""Shared memory without a name: sealed memfds of this process and of other processes of the same user.

The owner sends readers a read-only opening of the memfd. The seals prove that the file cannot shrink, so reading the
mapping cannot end in SIGBUS. Nothing is left behind when both processes are gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from penstock import descriptors
from penstock.errors import ConfigError, DestinationError, PeerLost, PenstockError, PermissionDenied

_SEAL_FUTURE_WRITE = 0x10
"""Forbids new writable mappings. Source: Linux 5.1, include/uapi/linux/fcntl.h. `fcntl` has no name for
it before 3.13."""

_NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""Seals that a peer's memory needs to be mapped. It keeps its length, and nobody can add a seal later."""

_shared: weakref.WeakValueDictionary[int, MappedMemfd] = weakref.WeakValueDictionary()
"""All mappings of this process, by address."""


class MappedMemfd(mmap.mmap):
    """Writable mapping of a memfd of this process, created by `create_memfd`. Views keep it and the memfd alive.

    Attributes:
        fd: the memfd, which is open as long as the mapping exists.
        inode: number that no other memfd has until the host reboots.
        address, nbytes: the mapping, in whole pages.
        close_fd: closes the memfd, once.
    """

    fd: int
    inode: int
    address: int
    nbytes: int
    close_fd: Callable[[], object]

    def close(self) -> None:
        """Unmap the memory and close its descriptors. Idempotent. Raises BufferError if it has views."""
        # Forget the address before unmapping, since the kernel may then give it to a mapping of another thread.
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
        # Open the file again. A duplicate could write and would share this process's locks.
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def export(self) -> Iterator[int]:
        """Yield the one descriptor for a peer; see `transport.host_endpoint.Exportable`."""
        yield self.readable()

    def seal(self) -> None:
        """Forbid all others to write, so that other processes may map the memory. Idempotent."""
        if _is_sealed(self.fd):
            return
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _NEEDED_SEALS | _SEAL_FUTURE_WRITE)
        except OSError:
            # Another thread sealed it first, or the kernel is older than 5.1. There readers still map it read-only, but
            # a process of this user could map it writable.
            if not _is_sealed(self.fd):
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _NEEDED_SEALS)


def create_memfd(name: str, nbytes: int, *, sealed: bool = True) -> MappedMemfd:
    """Create and map a memfd of `nbytes` (at least one page) without touching its pages.

    Args:
        name: label in `/proc/PID/maps`.
        nbytes: its length, which never changes.
        sealed: whether to seal it; see `MappedMemfd.seal`. Until it is sealed, processes of the same user can write to
            it, and no process reads it.

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
        # Memfds are created with mode 0777. Any user who receives a descriptor could open it again to write.
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, max(nbytes, mmap.PAGESIZE))
        mapped = MappedMemfd(fd, max(nbytes, mmap.PAGESIZE))
        # F_SEAL_WRITE is not possible, since the kernel refuses it while this writable mapping exists.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapped.fd = fd
        mapped.inode = os.fstat(fd).st_ino
        mapped.nbytes = len(mapped)
        if sealed:
            mapped.seal()
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise DestinationError(f"cannot create {nbytes} bytes of shared memory: {error}") from error
    mapped.address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
    # A finalizer closes the descriptor once, by `close` or with the last reference.
    mapped.close_fd = weakref.finalize(mapped, os.close, fd)
    # Do not close it at the interpreter's exit, where other threads still use it. The kernel closes it later.
    mapped.close_fd.atexit = False
    # A registration only knows the address of its memory, and asks `shared_at` for the memfd.
    _shared[mapped.address] = mapped
    return mapped


def shared_at(address: int, nbytes: int) -> MappedMemfd | None:
    """Return the mapping of this process that contains these bytes, or None."""
    # `valuerefs` copies the dictionary in one step. Iterating over `values` raises RuntimeError if another thread
    # creates a mapping.
    for reference in _shared.valuerefs():
        mapped = reference()
        if mapped is not None and mapped.address <= address and address + nbytes <= mapped.address + mapped.nbytes:
            return mapped
    return None


def check_peer_memfd(fd: int, min_nbytes: int, uri: str) -> None:
    """Check that a peer's descriptor is a sealed memfd of this user that can be mapped.

    Args:
        min_nbytes: minimum length of the memfd.
        uri: name of the peer in errors.

    Raises:
        PeerLost: it is a different kind of file, or too short.
    """
    state = os.fstat(fd)
    _check_kind(state, uri)
    if not _is_sealed(fd) or state.st_size < min_nbytes:
        raise PeerLost(f"the peer's file is not a sealed memfd of at least {min_nbytes} bytes", uri=uri)


def open_memfd_of_process(pid: int, fd: int, uri: str) -> int:
    """Open a memfd of a process of the previous release, which sends no descriptors. The caller closes it.

    Raises:
        PeerLost: the process does not exist, or the number is not shared memory of this user.
        PermissionDenied: the kernel does not allow access to that process.
        DestinationError: no file descriptor is left here.
    """
    # Open with O_PATH first, which has no effect on the file, and check with fstat what it is.
    try:
        path_fd = os.open(f"/proc/{pid:d}/fd/{fd:d}", os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerLost(f"descriptor {fd} of process {pid} is gone", uri=uri) from error
    except PermissionError as error:
        hint = "run both processes as one user, in one container, and dumpable"
        raise PermissionDenied(f"descriptor {fd} of process {pid} may not be opened", uri=uri, hint=hint) from error
    except OSError as error:
        raise DestinationError(f"cannot open descriptor {fd} of process {pid}: {error}", uri=uri) from error
    try:
        _check_kind(os.fstat(path_fd), uri)
        # Open through the checked descriptor, since the peer's path could be a different file by now.
        return os.open(f"/proc/self/fd/{path_fd:d}", os.O_RDONLY | os.O_CLOEXEC)
    except PenstockError:
        raise
    except OSError as error:
        raise DestinationError(f"cannot open descriptor {fd} of process {pid}: {error}", uri=uri) from error
    finally:
        os.close(path_fd)


def _check_kind(state: os.stat_result, uri: str) -> None:
    # A memfd has no name and thus no links. A file of the user with a link cannot be what the peer meant.
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_nlink:
        raise PeerLost("the peer's file is not shared memory of this user", uri=uri)


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _NEEDED_SEALS == _NEEDED_SEALS
    except OSError:
        # EINVAL means that the file is not a memfd.
        return False
