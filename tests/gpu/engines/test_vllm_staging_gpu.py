"""vLLM on a GPU installs staged weights of experts and of FP8 checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines import test_vllm_staging
from tests.engines.device import vllm_takes_versions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engines,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not vllm_takes_versions(), reason="this release of vLLM has no version of its weights"),
]


@pytest.mark.parametrize("kind", ["experts", "fp8"])
def test_staged_weights_match_fresh_engine(kind: str, tmp_path: Path) -> None:
    test_vllm_staging.test_staged_weights_match_fresh_engine(kind, tmp_path)
