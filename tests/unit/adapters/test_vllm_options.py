"""Valid and invalid values of `--model-loader-extra-config`, without vLLM."""

from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.spi.engine_weights import read_options
from penstock.types import MIB


def test_vllm_byte_size_options_are_parsed() -> None:
    assert read_options({"memory_bytes": "64M", "verify": True}) == {"memory_bytes": 64 * MIB, "verify": True}
    assert read_options({}) == {}


@pytest.mark.parametrize(
    "extra",
    [[], {"verify": "yes"}, {"memory_bytes": "lots"}, {"storage_options": 3}, {"distributed": 1}, {"memroy_bytes": 1}],
)
def test_invalid_option_raises_config_error(extra: Any) -> None:
    with pytest.raises(ConfigError):
        read_options(extra)
