"""The way that vLLM's loader takes with the option "finished", with a toy in the place of vLLM's model."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.sync.toy import Place, Toy, checkpoint

import penstock as ps
from penstock.errors import ConfigError, DestinationError, PeerLost, PermissionDenied, SourceStalled
from penstock_vllm import plugin as vllm
from penstock.integrations import vllm_finished
from penstock.integrations.vllm_finished import load_finished
from penstock.keeper.attach import Attached, bind_parameters

pytestmark = pytest.mark.usefixtures("own_runtime")
TENSORS = checkpoint()
LOG = logging.getLogger("penstock.vllm")


@dataclass
class Config:
    """vLLM's configuration, of which only the hash and the sleep mode are used."""

    of: str
    model_config: object = None

    def compute_hash(self) -> str:
        return self.of


class Unrecordable(Toy):
    """Its loader computes with one tensor, which leaves the values as they are."""

    def load_weights(self, weights):
        return super().load_weights((n, w * 1 if n == "norm.weight" else w) for n, w in weights)


class Failing(Toy):
    """Its loader does not take tensors that have no values."""

    def load_weights(self, weights):
        return super().load_weights((n, self.checked(w)) for n, w in weights)

    def checked(self, weight):
        if type(weight) is not torch.Tensor:
            raise TypeError("this is no tensor")
        return weight


class Larger(Toy):
    """It has a buffer more, as a plugin or an environment variable adds one."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.register_buffer("more", torch.zeros(3))


class Elsewhere(Toy):
    """It has weights that are not in the checkpoint's directory."""

    secondary_weights = ("another directory",)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "toy").mkdir()
    save_file(TENSORS, tmp_path / "toy" / "model.safetensors")
    return tmp_path / "toy"


@pytest.fixture
def keeper(caplog: pytest.LogCaptureFixture) -> Iterator[ps.Keeper]:
    caplog.set_level(logging.INFO, LOG.name)
    with ps.Keeper(accept=True) as keeper:
        yield keeper
        gc.collect()


def start(directory: Path, rank: int, size: int, kind: type[Toy] = Toy, config: str = "config") -> bool:
    """Start one rank, and compare its parameters with those of the loader; return whether it loaded the files."""
    toy, true = (kind(Place(tp_rank=rank, tp=size)) for _ in range(2))
    load = mock.Mock(side_effect=lambda: toy.load_weights(TENSORS.items()))
    load_finished(toy, Config("model"), Config(f"{config} of {size}"), str(directory), {}, rank, size, load, LOG)
    true.load_weights(TENSORS.items())
    for name, tensor in true.state_dict().items():
        assert torch.equal(toy.state_dict()[name], tensor), name
    return bool(load.called)


def started(directory: Path, size: int) -> set[bool]:
    """Start all ranks; return whether they loaded the files."""
    loaded = {start(directory, rank, size) for rank in range(size)}
    # Their leases end with them.
    gc.collect()
    return loaded


@dataclass
class LoadConfig:
    """vLLM's configuration of a loader, with the fields that are read."""

    load_format: str
    model_loader_extra_config: dict[str, Any]


class DefaultModelLoader:
    """In the place of vLLM's."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config
        self.has_loaded = False

    def load_model(self, vllm_config: Config, model_config: Any) -> Toy:
        toy = Toy(model_config.place)
        self.load_weights(toy, model_config)
        return toy

    def load_weights(self, model: Toy, model_config: Any) -> None:
        self.has_loaded = True
        model.load_weights(TENSORS.items())


def start_worker(directory: Path, rank: int, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Start a worker of an engine of two, with Penstock's loader; compare its parameters with those of the loader."""
    distributed, loaders = ModuleType("vllm.distributed"), ModuleType("default_loader")
    world = SimpleNamespace(rank=rank, local_rank=local_rank, world_size=2)
    vars(distributed)["get_world_group"] = lambda: world
    vars(loaders)["DefaultModelLoader"] = DefaultModelLoader
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.default_loader", loaders)
    place = Place(tp_rank=rank, tp=2)
    config = SimpleNamespace(model=str(directory), compute_hash=lambda: "model", place=place)
    loader = vllm._loader_class()(LoadConfig("penstock", {"finished": True}))
    state = loader.load_model(Config("engine"), config).state_dict()
    true = Toy(place)
    true.load_weights(TENSORS.items())
    for name, tensor in true.state_dict().items():
        assert torch.equal(state[name], tensor), name
    return bool(loader.has_loaded)


def revisions(keeper: ps.Keeper) -> dict[str, str]:
    return {w.identity.parallel["rank"]: w.root() for w in keeper.member.weights}


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2)], ids=str)
def test_only_the_first_size_is_loaded(
    sizes: tuple[int, int], directory: Path, keeper: ps.Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = sizes
    assert started(directory, first) == {True}
    assert started(directory, second) == {False}
    assert caplog.text.count(f"re-sharded from {first} kept ranks") == second
    # Now they are there under their own coordinates.
    assert started(directory, second) == {False}
    assert caplog.text.count("re-sharded") == second
    assert len(keeper.models()) == first + second
    kept = revisions(keeper)
    keeper.drop(keeper.models()[0].model)
    assert started(directory, second) == {True}
    # What was made of another size is what the files give, bit for bit.
    assert revisions(keeper).items() <= kept.items()


def test_data_parallel_ranks_have_parameters_of_their_own(
    directory: Path, keeper: ps.Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With experts sharded over two data-parallel ranks, vLLM numbers the workers of each within its own replica.
    assert [start_worker(directory, rank, 0, monkeypatch) for rank in (0, 1)] == [True, True]
    gc.collect()
    assert [start_worker(directory, rank, 0, monkeypatch) for rank in (0, 1)] == [False, False]
    gc.collect()
    # The same engine over two hosts, of which the ranks have changed places.
    assert not start_worker(directory, 1, 1, monkeypatch)
    assert revisions(keeper).keys() == {"0/2", "1/2"}
    gc.collect()
    # Together they are all ranks of an engine.
    assert not start(directory, 0, 1)


def test_another_configuration_of_one_size(directory: Path, keeper: ps.Keeper) -> None:
    assert start(directory, 0, 1)
    assert not start(directory, 0, 1, config="a larger batch")
    assert len(keeper.models()) == 2


def test_a_rank_that_is_not_kept(directory: Path, keeper: ps.Keeper, caplog: pytest.LogCaptureFixture) -> None:
    assert start(directory, 0, 2)
    assert start(directory, 0, 1)
    assert "of 2 ranks, rank 1 is not kept on this host" in caplog.text


@pytest.mark.parametrize(
    ("rank", "said"),
    [("1/2", "is not made of the parameters of"), ("0/1", "cannot be used for this rank")],
    ids=["of another size", "of its own"],
)
def test_a_damaged_byte(
    rank: str, said: str, directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The keeper looks for another source of what is damaged, for so long.
    monkeypatch.setenv("PENSTOCK_STALL_S", "6")
    with ps.Keeper(accept=True) as keeper:
        started(directory, int(rank[-1]))
        (weights,) = [w for w in keeper.member.weights if w.identity.parallel["rank"] == rank]
        weights.rows[2][5] ^= 1
        caplog.clear()
        assert start(directory, 0, 1)
        assert said in caplog.text
        gc.collect()


def test_a_checkpoint_that_is_replaced_before_the_load(
    directory: Path, keeper: ps.Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    newer = checkpoint(seed=1)
    toy = Toy(Place())

    def load() -> None:
        save_file(newer, directory / "model.safetensors")
        toy.load_weights(newer.items())

    load_finished(toy, Config("model"), Config("config of 1"), str(directory), {}, 0, 1, load, LOG)
    assert "the checkpoint changed during the load" in caplog.text
    assert not keeper.models()


@pytest.mark.parametrize("kind", [ConfigError, DestinationError, PermissionDenied, SourceStalled, PeerLost])
def test_a_keeper_that_cannot_be_used(
    kind: type[ps.PenstockError],
    directory: Path,
    keeper: ps.Keeper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Made at each call: an error that is kept would keep the model's frame, and with it the lease.
    def fail(*arguments: Any, **named: Any) -> None:
        raise kind("the reason")

    assert start(directory, 0, 1)
    monkeypatch.setattr(vllm_finished, "attach", fail)
    assert start(directory, 0, 1)
    assert "cannot be used for this rank: the reason" in caplog.text


def test_kept_tensors_that_do_not_fit(directory: Path, keeper: ps.Keeper, caplog: pytest.LogCaptureFixture) -> None:
    # Two classes of one name.
    kind = type("Toy", (Larger,), {})
    assert start(directory, 0, 1)
    assert start(directory, 0, 1, kind)
    assert "cannot be used for this rank: 1 tensors do not fit: more" in caplog.text
    # The lease ended with the attempt.
    assert not start(directory, 0, 1)
    gc.collect()
    keeper.drop(keeper.models()[0].model, drain_s=5)


def test_a_module_that_was_bound_in_part(
    directory: Path, keeper: ps.Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bind_a_part(attached: Attached, module: torch.nn.Module) -> None:
        bind_parameters(module, dict(list(attached.items())[:5]), strict=False)
        raise DestinationError("a tensor cannot be bound")

    assert start(directory, 0, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Attached, "attach_into", bind_a_part)
        # In spite of what is there: other values, which the load must replace.
        patched.setattr(sys.modules[__name__], "TENSORS", checkpoint(seed=1))
        assert start(directory, 0, 1)
    assert "a tensor cannot be bound" in caplog.text
    # The load wrote to pages of its own, not to the kept ones.
    assert not start(directory, 0, 1)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Unrecordable, "does more than copy 1 tensors: norm.weight"),
        (Failing, "cannot be recorded: PlanError: the loader raised TypeError: this is no tensor"),
        (Elsewhere, "chooses its files itself"),
    ],
)
def test_a_loader_that_cannot_be_recorded(
    kind: type[Toy], why: str, directory: Path, keeper: ps.Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    assert start(directory, 0, 1, kind)
    assert why in caplog.text
    # It is kept for its own size.
    assert not start(directory, 0, 1, kind)
    caplog.clear()
    assert start(directory, 0, 2, kind)
    assert why in caplog.text


def test_without_a_keeper(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG.name)
    assert start(directory, 0, 1)
    assert "are not kept for the next engine" in caplog.text
