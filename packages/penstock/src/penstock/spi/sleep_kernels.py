"""Prepare the kernels that digest an engine's weights before a sleep, while the engine loads its model."""

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
"""Seconds to wait for the kernels after the block. Compiling them takes about six seconds, mostly during the load."""


@contextmanager
def kernels_ready(device: torch.device, log: Log, *, timeout_s: float = WAIT_S) -> Iterator[None]:
    """Prepare the digest kernels during a block that loads a model, so that the first sleep does not wait for them.

    Args:
        device: device of the weights. The CPU has no digest kernels.
        log: the engine's logger. A failure is logged, and the first sleep raises it.
        timeout_s: seconds to wait for the kernels after the block.
    """
    if device.type != "cuda":
        yield
        return
    # Use another thread, because engines allocate everything in the loading thread from memory that a sleep releases.
    warming = threading.Thread(target=_warm_up, args=(device, log), name="penstock-warm-up", daemon=True)
    is_warming = start_thread(warming, is_needed=False)
    try:
        yield
    finally:
        if is_warming:
            warming.join(timeout_s)


def _warm_up(device: torch.device, log: Log) -> None:
    # Both imports are slow. A sleep uses `memory_digests`, so import it now.
    from penstock.holding.digester import Digester
    from penstock.sync import memory_digests  # noqa: F401

    try:
        Digester(str(device)).warm_up()
    except (PenstockError, RuntimeError, OSError) as error:
        log.warning("penstock: the digest kernels are not ready: %s", error)
