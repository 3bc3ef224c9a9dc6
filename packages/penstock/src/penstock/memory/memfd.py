"""Shared memory without a name: sealed memfds of this process, and those of another process of the same user.

In: a length, or a file descriptor that a peer sent. Out: a mapping whose memory can neither shrink nor be written to
through a later opening; the proof that a peer's descriptor is one.
Not here: what the bytes are (`arena`, `transport.host_endpoint`), sending descriptors (`transport.fd_server`).

The owner sends readers a read-only opening of the memfd. Nothing is left behind when both are gone. The seals prove
that the file cannot shrink, so reading the mapping cannot end in SIGBUS.
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
"""No new writable mappings. Source: Linux 5.1, include/uapi/linux/fcntl.h; `fcntl` has no name for it before 3.13."""

_NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""Seals without which a peer's memory is not mapped: it keeps its length, and nobody can add a seal later."""

_shared: weakref.WeakValueDictionary[int, MappedMemfd] = weakref.WeakValueDictionary()
"""Every mapping of this process, by its address."""


class MappedMemfd(mmap.mmap):
    """The writable mapping of a memfd of this process, made by `create_memfd`. Views keep it and the memfd alive.

    Attributes:
        fd: the memfd, open for as long as the mapping lives.
        inode: unlike that of any other memfd of this boot.
        address, nbytes: the mapping, of whole pages.
        close_fd: closes the memfd, once.
    """

    fd: int
    inode: int
    address: int
    nbytes: int
    close_fd: Callable[[], object]

    def close(self) -> None:
        """Unmap it and close its descriptors. BufferError: there are views of it. Idempotent."""
        # Before it is unmapped: from then on the kernel may give the address to another mapping of another thread.
        known = _shared.pop(self.address, None)
        try:
            super().close()
        except BufferError:
            if known is not None:
                _shared[self.address] = known
            raise
        self.close_fd()

    def readable(self) -> int:
        """Return a new descriptor for a peer, which can only read; the caller closes it."""
        # An opening of its own, not a duplicate: a duplicate could write, and would share our locks.
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def export(self) -> Iterator[int]:
        """Yield its one descriptor for a peer; see `transport.host_endpoint.Exportable`."""
        yield self.readable()

    def seal(self) -> None:
        """Forbid writing to all others, so that processes of the host may map it. Idempotent."""
        if _is_sealed(self.fd):
            return
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _NEEDED_SEALS | _SEAL_FUTURE_WRITE)
        except OSError:
            # Another thread sealed it first; or the kernel is older than 5.1, where readers map it read-only all the
            # same, but a process of this user could map it writable.
            if not _is_sealed(self.fd):
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _NEEDED_SEALS)


def create_memfd(name: str, nbytes: int, *, sealed: bool = True) -> MappedMemfd:
    """Create a memfd of `nbytes` (at least one page), mapped; no pages are touched.

    Args:
        name: shown in `/proc/PID/maps`, for people only.
        nbytes: its length; it never changes.
        sealed: see `MappedMemfd.seal`; until then processes of the same user can write to it, and none reads it.

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
        # Memfds are made with mode 0777: without this any user who receives a descriptor could open it again to write.
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, max(nbytes, mmap.PAGESIZE))
        mapped = MappedMemfd(fd, max(nbytes, mmap.PAGESIZE))
        # No F_SEAL_WRITE: the kernel refuses it while a writable mapping exists, and ours is to stay.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapped.fd = fd
        mapped.inode = os.fstat(fd).st_ino
        mapped.nbytes = len(mapped)
        if sealed:
            mapped.seal()
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise DestinationError(f"cannot make {nbytes} bytes of shared memory: {error}") from error
    mapped.address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
    # A finalizer, so that the descriptor is closed once, whether by `close` or with the last reference.
    mapped.close_fd = weakref.finalize(mapped, os.close, fd)
    # Not at the interpreter's exit, where other threads still use it. The kernel closes it then.
    mapped.close_fd.atexit = False
    # By address: a registration knows only where its memory is, and asks `shared_at` for the memfd behind it.
    _shared[mapped.address] = mapped
    return mapped


def shared_at(address: int, nbytes: int) -> MappedMemfd | None:
    """Return the mapping of this process in which these bytes lie; None: they lie in none."""
    # `valuerefs` copies the dictionary in one step. `values` iterates over it, and fails with RuntimeError where
    # another thread creates a mapping meanwhile.
    for reference in _shared.valuerefs():
        mapped = reference()
        if mapped is not None and mapped.address <= address and address + nbytes <= mapped.address + mapped.nbytes:
            return mapped
    return None


def check_peer_memfd(fd: int, min_nbytes: int, uri: str) -> None:
    """Check that a descriptor from a peer is a sealed memfd of this user that can be mapped.

    Args:
        fd: the descriptor.
        min_nbytes: bytes it must have.
        uri: the peer's name in errors.

    Raises:
        PeerLost: it is something else, or too short.
    """
    state = os.fstat(fd)
    _check_kind(state, uri)
    if not _is_sealed(fd) or state.st_size < min_nbytes:
        raise PeerLost(f"the file of the peer is not sealed memory of {min_nbytes} bytes", uri=uri)


def open_memfd_of_process(pid: int, fd: int, uri: str) -> int:
    """Open a memfd of a process of the previous release, which sends no descriptors; the caller closes it.

    Raises:
        PeerLost: there is no such process, or the number is of no shared memory of this user.
        PermissionDenied: the kernel does not let us look into that process.
        DestinationError: no file descriptor is left here.
    """
    # O_PATH first: it has no effect on whatever the number stands for, and fstat can tell what that is.
    try:
        looked_at = os.open(f"/proc/{pid:d}/fd/{fd:d}", os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerLost(f"descriptor {fd} of process {pid} is gone", uri=uri) from error
    except PermissionError as error:
        hint = "run both as one user, in one container, and dumpable"
        raise PermissionDenied(f"descriptor {fd} of process {pid} may not be opened", uri=uri, hint=hint) from error
    except OSError as error:
        raise DestinationError(f"cannot open descriptor {fd} of process {pid}: {error}", uri=uri) from error
    try:
        _check_kind(os.fstat(looked_at), uri)
        # Through the descriptor that was looked at: by the peer's path it could be another file by now.
        return os.open(f"/proc/self/fd/{looked_at:d}", os.O_RDONLY | os.O_CLOEXEC)
    except PenstockError:
        raise
    except OSError as error:
        raise DestinationError(f"cannot open descriptor {fd} of process {pid}: {error}", uri=uri) from error
    finally:
        os.close(looked_at)


def _check_kind(state: os.stat_result, uri: str) -> None:
    # A memfd has no name, thus no links: a file of the user's that has one is not what a peer can have meant.
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_nlink:
        raise PeerLost("the file of the peer is not shared memory of this user", uri=uri)


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _NEEDED_SEALS == _NEEDED_SEALS
    except OSError:
        # EINVAL: a file that is no memfd.
        return False
