"""Fixtures of the loader's tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, so that only reference counts free memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
