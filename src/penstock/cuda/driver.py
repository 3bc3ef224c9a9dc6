"""The CUDA driver calls of a load's moving thread, and of device memory between processes: by ctypes, without torch.

In: addresses, handles, streams and events as numbers. Out: the same; what the driver refuses is a typed error.
Not here: what they take and say (`driver_types`), what they are for (`transport.cuda_ipc`, `engine.place_cuda`),
allocation (`memory.arena`, torch).

Every call but the first acts in the calling thread's current context: `with driver.entered(device)`.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock.cuda.driver_types import (
    ERRORS,
    QUICK,
    SIGNATURES,
    AccessDesc,
    AllocationProp,
    CopyAttributes,
    IpcHandle,
    Location,
    PitchedCopy,
)
from penstock.errors import ConfigError, DestinationError
from penstock.segments import Rectangles
from penstock.types import U64

NOT_READY = 600
_LAZY_PEER_ACCESS = _PORTABLE = _STREAM_NON_BLOCKING = _SRC_ORDER_STREAM = _POSIX_FD = _ON_DEVICE = 1
_MAPPED, _READ_ONLY = 2, 8
_UNIFIED = 4
_HOST_POINTER = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""
_EVENT_DISABLE_TIMING = 2
_READ_WRITE = 3
_PEER_ACCESS_ALREADY_ENABLED = 704
"""Source: CUDA 13.0, cuda.h."""

PITCHED_BYTES = 4 << 10
PITCHED_LEAST_BYTES = 1 << 20
"""A rectangle of so many bytes, in runs so long, is one copy of the copy engines: no faster than a kernel
(benchmarks/results/h200x4_202611/sync.md), but no processor of the device takes part. Of smaller ones there are too
many for a call each."""

PITCH_LIMIT = 1 << 31
"""Source: CU_DEVICE_ATTRIBUTE_MAX_PITCH of these devices, 2^31 - 1."""

_FEW = 8
"""So many copies are queued one by one; more are a batch, which lets go of the interpreter's lock."""


@functools.cache
def load_driver() -> CudaDriver:
    """The driver of this process, initialised. ConfigError where there is none, or no device."""
    return CudaDriver()


def ordinal(device: str) -> int:
    """The number of a CUDA device. ConfigError for another one."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise ConfigError(f"CUDA memory is required, not {device}", hint="say which: cuda:0")
    return int(index)


class CudaDriver:
    """See the module; one for the process, made by `load_driver`."""

    def __init__(self) -> None:
        try:
            waiting, quick = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"no CUDA driver: {error}") from error
        self._calls: dict[str, Any] = {}
        for name, signature in SIGNATURES.items():
            call = getattr(quick if name in QUICK else waiting, name)
            call.argtypes = signature
            self._calls[name] = call
        self._batch, self._batch_tells = getattr(waiting, "cuMemcpyBatchAsync_v2", None), False
        if self._batch is None:  # the driver of CUDA 12.8 and 12.9: one argument more, the copy that failed
            self._batch, self._batch_tells = getattr(waiting, "cuMemcpyBatchAsync", None), True
        self._contexts: dict[int, int] = {}
        self._do("cuInit", 0)

    def _do(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code:
            self.fail(name, code)

    def fail(self, name: str, code: int) -> None:
        """Raise what this code is to a caller; see `ERRORS`."""
        text = ctypes.c_char_p()
        self._calls["cuGetErrorName"](code, ctypes.byref(text))
        kind, hint = ERRORS.get(code, (DestinationError, "see CUresult in the CUDA driver API"))
        raise kind(f"{name} failed: {(text.value or b'an unknown error').decode()} ({code})", hint=hint)

    def _get(self, name: str, *arguments: Any) -> int:
        """The number that a call writes to its first argument."""
        value = ctypes.c_uint64()
        self._do(name, ctypes.byref(value), *arguments)
        return value.value

    def num_devices(self) -> int:
        """Return the number of devices that this process may use."""
        return self._get("cuDeviceGetCount") & 0x7FFFFFFF

    @contextmanager
    def entered(self, device: int) -> Iterator[None]:
        """The device's primary context, which torch uses too, as that of this thread."""
        self._do("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._do("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> int:
        if device not in self._contexts:
            self._contexts[device] = self._get("cuDevicePrimaryCtxRetain", self._ordinal(device))
        return self._contexts[device]

    def _ordinal(self, device: int) -> int:
        return self._get("cuDeviceGet", device) & 0x7FFFFFFF

    def enable_peer(self, device: int) -> None:
        """Let the current context reach memory of another device of this process, if it can."""
        code = self._calls["cuCtxEnablePeerAccess"](self._context(device), 0)
        if code not in (0, _PEER_ACCESS_ALREADY_ENABLED) and code not in ERRORS:
            self.fail("cuCtxEnablePeerAccess", code)

    def address_range(self, address: int) -> tuple[int, int]:
        """Start and length of the allocation (of virtual memory: of the piece of physical memory) behind an address."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        self._do("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
        return base.value, nbytes.value

    def ipc_handle(self, base: int) -> bytes | None:
        """Return the handle by which another process opens the allocation; None: its kind has none."""
        handle = IpcHandle()
        return None if self._calls["cuIpcGetMemHandle"](ctypes.byref(handle), base) else bytes(handle.reserved)

    def ipc_open(self, handle: bytes) -> int:
        """Return the local address of another process's allocation, valid until `ipc_close`."""
        return self._get("cuIpcOpenMemHandle_v2", IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def ipc_close(self, address: int) -> None:
        """Undo `ipc_open`; ignore errors."""
        # Called by finalizers, which have no caller to raise to. A device that failed reports it at the next call.
        self._calls["cuIpcCloseMemHandle"](address)

    def export_fd(self, address: int) -> int | None:
        """A file descriptor for the piece of physical memory behind an address; None: it was not made to be shared."""
        value = ctypes.c_uint64()
        if self._calls["cuMemRetainAllocationHandle"](ctypes.byref(value), address):
            return None
        try:
            properties = AllocationProp()
            self._do("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), value.value)
            if not properties.handle_types & _POSIX_FD:
                return None
            fd = ctypes.c_int()
            self._do("cuMemExportToShareableHandle", ctypes.byref(fd), value.value, _POSIX_FD, 0)
            return fd.value
        finally:
            self._do("cuMemRelease", value.value)

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of addresses without memory behind it."""
        return self._get("cuMemAddressReserve", nbytes, 0, 0, 0)

    def map_fd(self, address: int, nbytes: int, fd: int) -> None:
        """Put a piece of another process's memory behind reserved addresses. The descriptor stays the caller's."""
        handle = self._get("cuMemImportFromShareableHandle", fd, _POSIX_FD)
        try:
            self._do("cuMemMap", address, nbytes, 0, handle, 0)
        finally:
            self._do("cuMemRelease", handle)

    def allow(self, address: int, nbytes: int, device: int) -> None:
        """Let a device use mapped addresses."""
        access = AccessDesc(Location(_ON_DEVICE, self._ordinal(device)), _READ_WRITE)
        self._do("cuMemSetAccess", address, nbytes, ctypes.byref(access), 1)

    def unmap(self, address: int, mapped_nbytes: int, nbytes: int) -> None:
        """Undo `map_fd` of the first `mapped_nbytes`, and `reserve`; ignore errors."""
        # Unmap before the addresses are freed: the driver refuses to free a range with mappings.
        if mapped_nbytes:
            self._calls["cuMemUnmap"](address, mapped_nbytes)
        self._calls["cuMemAddressFree"](address, nbytes)

    def sees_host(self, device: int) -> bool:
        """Return whether kernels of the device read pinned memory at the host's own addresses."""
        return bool(self._get("cuDeviceGetAttribute", _HOST_POINTER, self._ordinal(device)) & 0x7FFFFFFF)

    def pin(self, address: int, nbytes: int, *, is_read_only: bool = False) -> None:
        """Page-lock host memory, for copy engines and kernels of every device; `is_read_only` for read-only mappings.

        See `sees_host` for whether kernels find it at the host's addresses.
        """
        flags = _PORTABLE | _MAPPED | (_READ_ONLY if is_read_only else 0)
        self._do("cuMemHostRegister_v2", address, nbytes, flags)

    def unpin(self, address: int) -> None:
        """Undo `pin`; ignore errors."""
        # Called by finalizers, which have no caller to raise to.
        self._calls["cuMemHostUnregister"](address)

    def make_stream(self) -> int:
        """A stream that waits for no other."""
        return self._get("cuStreamCreate", _STREAM_NON_BLOCKING)

    def make_event(self) -> int:
        """An event that tells no time."""
        return self._get("cuEventCreate", _EVENT_DISABLE_TIMING)

    def free(self, streams: Sequence[int], events: Sequence[int]) -> None:
        """Destroy streams and events; ignore errors."""
        # Called on close, possibly after the device failed: every call then fails, and there is nothing left to free.
        for event in events:
            self._calls["cuEventDestroy_v2"](event)
        for stream in streams:
            self._calls["cuStreamDestroy_v2"](stream)

    def record(self, event: int, stream: int) -> None:
        """Set the event behind what is queued on the stream (0: the default one)."""
        self._do("cuEventRecord", event, stream)

    def is_done(self, event: int) -> bool:
        """Return whether the device has passed the event. Raises the error of the work before it."""
        code = self._calls["cuEventQuery"](event)
        if code not in (0, NOT_READY):
            self.fail("work queued before cuEventQuery", code)
        return bool(code == 0)

    def gather(self, dst: U64, src: U64, nbytes: U64, device: int, stream: int) -> None:
        """Queue many short copies, by a kernel of the reader's device where Triton is installed. Says so if not."""
        try:
            from penstock.cuda.gather import gather
        except ModuleNotFoundError as error:
            message = f"{len(nbytes)} short copies are queued one by one, not by one kernel: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            self.copy(dst, src, nbytes, stream)
        else:
            gather(dst, src, nbytes, device, stream)

    def lay_out_rectangles(self, rows: Rectangles, device: int, stream: int) -> Callable[[], None]:
        """Lay out copies whose `src` and `dst` are addresses; each call of what is returned queues them.

        Runs of `PITCHED_BYTES` go by copy engines, a call for each rectangle; shorter ones as `gather`.
        """
        pitched = (rows.run_bytes >= PITCHED_BYTES) & (rows.nbytes >= PITCHED_LEAST_BYTES)
        pitched &= np.maximum(rows.src_pitch, rows.dst_pitch) < PITCH_LIMIT
        parts = []
        if pitched.any():
            parts.append(self._pitched(rows[pitched], stream))
        if not pitched.all():
            parts.append(self._gathered(rows[~pitched], device, stream))

        def queue() -> None:
            for part in parts:
                part()

        return queue

    def _pitched(self, rows: Rectangles, stream: int) -> Callable[[], None]:
        columns = (rows.src, rows.dst, rows.run_bytes, rows.num_rows, rows.src_pitch, rows.dst_pitch)
        copies = [
            PitchedCopy(
                src_type=_UNIFIED,
                src=src,
                src_pitch=src_pitch,
                dst_type=_UNIFIED,
                dst=dst,
                dst_pitch=dst_pitch,
                width=run,
                height=count,
            )
            for src, dst, run, count, src_pitch, dst_pitch in zip(*(c.tolist() for c in columns), strict=True)
        ]

        def queue() -> None:
            for copy in copies:
                self._do("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream)

        return queue

    def _gathered(self, rows: Rectangles, device: int, stream: int) -> Callable[[], None]:
        try:
            from penstock.cuda.gather import lay_out_rectangles
        except ModuleNotFoundError:
            runs = rows.segments()
            dst, src, nbytes = (column.astype(np.uint64) for column in (runs.dst, runs.src, runs.nbytes))
            return functools.partial(self.gather, dst, src, nbytes, device, stream)
        return lay_out_rectangles(rows, device, stream)

    def copy_to_device(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queue a copy of pinned host bytes."""
        self._do("cuMemcpyHtoDAsync_v2", dst, src, nbytes, stream)

    def copy(self, dst: U64, src: U64, nbytes: U64, stream: int) -> None:
        """Queue copies between devices' addresses, in no particular order."""
        if len(nbytes) <= _FEW or self._batch is None:
            for to, of, length in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
                self._do("cuMemcpyAsync", to, of, length, stream)
            return
        columns = [np.ascontiguousarray(column, np.uint64) for column in (dst, src, nbytes)]
        attributes, first = CopyAttributes(order=_SRC_ORDER_STREAM), ctypes.c_size_t(0)
        failed = [ctypes.byref(ctypes.c_size_t())] if self._batch_tells else []
        code = self._batch(
            *(ctypes.c_void_p(column.ctypes.data) for column in columns),
            ctypes.c_size_t(len(nbytes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *failed,
            ctypes.c_void_p(stream),
        )
        if code:
            self.fail("cuMemcpyBatchAsync", code)
