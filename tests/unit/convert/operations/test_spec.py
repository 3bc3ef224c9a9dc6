"""Operations in words: what an unknown or a malformed one is answered."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.errors import ConfigError
from penstock_convert.operations.merge import Linear, Slerp, Ties
from penstock_convert.operations.spec import maker_of, operation_of, operation_spec, usage, usages


def test_usage_lists_every_operation_with_parameters() -> None:
    listed = usages()
    for name, made in (("linear", Linear), ("slerp", Slerp), ("ties", Ties)):
        fields = [field.name for field in dataclasses.fields(made)]
        assert all(field in usage(name) for field in fields) and usage(name) in listed
    assert usage("slerp") == "slerp(t)"
    assert usage("reshard").startswith("reshard(to, rules=(), layout=")
    assert usage("lora-merge") == "lora-merge()"  # all that it takes lies beside the adapter
    assert {"copy()", "rename(rules)", "store(format, only=(), keep=())"} <= set(listed)


@pytest.mark.parametrize("name", ["slurp", "help", ""])
def test_unknown_operation_error_lists_every_operation(name: str) -> None:
    for ask in (lambda: maker_of(name), lambda: operation_of([{"op": name}]), lambda: operation_spec(name)):
        with pytest.raises(ConfigError, match="unknown operation") as caught:
            ask()
        assert ", ".join(usages()) in str(caught.value.hint) and "docs/convert/convert.md" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "near"), [("slurp", "slerp"), ("lora_merge", "lora-merge"), ("Dequantize", "dequantise")]
)
def test_mistyped_operation_error_suggests_nearest_name(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        maker_of(name)
    assert f"did you mean {near!r}?" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["slerp:help", "slerp:t", "slerp:t=0.5;x", "slerp:weight=1", "slerp", "slerp:t=much"])
def test_malformed_operation_error_shows_usage(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        operation_of([operation_spec(text)])
    assert "use slerp(t)" in str(caught.value.hint)


def test_user_function_is_not_listed_as_operation() -> None:
    assert operation_spec("math:sqrt") == {"op": "function", "function": "math:sqrt"}
