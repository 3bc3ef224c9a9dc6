"""vLLM on a GPU: loads from files, a fleet and a weight cache, with CUDA graphs, experts and FP8, and sleeps."""

from __future__ import annotations

import pytest
from tests.engines.test_fleet import test_second_vllm_replica_receives_weights_from_first
from tests.engines.test_vllm import (
    default,
    engines,
    test_checkpoint_with_flipped_bit_is_refused,
    test_kind_of_model_matches_default_loader,
    test_local_model_matches_tokens_from_default_loader,
    test_model_in_weight_cache_matches_default_loader,
    test_sharded_model_with_options_matches_tokens_from_default_loader,
    test_sleeping_engine_wakes_with_same_answer,
    test_tied_model_matches_tokens_from_default_loader,
)

__all__ = [
    "default",
    "engines",
    "test_checkpoint_with_flipped_bit_is_refused",
    "test_kind_of_model_matches_default_loader",
    "test_local_model_matches_tokens_from_default_loader",
    "test_model_in_weight_cache_matches_default_loader",
    "test_second_vllm_replica_receives_weights_from_first",
    "test_sharded_model_with_options_matches_tokens_from_default_loader",
    "test_sleeping_engine_wakes_with_same_answer",
    "test_tied_model_matches_tokens_from_default_loader",
]

pytestmark = [pytest.mark.gpu, pytest.mark.engines, pytest.mark.timeout(400)]
