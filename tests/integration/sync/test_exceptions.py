"""A rank that raises an error while a version is published or goes live ends with one complete version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from tests.integration.conftest import Host

import penstock as ps

SHAPE = (64, 48)


def weights(version: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(version))


@dataclass
class Engine:
    """An engine whose hooks are called in order. An armed hook raises an error."""

    raises: str = ""
    called: list[str] = field(default_factory=list)

    def hooks(self) -> ps.Hooks:
        return ps.Hooks(**{name: self._hook(name) for name in ("before_pause", "at_commit", "after_resume")})

    def _hook(self, name: str):
        def hook(version: int) -> None:
            self.called.append(name)
            if name == self.raises:
                raise ValueError(f"the engine fails {name}")

        return hook


@pytest.fixture
def published(host: Host) -> Iterator[tuple[ps.sync.Publisher, torch.Tensor]]:
    held = weights(1)
    with ps.publisher("p", {"w": held}, mode="snapshot") as publisher:
        publisher.publish(1)
        yield publisher, held


def publish(published: tuple[ps.sync.Publisher, torch.Tensor], version: int) -> None:
    publisher, held = published
    held.copy_(weights(version))
    publisher.publish(version)


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize("hook", ["before_pause", "at_commit", "after_resume"])
def test_hook_error_fails_update_without_dirty_target(published, mode: str, hook: str) -> None:
    engine, mine = Engine(), torch.zeros(SHAPE)
    with ps.subscriber("p", {"w": mine}, mode=mode, hooks=engine.hooks()) as subscriber:
        subscriber.update()
        assert torch.equal(mine, weights(1))
        publish(published, 2)
        engine.raises = hook
        with pytest.raises(ValueError, match=hook) as raised:
            subscriber.update()
        now = 1 if hook == "before_pause" else 2  # the engine was not paused
        note = f"Hooks.{hook} raised this for version 2: the target has all of version {now}"
        assert raised.value.__notes__ == [note]
        assert (subscriber.version, subscriber.is_dirty) == (now, False)
        assert torch.equal(mine, weights(now))
        engine.raises = ""
        assert subscriber.update().version == 2
        publish(published, 3)
        engine.called.clear()
        assert subscriber.update().version == 3
        assert torch.equal(mine, weights(3))
        assert engine.called == ["before_pause", "at_commit", "after_resume"]


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_before_read_hook_error_reports_untouched_target(published, mode: str) -> None:
    def refuse(version: int, metadata: Mapping[str, str]) -> None:
        raise KeyError("not this one")

    mine = torch.zeros(SHAPE)
    with ps.subscriber("p", {"w": mine}, mode=mode, hooks=ps.Hooks(before_read=refuse)) as subscriber:
        with pytest.raises(KeyError, match="not this one") as raised:
            subscriber.update()
        note = "Hooks.before_read raised this for version 1: the target was not touched"
        assert raised.value.__notes__ == [note]
        assert not mine.any() and not subscriber.is_dirty


@pytest.mark.filterwarnings("ignore:1 tensors are received whole:RuntimeWarning")
@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_loader_error_leaves_target_dirty_until_next_update(published, mode: str) -> None:
    """The loader raises an error during the flip, so the target may have some bytes of the new version."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.fails = torch.nn.Parameter(torch.zeros(SHAPE), requires_grad=False), False

        def load_weights(self, tensors) -> set[str]:
            if self.fails:
                raise ValueError("the loader fails")
            for _, tensor in tensors:
                self.w.data.copy_(tensor.float().cumsum(0))  # cannot be recorded
            return {"w"}

    model = Model()
    with ps.subscriber("p", model, mode=mode) as subscriber:
        subscriber.update()
        assert torch.equal(model.w, weights(1).cumsum(0))
        publish(published, 2)
        model.fails = True
        with pytest.raises(ps.PlanError, match="the loader fails") as raised:
            subscriber.update()
        assert raised.value.mutated and isinstance(raised.value.__cause__, ValueError)
        assert subscriber.is_dirty
        model.fails = False
        assert subscriber.update().version == 2
        assert not subscriber.is_dirty and torch.equal(model.w, weights(2).cumsum(0))
