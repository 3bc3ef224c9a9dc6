"""Two settings of the whole process, held while a load needs them: the cyclic garbage collector, the switch interval.

In / Out: nothing. Not here: anything else.

Making 60,000 tensors sets off full collections of everything the process holds: 5 us a tensor instead of 1
(measured on 2 CPU cores, torch 2.13, with little else in the process).
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_depth = 0
_was_enabled = False


@contextmanager
def paused_gc() -> Iterator[None]:
    """Stop automatic collection inside the block; nests, and several threads may be inside at once."""
    global _depth, _was_enabled
    with _lock:
        # Only the outermost block looks: an inner one would find collection disabled, and leave it so.
        if _depth == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _was_enabled:
                gc.enable()


HANDOVER_S = 5e-5
"""Longest that one thread keeps the GIL while another asks for it, during a load onto a device; Python's own 5 ms are
30 chunks of 8 MiB at 55 GB/s. Source: benchmarks/results/h200x1_202611/load.md."""

_num_quick = 0
_interval_s = 0.0


@contextmanager
def quick_handover() -> Iterator[None]:
    """Set the GIL's switch interval to `HANDOVER_S` inside the block; nests, and several threads may be inside."""
    global _num_quick, _interval_s
    with _lock:
        if _num_quick == 0:
            _interval_s = sys.getswitchinterval()
            # Never longer than it was: the program may have set it shorter.
            sys.setswitchinterval(min(HANDOVER_S, _interval_s))
        _num_quick += 1
    try:
        yield
    finally:
        with _lock:
            _num_quick -= 1
            if _num_quick == 0:
                sys.setswitchinterval(_interval_s)
