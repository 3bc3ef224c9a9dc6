"""vLLM on a GPU takes versions from the FSDP2 shards of two ranks on the same GPU."""

from __future__ import annotations

import pytest
from tests.engines.device import vllm_takes_versions
from tests.engines.test_vllm_sync import server, test_two_trainer_ranks_update_engine_through_vllm_interface

__all__ = ["server", "test_two_trainer_ranks_update_engine_through_vllm_interface"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engines,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not vllm_takes_versions(), reason="this release of vLLM has no version of its weights"),
]
