"""vLLM on a GPU, compiled and with CUDA graphs, takes versions from a trainer while it serves."""

from __future__ import annotations

import pytest
from tests.engines.device import vllm_takes_versions
from tests.engines.test_vllm_under_load import compiled, test_updates_under_load_fail_no_request

__all__ = ["compiled", "test_updates_under_load_fail_no_request"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engines,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not vllm_takes_versions(), reason="this release of vLLM has no version of its weights"),
]
