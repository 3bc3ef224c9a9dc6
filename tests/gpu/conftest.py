"""Skip tests marked `gpu` or `gpus(n)` where there are fewer devices."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_devices = torch.cuda.device_count()
    for item in items:
        needed = max([mark.args[0] for mark in item.iter_markers("gpus")], default=0)
        needed = max(needed, 1 if item.get_closest_marker("gpu") else 0)
        if needed > num_devices:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, there are {num_devices}"))


@pytest.fixture
def allocated() -> Iterator[int]:
    """Return the device memory allocated before the test, and free what the test leaves behind."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield torch.cuda.memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
