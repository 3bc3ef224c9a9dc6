"""vLLM on a GPU serves each version of a LoRA adapter that a trainer publishes."""

from __future__ import annotations

import pytest
from tests.engines.test_adapters import model, test_in_process_vllm_serves_each_adapter_version

__all__ = ["model", "test_in_process_vllm_serves_each_adapter_version"]

pytestmark = [pytest.mark.gpu, pytest.mark.engines, pytest.mark.timeout(400)]
