"""The kernels that digest an engine's weights before a sleep, made ready while the engine loads its model.

In: the device, and the block that loads. Out: the kernels, compiled, or read from a disk.
Not here: what is digested, and when (`penstock_vllm.sleep`, `penstock_sglang.sleep`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.logs import Log
from penstock.waits import start_thread

if TYPE_CHECKING:
    import torch

WAIT_S = 60.0
"""Seconds to wait for the kernels after the block: compiling them takes about six, mostly during the load."""


@contextmanager
def kernels_ready(device: torch.device, log: Log, *, timeout_s: float = WAIT_S) -> Iterator[None]:
    """Make the kernels of digests ready beside a block that loads a model; the first sleep would wait for them.

    Args:
        device: of the weights. On the CPU there are no kernels.
        log: the engine's logger. A failure is logged; the first sleep tries again, and raises it.
        timeout_s: how long to wait for the kernels after the block.
    """
    if device.type != "cuda":
        yield
        return
    # A thread, because engines allocate the model, and what the loading thread allocates meanwhile, from memory that
    # sleeps.
    warming = threading.Thread(target=_warm_up, args=(device, log), name="penstock-warm-up", daemon=True)
    is_warming = start_thread(warming, is_needed=False)
    try:
        yield
    finally:
        if is_warming:
            warming.join(timeout_s)


def _warm_up(device: torch.device, log: Log) -> None:
    # Imported here: both take time, and a sleep imports the second.
    from penstock.sync import memory_digests  # noqa: F401
    from penstock.sync.digester import Digester

    try:
        Digester(str(device)).warm_up()
    except (PenstockError, RuntimeError, OSError) as error:
        log.warning("penstock: the kernels of digests are not ready: %s", error)
