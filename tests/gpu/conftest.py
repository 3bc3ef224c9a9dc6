"""Skip tests marked `gpu` or `gpus(n)` where there are fewer devices, and run those marked `alone` beside no other."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TURNS = Path(tempfile.gettempdir()) / f"penstock-gpu-tests-{os.getuid()}"
"""Directory of the locks by which processes that run these tests take turns."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_devices = torch.cuda.device_count()
    for item in items:
        needed = max([mark.args[0] for mark in item.iter_markers("gpus")], default=0)
        needed = max(needed, 1 if item.get_closest_marker("gpu") else 0)
        if needed > num_devices:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, there are {num_devices}"))


@pytest.fixture(autouse=True)
def _turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test marked `alone` while no other test uses the devices, because it measures their free memory."""
    TURNS.mkdir(exist_ok=True)
    kind = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    with (TURNS / "door").open("w") as door, (TURNS / "room").open("w") as room:
        # A test that waits to be alone holds the door, so that no later test enters before it.
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, kind)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@pytest.fixture
def allocated() -> Iterator[int]:
    """Return the device memory allocated before the test, and free what the test leaves behind."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield torch.cuda.memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
