"""Structures and signatures of the CUDA driver's calls, and the errors that its codes stand for.

In / Out: nothing. Not here: calling (`driver`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError, DeviceOutOfMemory, PenstockError

IPC_HANDLE_BYTES = 64
"""Source: CUDA driver API, CU_IPC_HANDLE_SIZE."""

_NO_PEER = (ConfigError, "these devices cannot reach each other's memory; use another transport")
_NO_DEVICE = (ConfigError, "look at CUDA_VISIBLE_DEVICES and nvidia-smi")
_NO_SUPPORT = (ConfigError, "this driver or this memory does not do it; use another transport")
ERRORS: Mapping[int, tuple[type[PenstockError], str]] = {
    2: (DeviceOutOfMemory, "free memory on the device"),
    36: _NO_SUPPORT,
    46: _NO_DEVICE,
    100: _NO_DEVICE,
    101: _NO_DEVICE,
    217: _NO_PEER,
    705: _NO_PEER,
    800: _NO_SUPPORT,
    801: _NO_SUPPORT,
    802: (ConfigError, "the fabric manager of this host is not running"),
    803: _NO_SUPPORT,
    804: _NO_SUPPORT,
}
"""What a CUresult is to a caller; any other is a DestinationError: it is our device that failed."""


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", ctypes.c_int), ("src", Location), ("dst", Location), ("flags", ctypes.c_uint))


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

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
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
    "cuCtxPushCurrent_v2": (_ptr,),
    "cuCtxPopCurrent_v2": (_ptr,),
    "cuCtxEnablePeerAccess": (_ptr, _uint),
    "cuMemGetAddressRange_v2": (_ptr, _ptr, _u64),
    "cuIpcGetMemHandle": (_ptr, _u64),
    "cuIpcOpenMemHandle_v2": (_ptr, IpcHandle, _uint),
    "cuIpcCloseMemHandle": (_u64,),
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
    "cuMemcpy2DAsync_v2": (_ptr, _ptr),
    "cuGetErrorName": (ctypes.c_int, _ptr),
}
QUICK = frozenset(
    {"cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuEventRecord", "cuEventQuery"}
    | {"cuMemcpyAsync", "cuMemcpyHtoDAsync_v2"}
)
"""Calls of a microsecond or two. They keep the interpreter's lock: to let go of it is to wait 5 ms for it where
another thread has Python to run."""
