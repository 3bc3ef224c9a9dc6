"""The three CUDA driver calls of the moving thread, made without letting go of the GIL.

In: addresses, a stream, events (of torch's own making). Out: copies queued, events recorded and asked.
Not here: which copies (`place_cuda`), allocation and errors of memory (torch).

Why: torch lets go of the GIL around each of its calls, and a thread that lets go while another has Python to run waits
a switch interval to get it back, several times a chunk. These calls only queue work: 1-3 us each.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from penstock.errors import DestinationError

_SUCCESS = 0
_NOT_READY = 600
"""Source: CUDA driver API, CUresult, CUDA_ERROR_NOT_READY."""


@functools.cache
def _driver() -> Any:
    # PyDLL: ctypes keeps the GIL. The name of the driver's library on Linux; torch with CUDA has loaded it.
    driver: Any = ctypes.PyDLL("libcuda.so.1")
    driver.cuMemcpyHtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    driver.cuEventRecord.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    driver.cuEventQuery.argtypes = (ctypes.c_void_p,)
    return driver


def copy_to_device(destination: int, source: int, nbytes: int, stream: int) -> None:
    """Queue a copy of pinned host bytes to device memory on a stream of the calling thread's current context.

    Raises:
        DestinationError: the driver refuses.
    """
    _check(_driver().cuMemcpyHtoDAsync_v2(destination, source, nbytes, stream), "copy to the device")


def record(event: int, stream: int) -> None:
    """Record an event behind what is queued on the stream. DestinationError when the driver refuses."""
    _check(_driver().cuEventRecord(event, stream), "event")


def is_done(event: int) -> bool:
    """Whether the device has passed the event. DestinationError when work before it failed."""
    code = _driver().cuEventQuery(event)
    if code != _NOT_READY:
        _check(code, "work")
    return bool(code == _SUCCESS)


def _check(code: int, what: str) -> None:
    if code != _SUCCESS:
        message = f"CUDA error {code} from a queued {what}"
        raise DestinationError(message, hint="see CUresult in the CUDA driver API", mutated=True)
