"""Run the tests of engines on a GPU. Each test body is in `tests/engines`, where it also runs on a CPU.

The files run in the order of `ORDER`, so that a stay on a GPU machine that ends early has run the most valuable tests.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.engines.conftest import fresh, llama, make_llama, make_model, runtime, sharded_llama, tied_llama

__all__ = ["fresh", "llama", "make_llama", "make_model", "runtime", "sharded_llama", "tied_llama"]

ORDER = (
    "test_vllm_load_gpu.py",
    "test_vllm_under_load_gpu.py",
    "test_vllm_sleep_gpu.py",
    "test_sglang_gpu.py",
    "test_vllm_shards_gpu.py",
    "test_vllm_staging_gpu.py",
    "test_vllm_adapters_gpu.py",
)
collect_ignore_glob = [f"test_{name}_*" for name in ("vllm", "sglang") if importlib.util.find_spec(name) is None]
"""The files of an engine that is not installed."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the items of this directory, and leave the others where they are."""
    here = Path(__file__).parent
    places = [at for at, item in enumerate(items) if item.path.parent == here]
    ordered = sorted((items[at] for at in places), key=lambda item: ORDER.index(item.path.name))
    for at, item in zip(places, ordered, strict=True):
        items[at] = item
