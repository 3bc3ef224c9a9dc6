"""io_uring through system calls: many concurrent reads without a Python thread for each.

A dozen Python threads that read from the page cache spend a third of their time waiting for the GIL. Layouts and
numbers are from include/uapi/linux/io_uring.h.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
import sys
from typing import Any

# The numbers are the same on every architecture except alpha. Source: include/uapi/asm-generic/unistd.h, Linux 5.1.
_SYS_SETUP, _SYS_ENTER, _SYS_REGISTER = 425, 426, 427
_OP_READ = 22
# Always use a worker, because a read from the page cache would otherwise run in the submitting call.
_SQE_ASYNC = 0x10
_ENTER_GETEVENTS, _ENTER_EXT_ARG = 1, 8
_REGISTER_MAX_WORKERS = 19
_FEAT_SINGLE_MMAP, _FEAT_EXT_ARG = 1, 1 << 8
_OFF_SQES = 0x10000000
_SQE_BYTES, _CQE_BYTES = 64, 16
# Size of struct io_uring_params, and the offsets of its fields features, sq_off and cq_off.
_PARAMS_BYTES, _FEATURES_AT, _SQ_AT, _CQ_AT = 120, 20, 40, 80
# MAX_RW_COUNT, to which the kernel truncates larger reads. Source: include/linux/fs.h.
_MAX_READ_BYTES = 0x7FFFF000
_SQE = struct.Struct("<BBHiQQIIQQQQ")
_CQE = struct.Struct("<QiI")

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# This call keeps the GIL, because reacquiring it from a busy thread is slow.
_libc_holding_gil: Any = ctypes.PyDLL(None, use_errno=True)
_libc_holding_gil.syscall.restype = ctypes.c_long


def refusal() -> str:
    """Return why this system has no usable io_uring, or an empty string."""
    if sys.platform != "linux":
        return "io_uring exists only on Linux"
    if platform.machine() != "x86_64":
        # The kernel shares the ring indices with this process. Python has no memory barriers, and only x86 needs none.
        return f"io_uring from Python needs x86-64's memory order, not {platform.machine()}"
    return ""


class Uring:
    """A ring of reads in flight, for use by one thread. `limits_workers` is False before Linux 5.15."""

    def __init__(
        self, fd: int, params: bytearray, rings: mmap.mmap, entries: mmap.mmap, *, limits_workers: bool
    ) -> None:
        self._fd = fd
        self._rings = rings
        self._sqes = entries
        self.limits_workers = limits_workers
        self._words = memoryview(rings).cast("I")
        sq = struct.unpack_from("<7I", params, _SQ_AT)
        cq = struct.unpack_from("<6I", params, _CQ_AT)
        # Offsets are indices of 32-bit words. The masks never change, so read their values now.
        self._sq_tail = sq[1] // 4
        self._sq_mask = self._words[sq[2] // 4]
        self._sq_array = sq[6] // 4
        self._cq_head = cq[0] // 4
        self._cq_tail = cq[1] // 4
        self._cq_mask = self._words[cq[2] // 4]
        self._cqes = cq[5]
        self._tail = 0
        self.num_unsubmitted = 0
        # struct __kernel_timespec and struct io_uring_getevents_arg.
        self._timespec = (ctypes.c_int64 * 2)()
        arg = struct.pack("<QIIQ", 0, 0, 0, ctypes.addressof(self._timespec))
        self._arg = ctypes.create_string_buffer(arg, len(arg))
        self._arg_bytes = ctypes.c_size_t(len(arg))

    @classmethod
    def open(cls, entries: int, num_workers: int) -> Uring:
        """Make a ring for `entries` reads. The kernel processes `num_workers` reads at once. Raises OSError."""
        # The kernel returns its features and the offsets of the rings in this struct.
        params = bytearray(_PARAMS_BYTES)
        raw = (ctypes.c_char * _PARAMS_BYTES).from_buffer(params)
        fd = int(_libc.syscall(_SYS_SETUP, entries, raw))
        if fd < 0:
            raise OSError(ctypes.get_errno(), "io_uring_setup")
        try:
            features = struct.unpack_from("<I", params, _FEATURES_AT)[0]
            if not features & _FEAT_SINGLE_MMAP or not features & _FEAT_EXT_ARG:
                raise OSError(errno.ENOSYS, "this kernel's io_uring is older than 5.11")
            # File reads use the first of two kinds of workers. 0 leaves the number of the second kind unchanged.
            limits = (ctypes.c_uint32 * 2)(num_workers, 0)
            limits_workers = not _libc.syscall(_SYS_REGISTER, fd, _REGISTER_MAX_WORKERS, limits, 2)
            num_sq, num_cq = struct.unpack_from("<II", params, 0)
            sq = struct.unpack_from("<7I", params, _SQ_AT)
            cq = struct.unpack_from("<6I", params, _CQ_AT)
            rings = mmap.mmap(fd, max(sq[6] + 4 * num_sq, cq[5] + _CQE_BYTES * num_cq))
            sqes = mmap.mmap(fd, num_sq * _SQE_BYTES, offset=_OFF_SQES)
            return cls(fd, params, rings, sqes, limits_workers=limits_workers)
        except BaseException:
            os.close(fd)
            raise

    def queue_read(self, fd: int, offset: int, address: int, nbytes: int, token: int) -> None:
        """Queue a read from a file to memory, which `wait` submits. At most `entries` may be in flight.

        The memory and the descriptor must stay valid until `wait` has returned the token. The read may be short.
        """
        index = self._tail & self._sq_mask
        nbytes = min(nbytes, _MAX_READ_BYTES)
        _SQE.pack_into(
            self._sqes, index * _SQE_BYTES, _OP_READ, _SQE_ASYNC, 0, fd, offset, address, nbytes, 0, token, 0, 0, 0
        )
        self._words[self._sq_array + index] = index
        self._tail = (self._tail + 1) & 0xFFFFFFFF
        # Store the tail last. x86 keeps the order of stores, so the kernel sees a complete entry.
        self._words[self._sq_tail] = self._tail
        self.num_unsubmitted += 1

    def wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Submit queued reads, and wait for a completion or the timeout if no read is complete. Raises OSError.

        Returns:
            Completed reads as (token, result). The result is the number of bytes read, or a negative errno.
        """
        is_ready = not timeout_s or self._words[self._cq_head] != self._words[self._cq_tail]
        if is_ready and not self.num_unsubmitted:
            return self._reap()
        if is_ready:
            # Submitting does not block, because min_complete is 0 and all reads use workers, so keep the GIL.
            done = _libc_holding_gil.syscall(_SYS_ENTER, self._fd, self.num_unsubmitted, 0, 0, None, ctypes.c_size_t(0))
        else:
            self._timespec[0], self._timespec[1] = int(timeout_s), int(timeout_s % 1 * 1e9)
            flags = _ENTER_GETEVENTS | _ENTER_EXT_ARG
            done = _libc.syscall(_SYS_ENTER, self._fd, self.num_unsubmitted, 1, flags, self._arg, self._arg_bytes)
        # EAGAIN and EBUSY mean that the kernel is short of memory or that completions must be reaped first.
        if done < 0 and (code := ctypes.get_errno()) not in {errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY}:
            raise OSError(code, "io_uring_enter")
        self.num_unsubmitted -= max(0, int(done))
        return self._reap()

    def _reap(self) -> list[tuple[int, int]]:
        completed = []
        head, tail = self._words[self._cq_head], self._words[self._cq_tail]
        while head != tail:
            token, result, _ = _CQE.unpack_from(self._rings, self._cqes + (head & self._cq_mask) * _CQE_BYTES)
            completed.append((token, result))
            head = (head + 1) & 0xFFFFFFFF
        # Store the head last, because the kernel may then overwrite the entries.
        self._words[self._cq_head] = head
        return completed

    def close(self) -> None:
        """Free the ring. Idempotent. No read may be in flight."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # An mmap cannot be closed while it has a view.
            self._words.release()
            self._rings.close()
            self._sqes.close()
            os.close(fd)
