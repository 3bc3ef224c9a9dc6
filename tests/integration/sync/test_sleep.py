"""Weights that are released while an engine sleeps are restored completely and verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.integration.conftest import Host

import penstock as ps
from penstock.errors import Cancelled, ConfigError, IntegrityError, PlanError, VersionNotLive

SETTINGS = ps.ConnectionSettings(stall_s=5.0)


class Model(torch.nn.Module):
    """Layers, a transposed one that its loader fills from scratch memory, and a buffer without a checkpoint entry."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(32, 48)
        self.second = torch.nn.Linear(48, 16)
        self.turned = torch.nn.Parameter(torch.randn(16, 8))
        self.register_buffer("angles", torch.arange(48.0), persistent=False)

    def load_weights(self, weights) -> None:
        live = dict(self.named_parameters())
        for name, tensor in weights:
            live[name].data.copy_(tensor.t() if name == "turned" else tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + self.angles) @ self.turned


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    shapes = {name: one.shape for name, one in Model(0).named_parameters()} | {"turned": (8, 16)}
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}


def loaded(seed: int) -> Model:
    model = Model(seed)
    model.load_weights(checkpoint(seed).items())
    return model


X = torch.linspace(-1, 1, 32)[None]


class Fleet:
    """A trainer and an engine in this process."""

    def __init__(self, stack: ExitStack, mode: str) -> None:
        self.weights = checkpoint(1)
        self.trainer = stack.enter_context(ps.publisher("policy", self.weights, connection=SETTINGS, mode="snapshot"))
        self.model = Model(99)
        self.engine = stack.enter_context(
            ps.subscriber("policy", self.model, connection=SETTINGS, mode=mode, rank=(0, 1))
        )
        self.publish(1)
        self.engine.update()

    def publish(self, version: int) -> None:
        for name, tensor in checkpoint(version).items():
            self.weights[name].copy_(tensor)
        self.trainer.publish(version)

    def answer(self) -> torch.Tensor:
        with self.engine.pinned(ttl_s=5.0), torch.no_grad():
            return self.model(X).clone()

    def assert_serves(self, version: int) -> None:
        assert self.engine.version == version
        with torch.no_grad():
            assert torch.equal(self.answer(), loaded(version)(X))
            assert not torch.equal(self.answer(), loaded(version + 1)(X))

    def refuses(self) -> None:
        assert self.engine.version == -1
        with pytest.raises(VersionNotLive, match="there is none"):
            self.answer()


@pytest.fixture
def hub(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that outlives the trainer."""
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(host.directory))
    monkeypatch.setenv("PENSTOCK_HUB", host.start_hub()[1])


@pytest.fixture(params=["staged", "direct"])
def fleet(request: pytest.FixtureRequest, hub: None) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, request.param)


def storages(model: torch.nn.Module) -> list[int]:
    return [one.untyped_storage().nbytes() for one in model.parameters()]


def test_released_weights_are_restored_from_trainer(fleet: Fleet) -> None:
    fleet.assert_serves(1)
    sizes = storages(fleet.model)
    with pytest.raises(ConfigError, match="not released"):
        fleet.engine.restore()
    freed = fleet.engine.release()
    assert (storages(fleet.model), freed) == ([0] * len(sizes), sum(sizes))
    fleet.refuses()
    with pytest.raises(ConfigError, match="restore"):
        fleet.engine.update()
    with pytest.raises(ConfigError, match="already"):
        fleet.engine.release()
    report = fleet.engine.restore()
    assert (report.version, report.nbytes, storages(fleet.model)) == (1, sum(sizes), sizes)
    fleet.assert_serves(1)
    # The engine gets the trainer's newest version, and later updates work.
    fleet.engine.release()
    fleet.publish(2)
    assert fleet.engine.restore().version == 2
    fleet.assert_serves(2)
    fleet.publish(3)
    assert fleet.engine.update().version == 3
    fleet.assert_serves(3)


def test_released_weights_are_restored_from_another_engine(fleet: Fleet) -> None:
    with ps.subscriber("policy", other := Model(5), connection=SETTINGS, rank=(0, 1)) as peer:
        peer.update()
        fleet.trainer.close()
        fleet.engine.release()
        report = fleet.engine.restore(timeout_s=10.0)
        assert report.sources == {peer.member.id: report.nbytes}
        fleet.assert_serves(1)
        assert torch.equal(other.turned, fleet.model.turned)


def test_unavailable_version_error_suggests_sources(fleet: Fleet, tmp_path: Path) -> None:
    fleet.trainer.close()
    fleet.engine.release()
    with pytest.raises(ps.PenstockError, match=r"start a publisher, .*, or pass stored=StoredVersion\(\)"):
        fleet.engine.restore(timeout_s=0.5)
    fleet.refuses()  # the memory has arbitrary values
    assert all(storages(fleet.model))
    # The stored version differs from its number, as the digests show.
    save_file(checkpoint(7), tmp_path / "wrong.safetensors")
    wrong = ps.sync.StoredVersion(version=1, weights=str(tmp_path / "wrong.safetensors"))
    with pytest.raises(IntegrityError, match="differs from the version that was live"):
        fleet.engine.restore(stored=wrong)
    fleet.refuses()
    lacking = ps.sync.StoredVersion(version=1, weights=lambda: [("turned", checkpoint(1)["turned"])])
    with pytest.raises(PlanError, match="lacks"):
        fleet.engine.restore(stored=lacking)
    fleet.refuses()
    save_file(checkpoint(1), tmp_path / "right.safetensors")
    right = ps.sync.StoredVersion(version=1, weights=str(tmp_path / "right.safetensors"))
    report = fleet.engine.restore(stored=right)
    assert "outside the sync" in report.why[0]
    fleet.assert_serves(1)
    # The engine is a source again, because its bytes are verified.
    with ps.subscriber("policy", other := Model(5), connection=SETTINGS, rank=(0, 1)) as peer:
        assert peer.update(timeout_s=10.0).sources.keys() == {fleet.engine.member.id}
        assert torch.equal(other.turned, fleet.model.turned)


def test_closed_subscriber_changes_no_weights(fleet: Fleet) -> None:
    fleet.publish(2)
    is_staged = fleet.engine.mode == "staged"
    if is_staged:
        fleet.engine.stage()
    else:
        fleet.engine.release()
    fleet.engine.close()
    for call in (fleet.engine.commit if is_staged else fleet.engine.restore, fleet.engine.update):
        with pytest.raises(Cancelled, match="the subscriber was closed"):
            call()
    assert fleet.engine.version == (1 if is_staged else -1)
    if is_staged:
        assert torch.equal(fleet.model(X), loaded(1)(X))


def test_stored_version_is_restored_but_not_served(fleet: Fleet) -> None:
    fleet.trainer.close()
    fleet.engine.release()
    report = fleet.engine.restore(stored=ps.sync.StoredVersion(version=4, weights=lambda: checkpoint(4).items()))
    assert report.path == "given tensors"
    fleet.assert_serves(4)
    with ps.subscriber("policy", Model(5), connection=SETTINGS, rank=(0, 1)) as peer, pytest.raises(ps.PenstockError):
        peer.update(timeout_s=0.5)


def test_weights_restored_by_engine_are_verified(fleet: Fleet) -> None:
    saved = {name: one.detach().clone() for name, one in fleet.model.named_parameters()}

    def poison() -> None:
        with torch.no_grad():
            for one in fleet.model.parameters():
                one.fill_(float("nan"))

    with pytest.raises(ConfigError, match="with free=True"):
        fleet.engine.release(returns=True)
    assert fleet.engine.release(free=False, returns=True) == 0
    poison()  # as an allocator that remaps memory
    fleet.refuses()
    with pytest.raises(IntegrityError, match="with different bytes"):
        fleet.engine.restore(in_place=True)
    fleet.refuses()
    with torch.no_grad():
        for name, one in fleet.model.named_parameters():
            one.copy_(saved[name])
    report = fleet.engine.restore(in_place=True)
    assert (report.version, report.nbytes) == (1, 0)
    fleet.assert_serves(1)
    # The sync restores the weights.
    fleet.engine.release(free=False)
    poison()
    with pytest.raises(ConfigError, match="no digests of the memory"):
        fleet.engine.restore(in_place=True)
    fleet.engine.restore()
    fleet.assert_serves(1)


def test_freeing_weights_before_first_version_raises(hub: None) -> None:
    with ps.subscriber("policy", Model(5), connection=SETTINGS, rank=(0, 1)) as engine:
        with pytest.raises(ConfigError, match="before the first version"):
            engine.release()
        engine.release(free=False)
        with ps.publisher("policy", checkpoint(1), connection=SETTINGS, mode="snapshot", rank=(0, 1)) as trainer:
            trainer.publish(1)
            assert engine.restore(timeout_s=10.0).version == 1


def test_readers_avoid_source_with_released_weights(fleet: Fleet) -> None:
    """A peer's update reads from the trainer and not from freed memory."""
    fleet.engine.release()
    with ps.subscriber("policy", other := Model(5), connection=SETTINGS, rank=(0, 1)) as peer:
        assert peer.update().sources.keys() == {fleet.trainer.member.id}
        assert torch.equal(other.turned, loaded(1).turned)


def test_announced_returns_newest_version_without_waiting(fleet: Fleet) -> None:
    assert (fleet.engine.announced(), fleet.engine.is_released) == (1, False)
    fleet.engine.release()
    fleet.publish(2)
    assert (fleet.engine.announced(), fleet.engine.is_released) == (2, True)
    fleet.trainer.close()
    assert fleet.engine.announced() == -1
