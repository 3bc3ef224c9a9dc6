"""io_uring by system call: reads that the kernel's own workers carry out, many at once, without a Python thread each.

In: descriptor, offset, address, length. Out: completions, in the order they happen.
Not here: which reads suit it (`files`), who waits (`engine.fetch_ring`).

Why: a dozen Python threads that read from the page cache spend a third of their time fighting for the GIL.
Layouts and numbers are those of include/uapi/linux/io_uring.h.
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

# One number on every architecture but alpha. Source: include/uapi/asm-generic/unistd.h, Linux 5.1.
_SYS_SETUP, _SYS_ENTER, _SYS_REGISTER = 425, 426, 427
_OP_READ = 22
# Always by a worker: a read from the page cache would else be done inside the submitting call.
_SQE_ASYNC = 0x10
_ENTER_GETEVENTS, _ENTER_EXT_ARG = 1, 8
# Linux 5.15.
_REGISTER_MAX_WORKERS = 19
_FEAT_SINGLE_MMAP, _FEAT_EXT_ARG = 1, 1 << 8
_OFF_SQES = 0x10000000
_SQE_BYTES, _CQE_BYTES = 64, 16
# Offsets in struct io_uring_params: features, sq_off, cq_off.
_PARAMS_BYTES, _FEATURES_AT, _SQ_AT, _CQ_AT = 120, 20, 40, 80
# MAX_RW_COUNT: a read of more is cut by the kernel to this. Source: include/linux/fs.h.
_MAX_READ_BYTES = 0x7FFFF000
_SQE = struct.Struct("<BBHiQQIIQQQQ")
_CQE = struct.Struct("<QiI")

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# The same call without letting go of the GIL, which a busy thread would keep for a switch interval: to submit only.
_libc_holding_gil: Any = ctypes.PyDLL(None, use_errno=True)
_libc_holding_gil.syscall.restype = ctypes.c_long


def _entered(result: int) -> int:
    """Return what io_uring_enter returned. Raise OSError unless it only had nothing to do for now."""
    # EAGAIN, EBUSY: short of memory, or completions wait to be reaped. The caller reaps and calls again.
    if result < 0 and (code := ctypes.get_errno()) not in {errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY}:
        raise OSError(code, "io_uring_enter")
    return result


def refusal() -> str:
    """Return why this system has no ring to offer; "" where it has one."""
    if sys.platform != "linux":
        return "io_uring is Linux's"
    if platform.machine() != "x86_64":
        # Ring indices are shared with the kernel; Python has no memory barriers, and only x86 needs none here.
        return f"io_uring from Python needs x86-64's memory order, not {platform.machine()}"
    return ""


class Uring:
    """A ring of `entries` reads in flight, for use by one thread.

    Args:
        entries: the most reads in flight.
        num_workers: the most that the kernel carries out at the same time; the others wait for a worker.

    Attributes:
        limits_workers: True if the kernel has such a limit (since 5.15); else it works on all reads in flight.

    Raises:
        OSError: the kernel refuses (ENOSYS before 5.1, EPERM where it is disabled, ENOMEM).
    """

    def __init__(self, entries: int, num_workers: int) -> None:
        # The kernel answers in the same struct: which features it has, and where in the rings each word is.
        params = bytearray(_PARAMS_BYTES)
        raw = (ctypes.c_char * _PARAMS_BYTES).from_buffer(params)
        self._fd = int(_libc.syscall(_SYS_SETUP, entries, raw))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "io_uring_setup")
        try:
            self._set_up(params, num_workers)
        except BaseException:
            os.close(self._fd)
            raise

    def _set_up(self, params: bytearray, num_workers: int) -> None:
        """Limit the kernel's workers, and map the rings of the descriptor; the kernel has filled `params`."""
        features = struct.unpack_from("<I", params, _FEATURES_AT)[0]
        if not features & _FEAT_SINGLE_MMAP or not features & _FEAT_EXT_ARG:
            raise OSError(errno.ENOSYS, "io_uring of this kernel is older than 5.11")
        # Two kinds of workers: reads of files have the first, of which 0 would leave the number as it is.
        limits = (ctypes.c_uint32 * 2)(num_workers, 0)
        self.limits_workers = not _libc.syscall(_SYS_REGISTER, self._fd, _REGISTER_MAX_WORKERS, limits, 2)
        num_sq, num_cq = struct.unpack_from("<II", params, 0)
        sq = struct.unpack_from("<7I", params, _SQ_AT)
        cq = struct.unpack_from("<6I", params, _CQ_AT)
        self._rings = mmap.mmap(self._fd, max(sq[6] + 4 * num_sq, cq[5] + _CQE_BYTES * num_cq))
        self._sqes = mmap.mmap(self._fd, num_sq * _SQE_BYTES, offset=_OFF_SQES)
        self._words = memoryview(self._rings).cast("I")
        # Places in the mapped ring as indices of 32-bit words; the masks never change, so their values are read now.
        self._sq_tail = sq[1] // 4
        self._sq_mask = self._words[sq[2] // 4]
        self._sq_array = sq[6] // 4
        self._cq_head = cq[0] // 4
        self._cq_tail = cq[1] // 4
        self._cq_mask = self._words[cq[2] // 4]
        # In bytes: completions are unpacked from there.
        self._cqes = cq[5]
        self._tail = 0
        self._unsubmitted = 0
        # struct __kernel_timespec and struct io_uring_getevents_arg.
        self._timespec = (ctypes.c_int64 * 2)()
        arg = struct.pack("<QIIQ", 0, 0, 0, ctypes.addressof(self._timespec))
        self._arg = ctypes.create_string_buffer(arg, len(arg))
        self._arg_bytes = ctypes.c_size_t(len(arg))

    def queue_read(self, fd: int, offset: int, address: int, nbytes: int, token: int) -> None:
        """Queue a read of file bytes to memory; `wait` submits it. At most `entries` may be in flight.

        As read(2), it may read less than it is asked for: the caller queues the rest.

        Ownership: the memory and the descriptor must stay until `wait` has returned the token.
        """
        index = self._tail & self._sq_mask
        # The entry's length has 32 bits.
        nbytes = min(nbytes, _MAX_READ_BYTES)
        _SQE.pack_into(
            self._sqes, index * _SQE_BYTES, _OP_READ, _SQE_ASYNC, 0, fd, offset, address, nbytes, 0, token, 0, 0, 0
        )
        self._words[self._sq_array + index] = index
        # The rings' indices are 32-bit counters that wrap around; the mask makes them slots.
        self._tail = (self._tail + 1) & 0xFFFFFFFF
        # Stored last: x86 keeps stores in order, so the kernel that sees the new tail sees the whole entry.
        self._words[self._sq_tail] = self._tail
        self._unsubmitted += 1

    def wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Submit what is queued; unless a read is complete, wait for one or for the timeout.

        Returns:
            The completed reads as (token, result); a result is the bytes read, or minus an errno.

        Raises:
            OSError: the ring itself failed. Reads in flight may go on, and no completion of them can be received.
        """
        is_complete = self._words[self._cq_head] != self._words[self._cq_tail]
        if is_complete and not self._unsubmitted:
            return self._reap()
        if is_complete:
            # To submit does not block (min_complete 0, every read goes to a worker), so keeping the GIL delays nobody.
            done = _libc_holding_gil.syscall(_SYS_ENTER, self._fd, self._unsubmitted, 0, 0, None, ctypes.c_size_t(0))
        else:
            self._timespec[0], self._timespec[1] = int(timeout_s), int(timeout_s % 1 * 1e9)
            # With the timeout as an argument (5.11); before that it took an entry of the ring itself.
            flags = _ENTER_GETEVENTS | _ENTER_EXT_ARG
            done = _libc.syscall(_SYS_ENTER, self._fd, self._unsubmitted, 1, flags, self._arg, self._arg_bytes)
        self._unsubmitted -= max(0, _entered(int(done)))
        return self._reap()

    def _reap(self) -> list[tuple[int, int]]:
        """Take all completions out of the ring."""
        completed = []
        head, tail = self._words[self._cq_head], self._words[self._cq_tail]
        while head != tail:
            token, result, _ = _CQE.unpack_from(self._rings, self._cqes + (head & self._cq_mask) * _CQE_BYTES)
            completed.append((token, result))
            head = (head + 1) & 0xFFFFFFFF
        # After the entries were read: from here on the kernel may overwrite them.
        self._words[self._cq_head] = head
        return completed

    def close(self) -> None:
        """Free the ring. Nothing may be in flight. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # Before the mmap that it is a view of: an mmap with a view of it cannot be closed.
            self._words.release()
            self._rings.close()
            self._sqes.close()
            os.close(fd)
