"""What several tests of the loader ask for."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only reference counts free memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
