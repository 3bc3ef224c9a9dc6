"""Targets that a version fills partly or not at all."""

from __future__ import annotations

from collections import UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch

import penstock as ps

WEIGHTS = {
    "w": torch.arange(6.0).view(2, 3),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "none": torch.zeros(0, 4),
    "number": torch.tensor(7),
}


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize("make", [dict, UserDict])
def test_empty_dict_receives_new_tensors(make: type, mode: Any) -> None:
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    target = make()
    with (
        ps.publisher("new", weights) as publisher,
        ps.subscriber("new", target, mode=mode, settings=ps.sync.SubscriberSettings(arena=True)) as subscriber,
    ):
        assert subscriber.prepare() and not target
        for version in (1, 2):
            weights["w"] += 1
            publisher.publish(version)
            assert subscriber.update().nbytes > 0
            assert list(target) == list(WEIGHTS)
            assert all(torch.equal(tensor, weights[name]) for name, tensor in target.items())


def test_failed_first_update_leaves_dict_empty() -> None:
    target: dict[str, torch.Tensor] = {}
    hooks = ps.Hooks(check=lambda version, staged: "no" if version == 1 else sorted(staged.tensors) and None)
    with ps.publisher("refused", WEIGHTS) as publisher, ps.subscriber("refused", target, hooks=hooks) as subscriber:
        publisher.publish(1)
        with pytest.raises(ps.VersionRefused):
            subscriber.update()
        assert target == {}
        publisher.publish(2)
        subscriber.update()
        assert torch.equal(target["w"], WEIGHTS["w"])


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (torch.nn.Sequential(torch.nn.ReLU()), {}, "the target has no tensors"),
        (MappingProxyType({}), {}, "the target has no tensors"),
        (lambda published: {}, {}, "the target has no tensors"),
        (
            torch.nn.Linear(2, 2),
            {"strict": False},
            "no published tensor fills a parameter of the module: w, half, none and 1",
        ),
        (
            {"other": torch.zeros(2)},
            {"strict": False},
            "no published tensor fills a tensor of the target: w, half, none",
        ),
    ],
)
def test_target_matching_no_tensor_is_rejected(target: Any, options: Any, message: str, mode: Any) -> None:
    with (
        ps.publisher("nothing", WEIGHTS) as publisher,
        ps.subscriber("nothing", target, mode=mode, **options) as subscriber,
    ):
        publisher.publish(1)
        with pytest.raises(ps.PlanError, match=message) as caught:
            subscriber.update()
        assert not caught.value.mutated
        assert subscriber.version == -1


@pytest.mark.parametrize("params", [{}, torch.nn.Sequential(torch.nn.ReLU())])
def test_publisher_without_tensors_is_refused(params: Any) -> None:
    with pytest.raises(ps.PlanError, match="the publisher of 'empty' has no tensors"):
        ps.publisher("empty", params)


def test_fetch_into_module_without_tensors_is_refused(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    with ps.join("m") as fleet:
        for fallback in (None, str(tmp_path)):
            with pytest.raises(ps.PlanError, match="the target has no tensors"):
                fleet.fetch(torch.nn.ReLU(), fallback=fallback, timeout_s=0.0)


def test_non_strict_sync_keeps_unpublished_dict_tensors() -> None:
    target = {"w": torch.zeros(2, 3), "other": torch.full((2,), 5.0)}
    with (
        ps.publisher("loose", WEIGHTS) as publisher,
        ps.subscriber("loose", target, strict=False, hooks=ps.Hooks(check=lambda version, staged: None)) as subscriber,
        ps.subscriber("loose", target) as strict,
    ):
        publisher.publish(1)
        subscriber.update()
        assert torch.equal(target["w"], WEIGHTS["w"]) and target["other"].tolist() == [5.0, 5.0]
        with pytest.raises(ps.PlanError, match=r"other: wanted as F32 \[2\], not held"):
            strict.update()


def test_default_publish_mode_serves_later_subscribers(caplog: pytest.LogCaptureFixture) -> None:
    weights = {"w": torch.ones(3)}
    with ps.publisher("default", weights) as publisher:
        assert publisher.publish(1).mode == "snapshot"
        weights["w"].zero_()
        with ps.subscriber("default", {}) as subscriber:
            assert subscriber.update().version == 1
    with ps.publisher("live", weights, mode="live") as publisher:
        publisher.publish(1)
    assert "no subscriber received version 1 of 'live'" in caplog.text
