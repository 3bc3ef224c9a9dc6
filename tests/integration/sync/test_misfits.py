"""Trainers and engines that do not match raise a PlanError with names and causes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

import penstock as ps

Weights = Iterable[tuple[str, torch.Tensor]]
Change = Callable[[torch.Tensor], torch.Tensor] | None


def linear() -> torch.nn.Module:
    return torch.nn.Linear(4, 4)


def sync(source: Any, target: Any, **options: Any) -> ps.UpdateReport:
    with ps.publisher("misfit", source) as publisher, ps.subscriber("misfit", target, **options) as subscriber:
        publisher.publish(1)
        return subscriber.update()


def assert_same(source: torch.nn.Module, target: torch.nn.Module) -> None:
    pairs = zip(source.parameters(), target.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def failing(weights: Weights) -> None:
    raise KeyError(next(iter(weights))[0])


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize(
    ("source", "target", "options", "message", "cause"),
    [
        (
            torch.nn.Embedding(12, 4),
            torch.nn.Embedding(10, 4),
            {},
            r"size mismatch for weight.*\[12, 4\]",
            RuntimeError,
        ),
        (torch.nn.Embedding(12, 4), {"weight": torch.zeros(10, 4)}, {}, r"weight: wanted as F32 \[10, 4\]", None),
        (linear(), linear(), {"load": failing}, "the loader raised KeyError: 'weight'", KeyError),
        (linear(), lambda published: published["x"], {}, "the target function raised KeyError: 'x'", KeyError),
        (linear(), torch.nn.LazyLinear(4), {}, "the tensor is not initialised.*tensor 'weight'", None),
        ({"module.weight": torch.ones(4, 4)}, {"weight": torch.ones(4, 4)}, {}, "names begin with 'module.'", None),
        ({"module.bias": torch.ones(4)}, torch.nn.LayerNorm(4), {"strict": False}, "no published tensor fills", None),
    ],
)
def test_model_mismatch_raises_plan_error_with_cause(
    source: Any, target: Any, options: dict[str, Any], message: str, cause: type[Exception] | None, mode: str
) -> None:
    with pytest.raises(ps.PlanError, match=rf"(?s){message}") as caught:
        sync(source, target, mode=mode, **options)
    assert not caught.value.mutated
    assert cause is None or isinstance(caught.value.__cause__, cause)


class Gathers(torch.nn.Module):
    """A module whose loader needs all names in one call, and computes with one of them or reads it."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.w, self.v = torch.nn.Parameter(torch.zeros(4, 8)), torch.nn.Parameter(torch.zeros(3))
        self.reads = reads

    def load_weights(self, weights: Weights) -> None:
        named = dict(weights)
        largest = named["w"].abs().max()
        if self.reads:
            largest = float(largest)
        self.w.data.copy_(named["w"] / largest)
        self.v.data.copy_(named["v"])


@pytest.mark.filterwarnings("ignore:2 tensors are received whole")
@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize("reads", [False, True])
def test_loader_needing_all_tensors_receives_them_together(reads: bool, mode: Any) -> None:
    source, target = {"w": torch.randn(4, 8), "v": torch.randn(3)}, Gathers(reads=reads)
    report = sync(source, target, mode=mode)
    assert torch.allclose(target.w, source["w"] / source["w"].abs().max())
    assert torch.equal(target.v, source["v"])
    assert "needs all tensors in one call" in report.summary()


@pytest.mark.filterwarnings("ignore:2 tensors are received whole")
def test_loader_failing_midway_marks_target_dirty() -> None:
    target, is_broken = linear(), [False]

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            target.get_parameter(name).data.copy_(tensor + 1)
            if is_broken[0]:
                raise ValueError("late")

    with ps.publisher("later", linear()) as publisher, ps.subscriber("later", target, load=load) as subscriber:
        publisher.publish(1)
        subscriber.update()
        is_broken[0] = True
        publisher.publish(2)
        with pytest.raises(ps.PlanError, match="the loader, given weight, bias, raised ValueError: late") as caught:
            subscriber.update()
        assert (caught.value.mutated, subscriber.is_dirty) == (True, True)
        assert isinstance(caught.value.__cause__, ValueError)
        is_broken[0] = False
        assert subscriber.update().version == 2 and not subscriber.is_dirty


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize("change", [None, torch.t, lambda tensor: tensor + 1])
def test_module_created_in_inference_mode_is_filled(change: Change, mode: Any) -> None:
    source = linear()
    with torch.inference_mode():
        target = linear()

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            target.get_parameter(name).data.copy_(change(tensor))

    with pytest.warns(RuntimeWarning) if change not in (None, torch.t) else torch.no_grad():
        sync(source, target, mode=mode, load=load if change else None)
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.get_parameter(name), change(tensor) if change else tensor)


def has_module() -> torch.nn.Module:
    return torch.nn.ModuleDict({"module": linear()})


def inside(module: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleDict({"actor": module})


def compiled(module: torch.nn.Module) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize(
    ("wrap_source", "wrap_target", "make"),
    [
        (torch.nn.DataParallel, lambda module: module, linear),
        (lambda module: module, torch.nn.DataParallel, linear),
        (torch.nn.DataParallel, torch.nn.DataParallel, has_module),
        (lambda module: compiled(torch.nn.DataParallel(module)), compiled, linear),
        (
            lambda module: torch.nn.ModuleDict({"a": torch.nn.DataParallel(module)}),
            lambda m: {"a.weight": m.weight},
            linear,
        ),
    ],
)
def test_wrapper_prefixes_are_ignored_in_tensor_names(wrap_source: Any, wrap_target: Any, make: Any) -> None:
    source, target = make(), make()
    sync(wrap_source(source), wrap_target(target))
    assert torch.equal(next(source.parameters()), next(target.parameters()))


def test_shape_change_after_trainer_restart_error_names_tensor() -> None:
    with ps.subscriber("restart", {"lora_A": torch.zeros(4, 8)}) as subscriber:
        with ps.publisher("restart", {"lora_A": torch.ones(4, 8)}) as publisher:
            publisher.publish(1)
            subscriber.update()
        with ps.publisher("restart", {"lora_A": torch.ones(8, 8)}) as publisher:
            publisher.publish(2)
            with pytest.raises(ps.PlanError, match=r"lora_A: wanted as F32 \[4, 8\], held as F32 \[8, 8\]"):
                subscriber.update()
            assert subscriber.version == 1


class Adds(torch.nn.Module):
    """A module whose loader computes with each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(3))

    def load_weights(self, weights: Weights) -> None:
        named = dict(self.named_parameters())
        for name, tensor in weights:
            named[name].data[:2].copy_((tensor + 1)[:2])


def test_parameter_unfilled_by_loader_raises_plan_error() -> None:
    # The loader may fill the remaining elements of `w`, but nothing can fill `v`.
    with pytest.raises(ps.PlanError, match=r"do not fill all parameters:\s+v: 3 of 3 elements; blame") as caught:
        sync({"w": torch.ones(4)}, Adds())
    assert not caught.value.mutated
    target = Adds()
    with pytest.warns(RuntimeWarning, match="pass through the loader"):
        sync({"w": torch.ones(4)}, target, strict=False)
    assert (target.w.tolist(), target.v.tolist()) == ([2.0, 2.0, 0.0, 0.0], [0.0] * 3)


@pytest.mark.parametrize(
    ("source", "target"), [({1: torch.ones(4)}, {}), ({"w": torch.ones(4)}, {("w", 0): torch.ones(4)})]
)
def test_non_string_tensor_names_are_rejected(source: Any, target: Any) -> None:
    with pytest.raises(ps.ConfigError, match="the name of a tensor is"):
        sync(source, target)


def test_invalid_version_or_count_raises_config_error() -> None:
    with ps.publisher("numbers", {"w": torch.ones(4)}) as publisher, ps.subscriber("numbers", {}) as subscriber:
        publisher.publish(1)
        calls = [
            *(partial(call, "2") for call in (subscriber.wait, subscriber.update, subscriber.stage)),
            *(partial(publisher.publish, version) for version in ("2", 1 << 63)),
            partial(publisher.wait_subscribers, "2"),
        ]
        for call in calls:
            with pytest.raises(ps.ConfigError, match=r"(version|count) is .* \((str|int)\)"):
                call()
        assert subscriber.update().version == 1


@pytest.mark.parametrize("leaves", [True, False])
def test_report_lists_parameters_that_only_loader_can_fill(leaves: bool) -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v, self.u = (torch.nn.Parameter(torch.zeros(4)) for _ in range(3))

        def load_weights(self, weights: Weights) -> None:
            for name, tensor in weights:
                if name != "w":
                    getattr(self, name).data.copy_(tensor)
                elif float(tensor[0]) < 5:
                    self.w.data.copy_(tensor)

    target = Reads()
    values = torch.full((4,), 7.0 if leaves else 3.0)
    with pytest.warns(RuntimeWarning, match=r"only it can fill w, which keep") as warned:
        report = sync({"w": values, "v": values, "u": values}, target)
    assert len(warned) == 1 and "only it can fill w," in report.why[0]
    assert torch.equal(target.w, torch.zeros(4) if leaves else values) and torch.equal(target.v, values)
