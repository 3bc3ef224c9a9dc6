"""SGLang on a GPU: loads, updates under load, release and restore of memory, with CUDA graphs."""

from __future__ import annotations

import pytest
from tests.engines.test_sglang_serving import (
    model,
    other,
    server,
    test_checkpoint_with_flipped_bit_is_refused,
    test_released_memory_is_restored_with_same_answers,
    test_second_replica_answers_as_first,
    test_server_answers_as_with_default_loader,
    test_updates_under_load_fail_no_request,
    true,
)

__all__ = [
    "model",
    "other",
    "server",
    "test_checkpoint_with_flipped_bit_is_refused",
    "test_released_memory_is_restored_with_same_answers",
    "test_second_replica_answers_as_first",
    "test_server_answers_as_with_default_loader",
    "test_updates_under_load_fail_no_request",
    "true",
]

pytestmark = [pytest.mark.gpu, pytest.mark.engines, pytest.mark.timeout(400)]
