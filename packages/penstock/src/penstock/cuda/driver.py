"""The CUDA driver through ctypes, without torch: its calls, typed errors, and pools of streams and events.

Addresses, handles, streams and events are integers. Every call except the first acts in the current context of the
calling thread: `with driver.entered(device)`. This module does not use torch, because torch releases the interpreter's
lock in each copy and cannot map another process's memory from a file descriptor.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock.errors import ConfigError, DestinationError, DeviceOutOfMemory, MissingExtra, PenstockError
from penstock.segments import Rectangles
from penstock.types import U64

IPC_HANDLE_BYTES = 64
"""Source: CUDA driver API, CU_IPC_HANDLE_SIZE."""

ERRORS: Mapping[int, tuple[type[PenstockError], str]] = {
    2: (DeviceOutOfMemory, "free memory on the device"),
    802: (ConfigError, "the fabric manager of this host is not running"),
    **dict.fromkeys((46, 100, 101), (ConfigError, "check CUDA_VISIBLE_DEVICES and nvidia-smi")),
    **dict.fromkeys(
        (217, 705), (ConfigError, "these devices cannot reach each other's memory, so use a different transport")
    ),
    **dict.fromkeys(
        (36, 800, 801, 803, 804),
        (ConfigError, "this driver or memory does not support it, so use a different transport"),
    ),
}
"""Error class and hint for each CUresult. Any other code raises DestinationError."""


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class DeviceLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", ctypes.c_int), ("src", DeviceLocation), ("dst", DeviceLocation), ("flags", ctypes.c_uint))


class PitchedCopy(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_int),
        ("src_host", ctypes.c_void_p),
        ("src", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_int),
        ("dst_host", ctypes.c_void_p),
        ("dst", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", DeviceLocation), ("flags", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", DeviceLocation),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


_u64, _ptr, _uint, _size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "cuInit": (_uint,),
    "cuDeviceGet": (_ptr, ctypes.c_int),
    "cuDeviceGetCount": (_ptr,),
    "cuDeviceGetAttribute": (_ptr, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_ptr, ctypes.c_int),
    "cuDevicePrimaryCtxGetState": (ctypes.c_int, _ptr, _ptr),
    "cuCtxPushCurrent_v2": (_ptr,),
    "cuCtxPopCurrent_v2": (_ptr,),
    "cuCtxEnablePeerAccess": (_ptr, _uint),
    "cuCtxSynchronize": (),
    "cuMemGetAddressRange_v2": (_ptr, _ptr, _u64),
    "cuIpcGetMemHandle": (_ptr, _u64),
    "cuIpcOpenMemHandle_v2": (_ptr, IpcHandle, _uint),
    "cuIpcCloseMemHandle": (_u64,),
    "cuMemGetAllocationGranularity": (_ptr, _ptr, ctypes.c_int),
    "cuMemCreate": (_ptr, _size, _ptr, _u64),
    "cuMemRetainAllocationHandle": (_ptr, _u64),
    "cuMemGetAllocationPropertiesFromHandle": (_ptr, _u64),
    "cuMemExportToShareableHandle": (_ptr, _u64, ctypes.c_int, _u64),
    "cuMemImportFromShareableHandle": (_ptr, _size, ctypes.c_int),
    "cuMemRelease": (_u64,),
    "cuMemAddressReserve": (_ptr, _size, _size, _u64, _u64),
    "cuMemAddressFree": (_u64, _size),
    "cuMemMap": (_u64, _size, _size, _u64, _u64),
    "cuMemUnmap": (_u64, _size),
    "cuMemSetAccess": (_u64, _size, _ptr, _size),
    "cuStreamCreate": (_ptr, _uint),
    "cuStreamDestroy_v2": (_ptr,),
    "cuEventCreate": (_ptr, _uint),
    "cuEventRecord": (_ptr, _ptr),
    "cuEventQuery": (_ptr,),
    "cuEventDestroy_v2": (_ptr,),
    "cuMemHostRegister_v2": (_ptr, _size, _uint),
    "cuMemHostUnregister": (_ptr,),
    "cuMemcpyAsync": (_u64, _u64, _size, _ptr),
    "cuMemcpyHtoDAsync_v2": (_u64, _u64, _size, _ptr),
    "cuMemcpyDtoHAsync_v2": (_u64, _u64, _size, _ptr),
    "cuMemcpy2DAsync_v2": (_ptr, _ptr),
    "cuGetErrorName": (ctypes.c_int, _ptr),
}
QUICK = frozenset(
    {"cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuEventRecord", "cuEventQuery"}
    | {"cuMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"}
)
"""Calls that take a microsecond or two and keep the interpreter's lock. A thread that releases the lock may wait 5 ms
to acquire it again while another thread runs Python. A copy on a stream with `QUEUE_DEPTH` waiting copies blocks until
the device continues, so `CudaDriver.copy` releases the lock there."""
QUEUE_DEPTH = 1000
"""Waiting copies on a stream after which the next call blocks. Source: measured on one H200, at copy 1,021."""
NOT_READY = 600
_LAZY_PEER_ACCESS = _PORTABLE = _STREAM_NON_BLOCKING = _SRC_ORDER_STREAM = _POSIX_FD = _ON_DEVICE = 1
_MAPPED, _READ_ONLY = 2, 8
_UNIFIED = 4
_HOST_POINTER = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""
_VIRTUAL_MEMORY, _POSIX_FD_HANDLES, _RDMA_OF_VIRTUAL = 102, 103, 110
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, _HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED and
_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED."""
_PINNED = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED."""
_RDMA_FLAG = 1
"""Index of `gpuDirectRDMACapable` in CUmemAllocationProp.allocFlags."""
_EVENT_DISABLE_TIMING = 2
_READ_WRITE = 3
_PEER_ACCESS_ALREADY_ENABLED = 704
"""Source: CUDA 13.0, cuda.h."""
PITCHED_BYTES = 4 << 10
"""Minimum run size of rectangles that the copy engines copy."""
PITCHED_LEAST_BYTES = 1 << 20
"""Minimum size of a rectangle to be one copy of the copy engines, if its runs are `PITCHED_BYTES` long. Such a copy is
no faster than a kernel (benchmarks/results/h200x4_202611/sync.md), but uses no multiprocessor of the device."""
PITCH_LIMIT = 1 << 31
"""Source: CU_DEVICE_ATTRIBUTE_MAX_PITCH of these devices, 2^31 - 1."""
_FEW = 8
"""Maximum number of copies that are queued one by one, each by a call that keeps the interpreter's lock."""


@functools.cache
def load_driver() -> CudaDriver:
    """Return the initialised driver of this process. Raises ConfigError if there is no driver or no device."""
    return CudaDriver()


_NVML_TEXT_BYTES = 80
"""Source: NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE in nvml.h."""


def installed_version() -> str:
    """Return the version of NVIDIA's driver, such as `580.95.05`, or an empty string without NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(_NVML_TEXT_BYTES)
    if nvml.nvmlInit_v2():
        return ""
    try:
        return "" if nvml.nvmlSystemGetDriverVersion(text, _NVML_TEXT_BYTES) else text.value.decode()
    finally:
        nvml.nvmlShutdown()


def ordinal(device: str) -> int:
    """Return the number of a CUDA device. Raises ConfigError for a device of a different type or without a number."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise ConfigError(
            f"CUDA memory is required, not {device}", hint="pass a device with its number, such as cuda:0"
        )
    return int(index)


class CudaDriver:
    """The functions of the CUDA driver. `load_driver` returns the process's only instance."""

    def __init__(self) -> None:
        try:
            releasing, holding = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"no CUDA driver: {error}") from error
        # CDLL releases the interpreter's lock, and PyDLL holds it (`QUICK`).
        self._calls: dict[str, Any] = {}
        for name, signature in SIGNATURES.items():
            call = getattr(holding if name in QUICK else releasing, name)
            call.argtypes = signature
            self._calls[name] = call
        self._batch = getattr(releasing, "cuMemcpyBatchAsync_v2", None)
        self._batch_names_failed = False
        if self._batch is None:
            # In drivers of CUDA 12.8 and 12.9, `cuMemcpyBatchAsync` has a further argument, for the copy that failed.
            self._batch = getattr(releasing, "cuMemcpyBatchAsync", None)
            self._batch_names_failed = True
        # A time-critical thread makes this call for every chunk of a load.
        self._copy_to_device = self._calls["cuMemcpyHtoDAsync_v2"]
        self._releasing_copy = releasing.cuMemcpyAsync
        self._releasing_copy.argtypes = SIGNATURES["cuMemcpyAsync"]
        self._record, self._query = self._calls["cuEventRecord"], self._calls["cuEventQuery"]
        self._contexts: dict[int, int] = {}
        self._do("cuInit", 0)

    def _do(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code:
            self.fail(name, code)

    def fail(self, name: str, code: int) -> None:
        """Raise the error for a code that the driver function `name` returned."""
        text = ctypes.c_char_p()
        self._calls["cuGetErrorName"](code, ctypes.byref(text))
        kind, hint = ERRORS.get(code, (DestinationError, "look up the code under CUresult in the CUDA driver API"))
        raise kind(f"{name} failed: {(text.value or b'an unknown error').decode()} ({code})", hint=hint)

    def _get(self, name: str, *arguments: Any) -> int:
        """Call a driver function, and return the number that the function writes to its first argument."""
        value = ctypes.c_uint64()
        self._do(name, ctypes.byref(value), *arguments)
        return value.value

    def num_devices(self) -> int:
        """Return the number of devices that this process may use."""
        return self._get("cuDeviceGetCount") & 0x7FFFFFFF

    def has_context(self, device: int) -> bool:
        """Return whether this process uses the device already. A context takes hundreds of megabytes of its memory."""
        is_active = ctypes.c_int()
        self._do("cuDevicePrimaryCtxGetState", self._ordinal(device), ctypes.byref(_uint()), ctypes.byref(is_active))
        return bool(is_active.value)

    @contextmanager
    def entered(self, device: int) -> Iterator[None]:
        """Make the device's primary context, which torch uses too, current in this thread."""
        self._do("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._do("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> int:
        # Never release the context, since torch uses it until the process ends.
        if device not in self._contexts:
            self._contexts[device] = self._get("cuDevicePrimaryCtxRetain", self._ordinal(device))
        return self._contexts[device]

    def _ordinal(self, device: int) -> int:
        return self._get("cuDeviceGet", device) & 0x7FFFFFFF

    def enable_peer(self, device: int) -> None:
        """Let the current context reach memory of another device of this process, if possible."""
        # Ignore the codes in `ERRORS`, such as unreachable devices. Copies that need the access report these errors.
        code = self._calls["cuCtxEnablePeerAccess"](self._context(device), 0)
        if code not in (0, _PEER_ACCESS_ALREADY_ENABLED) and code not in ERRORS:
            self.fail("cuCtxEnablePeerAccess", code)

    def address_range(self, address: int) -> tuple[int, int]:
        """Return the start and length of the allocation at an address, or of one mapped piece of virtual memory."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        self._do("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
        return base.value, nbytes.value

    def ipc_handle(self, base: int) -> bytes | None:
        """Return the handle with which another process opens the allocation, or None if there is no handle."""
        # Any error means that there is no handle. The caller tries file descriptors next, which report the reason.
        handle = IpcHandle()
        return None if self._calls["cuIpcGetMemHandle"](ctypes.byref(handle), base) else bytes(handle.reserved)

    def ipc_open(self, handle: bytes) -> int:
        """Return the address of another process's allocation, which is valid until `ipc_close`."""
        return self._get("cuIpcOpenMemHandle_v2", IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def ipc_close(self, address: int) -> None:
        """Undo `ipc_open`. Ignore errors."""
        # Finalizers have no caller to raise to. A failed device reports its error at the next call.
        self._calls["cuIpcCloseMemHandle"](address)

    def export_fd(self, address: int) -> int | None:
        """Return a file descriptor for the physical memory at an address, or None if it cannot be shared."""
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
        """Reserve a range of addresses without memory."""
        return self._get("cuMemAddressReserve", nbytes, 0, 0, 0)

    def map_fd(self, address: int, nbytes: int, fd: int) -> None:
        """Map a piece of another process's memory at reserved addresses. The caller still owns the descriptor."""
        handle = self._get("cuMemImportFromShareableHandle", fd, _POSIX_FD)
        try:
            self.map_handle(address, nbytes, handle)
        finally:
            # The mapping keeps the memory alive until `unmap`.
            self.release(handle)

    def has_virtual_memory(self, device: int) -> bool:
        """Return whether physical memory of the device can be separate from addresses and shared by descriptors."""
        return all(self._attribute(attribute, device) for attribute in (_VIRTUAL_MEMORY, _POSIX_FD_HANDLES))

    def virtual_unit(self, device: int) -> int:
        """Return the granularity of virtual memory in bytes."""
        properties, unit = self._properties(device), ctypes.c_size_t()
        self._do("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), 0)
        return unit.value

    def create(self, nbytes: int, device: int) -> int:
        """Return a handle to new physical memory, which is freed with its last handle and mapping."""
        return self._get("cuMemCreate", nbytes, ctypes.byref(self._properties(device)), 0)

    def _properties(self, device: int) -> AllocationProp:
        properties = AllocationProp(
            type=_PINNED, handle_types=_POSIX_FD, location=DeviceLocation(_ON_DEVICE, self._ordinal(device))
        )
        # Without this flag, network adapters cannot use the memory.
        properties.flags[_RDMA_FLAG] = bool(self._attribute(_RDMA_OF_VIRTUAL, device))
        return properties

    def retain(self, address: int) -> int:
        """Return another handle to the physical memory at an address."""
        return self._get("cuMemRetainAllocationHandle", address)

    def release(self, handle: int) -> None:
        """Release a handle."""
        self._do("cuMemRelease", handle)

    def map_handle(self, address: int, nbytes: int, handle: int) -> None:
        """Map all memory of a handle at reserved addresses. `allow` makes the mapping usable."""
        self._do("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap_handle(self, address: int, nbytes: int) -> None:
        """Undo `map_handle` after the device has finished using the addresses, which stay reserved."""
        self._do("cuMemUnmap", address, nbytes)

    def synchronize(self) -> None:
        """Wait for all work of the current context."""
        self._do("cuCtxSynchronize")

    def allow(self, address: int, nbytes: int, device: int) -> None:
        """Let a device use mapped addresses."""
        access = AccessDesc(DeviceLocation(_ON_DEVICE, self._ordinal(device)), _READ_WRITE)
        self._do("cuMemSetAccess", address, nbytes, ctypes.byref(access), 1)

    def unmap(self, address: int, mapped_nbytes: int, nbytes: int) -> None:
        """Unmap the first `mapped_nbytes`, then undo `reserve`. Ignore errors."""
        # The driver refuses to free a range with mappings.
        if mapped_nbytes:
            self._calls["cuMemUnmap"](address, mapped_nbytes)
        self._calls["cuMemAddressFree"](address, nbytes)

    def sees_host(self, device: int) -> bool:
        """Return whether kernels of the device can read pinned memory at host addresses."""
        return bool(self._attribute(_HOST_POINTER, device))

    def _attribute(self, attribute: int, device: int) -> int:
        return self._get("cuDeviceGetAttribute", attribute, self._ordinal(device)) & 0x7FFFFFFF

    def pin(self, address: int, nbytes: int, *, is_read_only: bool = False) -> None:
        """Page-lock host memory for copy engines and kernels of every device."""
        flags = _PORTABLE | _MAPPED | (_READ_ONLY if is_read_only else 0)
        self._do("cuMemHostRegister_v2", address, nbytes, flags)

    def unpin(self, address: int) -> None:
        """Undo `pin`, and ignore errors."""
        self._calls["cuMemHostUnregister"](address)

    def make_stream(self) -> int:
        """Return a new stream, which does not wait for the default stream."""
        return self._get("cuStreamCreate", _STREAM_NON_BLOCKING)

    def make_event(self) -> int:
        """Return a new event without a time stamp, which is cheaper to record."""
        return self._get("cuEventCreate", _EVENT_DISABLE_TIMING)

    def free(self, streams: Sequence[int], events: Sequence[int]) -> None:
        """Destroy streams and events, and ignore errors."""
        for event in events:
            self._calls["cuEventDestroy_v2"](event)
        for stream in streams:
            self._calls["cuStreamDestroy_v2"](stream)

    def record(self, event: int, stream: int) -> None:
        """Record the event after the work that is queued on the stream (0 is the default stream)."""
        if code := self._record(event, stream):
            self.fail("cuEventRecord", code)

    def is_done(self, event: int) -> bool:
        """Return whether the device has passed the event. Raise an error if work before the event failed."""
        code = self._query(event)
        if code not in (0, NOT_READY):
            self.fail("work queued before cuEventQuery", code)
        return bool(code == 0)

    def gather(self, dst: U64, src: U64, nbytes: U64, device: int, stream: int) -> None:
        """Queue many short copies with a single kernel. Without the kernel, warn and queue the copies one by one."""
        from penstock.cuda.pack import gather

        try:
            gather(dst, src, nbytes, device, stream)
        except MissingExtra as error:
            message = f"queueing {len(nbytes)} short copies one by one and not by one kernel: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            self.copy(dst, src, nbytes, stream)

    def lay_out_rectangles(self, rows: Rectangles, device: int, stream: int) -> Callable[[], None]:
        """Prepare copies between addresses. Return a function that queues the copies and may be called repeatedly.

        Large rectangles with runs of at least `PITCHED_BYTES` use the copy engines. A kernel copies all the rest.
        """
        pitched = (rows.run_bytes >= PITCHED_BYTES) & (rows.nbytes >= PITCHED_LEAST_BYTES)
        # The driver refuses pitches of `PITCH_LIMIT` or more.
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
        """Prepare rectangles for the kernel. Without the kernel, the copies of single runs are queued."""
        from penstock.cuda.pack import lay_out_rectangles

        queue_kernel = lay_out_rectangles(rows, device, stream)

        def queue() -> None:
            try:
                queue_kernel()
            except MissingExtra:
                runs = rows.segments()
                dst, src, nbytes = (column.astype(np.uint64) for column in (runs.dst, runs.src, runs.nbytes))
                self.gather(dst, src, nbytes, device, stream)

        return queue

    def copy_to_device(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queue a copy from pinned host memory."""
        if code := self._copy_to_device(dst, src, nbytes, stream):
            self.fail("cuMemcpyHtoDAsync_v2", code)

    def copy_to_host(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queue a copy to pinned host memory."""
        self._do("cuMemcpyDtoHAsync_v2", dst, src, nbytes, stream)

    def copy(self, dst: U64, src: U64, nbytes: U64, stream: int, *, may_wait: bool | None = None) -> None:
        """Queue copies between device addresses, in no particular order.

        If `may_wait` is True, the calls release the interpreter's lock, because they block if `QUEUE_DEPTH` copies are
        waiting on the stream. If `may_wait` is None, only calls for more than a few copies release the lock.
        """
        # A batch is one call that releases the lock. Drivers before CUDA 12.8 and the legacy stream lack batches.
        if len(nbytes) <= _FEW or self._batch is None or not stream:
            releases_lock = len(nbytes) > _FEW if may_wait is None else may_wait
            queue = self._releasing_copy if releases_lock else self._calls["cuMemcpyAsync"]
            for target, source, length in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
                if code := queue(target, source, length, stream):
                    self.fail("cuMemcpyAsync", code)
            return
        columns = [np.ascontiguousarray(column, np.uint64) for column in (dst, src, nbytes)]
        # Sources are read in stream order and not during the call, since kernels may still write them.
        attributes, first = CopyAttributes(order=_SRC_ORDER_STREAM), ctypes.c_size_t(0)
        failed = [ctypes.byref(ctypes.c_size_t())] if self._batch_names_failed else []
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


never_freed: list[tuple[object, ...]] = []
"""Objects whose memory a hanging device may still use, since no call cancels a copy. These objects are kept until the
process ends."""


class StreamPool:
    """Streams and spare events of one device. Not thread-safe."""

    def __init__(self, driver: CudaDriver, device: int, num_streams: int) -> None:
        self._driver = driver
        self._device = device
        self._spare = list[int]()
        with driver.entered(device):
            self.streams = [driver.make_stream() for _ in range(num_streams)]
        self._turn = 0

    def take_stream(self) -> int:
        """Return the next stream, in round-robin order."""
        self._turn += 1
        return self.streams[self._turn % len(self.streams)]

    def take_event(self) -> int:
        """Return an unused CUDA event."""
        return self._spare.pop() if self._spare else self._driver.make_event()

    def give_event(self, event: int) -> None:
        """Accept an event that the device has passed, for reuse."""
        # If an event is recorded again before the device has passed it, waiting threads also wait for later work.
        self._spare.append(event)

    def close(self) -> None:
        """Free streams and events, which must be idle."""
        with self._driver.entered(self._device):
            self._driver.free(self.streams, self._spare)


class StreamPools:
    """Stream pools of all devices. Not thread-safe."""

    def __init__(self, driver: CudaDriver, *, num_streams: int) -> None:
        self._driver = driver
        self._num_streams = num_streams
        self._pools = dict[int, StreamPool]()

    def of(self, device: int) -> StreamPool:
        """Return the pool of a device."""
        # Create a pool on demand. Its streams create a context, which takes hundreds of MB on the device.
        if device not in self._pools:
            self._pools[device] = StreamPool(self._driver, device, self._num_streams)
        return self._pools[device]

    def close(self) -> None:
        """Free streams and events of all devices, which must be idle. Idempotent."""
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()
