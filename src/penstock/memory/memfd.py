"""Shared memory without a name: sealed memfds of this process, and those of another process of the same user.

In: a length, or the process and number of a memfd. Out: a file descriptor, of memory that can neither shrink nor be
written to through a later opening. Not here: what the bytes are (`arena`, `transport.generation_table`).

A reader opens `/proc/PID/fd/N`: the kernel lets in who may trace that process (the same user), nothing is left behind
when both are gone, and no path comes from a peer. What is opened is looked at before it is opened, for opening a
device or a pipe does something; the seals say that reading the mapping cannot end in SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Callable

import numpy as np

from penstock.errors import ConfigError, DestinationError, PeerLost, PermissionDenied

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
