from __future__ import annotations

import re

import msgspec
import pytest

from penstock.errors import ConfigError
from penstock_compile_cache import Key, key_of

KEY = Key(
    model="w1-00",
    engine="vllm",
    engine_version="0.32.0",
    python="3.12",
    torch="2.11.0+cu130",
    triton="3.6.0",
    driver="580.1",
    device="H100, sm_90",
    config={"dtype": "bf16"},
)


@pytest.mark.parametrize("name", [field for field in Key.__struct_fields__ if field != "config"])
def test_every_key_field_changes_bundle_id(name: str) -> None:
    other = msgspec.structs.replace(KEY, **{name: "other"})
    assert other.id != KEY.id
    assert KEY.differences(other) == [f"{name} other instead of {getattr(KEY, name)}"]


def test_different_configuration_changes_bundle_id() -> None:
    other = msgspec.structs.replace(KEY, config={"dtype": "f16", "tp": "2"})
    assert other.id != KEY.id
    assert KEY.differences(other) == ["config.dtype f16 instead of bf16", "config.tp 2 instead of none"]


def test_order_of_configuration_does_not_change_bundle_id() -> None:
    one, two = (
        msgspec.structs.replace(KEY, config=dict(pairs))
        for pairs in ([("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")])
    )
    assert one.id == two.id and one.differences(two) == []


def test_cache_key_describes_torch_version_and_cpu() -> None:
    import torch

    key = key_of("w1-00", engine="transformers", config={"dtype": "bf16"})
    assert key.torch == torch.__version__ and key.engine_version and key.driver == ""
    assert "instruction sets" in key.device and key_of("w1-00", engine="transformers", config={"dtype": "bf16"}) == key


def test_engine_without_installed_package_has_no_version() -> None:
    assert key_of("w1-00", engine="mine").engine_version == ""
    assert key_of("w1-00", engine="mine", engine_version="7").engine_version == "7"


def test_non_text_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tp': 2"):
        key_of("w1-00", engine="mine", config={"tp": 2})  # type: ignore[dict-item]


@pytest.mark.parametrize("device", ["gpu", "CPU", "", "cuda:", "mps", "cuda:9999"])
def test_invalid_or_missing_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(device)) if not device.startswith("cuda:9") else "GPUs"):
        key_of("w1-00", engine="mine", device=device)


def test_non_text_device_is_rejected() -> None:
    with pytest.raises(ConfigError, match="device"):
        key_of("w1-00", engine="mine", device=0)  # type: ignore[arg-type]
    assert key_of("w1-00", engine="mine", device="cpu:0") == key_of("w1-00", engine="mine")
