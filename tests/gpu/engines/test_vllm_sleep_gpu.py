"""vLLM on a GPU sleeps with its own allocator, and wakes with the weights of the newest version."""

from __future__ import annotations

import pytest
from tests.engines.device import vllm_takes_versions
from tests.engines.test_vllm_sleep import engine, test_weights_are_restored_before_first_request_after_wake

__all__ = ["engine", "test_weights_are_restored_before_first_request_after_wake"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engines,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not vllm_takes_versions(), reason="this release of vLLM has no version of its weights"),
]
