"""transformers models, sharded by its own FSDP2, tensor and expert parallelism, sync into models sharded differently.

Each equals the result of its own loader bit for bit. This process plays every rank in turn, in a group that only
returns numbers, because its loader only reads slices.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.sync.moved import assert_same, move, spoil
from tests.unit.sync.toy import table_of

transformers = pytest.importorskip("transformers", minversion="5.23")

from tests.unit.sync.small_models import CONFIGS, make, saved, shuffled  # noqa: E402 - after what it needs

from penstock.sync.recording.layout import fill  # noqa: E402
from penstock.sync.recording.requirements import record  # noqa: E402
from penstock.sync.shards import ShardRow, declared  # noqa: E402
from penstock_hf.transformers import checkpoint_shards, weights_loader  # noqa: E402

TRAINERS = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (2, 2, 4)]
"""FSDP, tensor and expert parallelism. Ranks that share the other tensors have different experts."""
ENGINES = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4)]
"""Tensor and expert parallelism."""
EXPERTS = ("qwen3-moe", "deepseek-v3")


def fits(which: str, fsdp: int, tp: int, ep: int) -> bool:
    """Return whether transformers supports this sharding, with one of four experts per rank."""
    return fsdp != 3 if which in EXPERTS else ep == 1


PAIRS = [(which, engine) for which in CONFIGS for engine in ENGINES if fits(which, 1, *engine)]


@contextmanager
def numbered(rank: int, world_size: int) -> Iterator[None]:
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _clear_sharding_prop_cache()  # it contains meshes of the previous rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Models:
    """Ranks of models as transformers loads them, each created once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[tuple[str, str, int, int, int], list[tuple[Any, tuple[ShardRow, ...]]]] = {}

    @functools.cached_property
    def checkpoints(self) -> dict[str, Path]:
        found = {}
        for which, config in CONFIGS.items():
            saved(make(config()), self._directory / which)
            found[which] = self._directory / which
        return found

    def ranks(self, side: str, which: str, fsdp: int, tp: int, ep: int) -> list[tuple[Any, tuple[ShardRow, ...]]]:
        """Return the model of each rank of a side, and its declared rows."""
        key = side, which, fsdp, tp, ep
        if key not in self._made:
            self._made[key] = [self._rank(rank, which, fsdp, tp, ep) for rank in range(fsdp * tp)]
        return self._made[key]

    def _rank(self, rank: int, which: str, fsdp: int, tp: int, ep: int) -> tuple[Any, tuple[ShardRow, ...]]:
        with numbered(rank, fsdp * tp):
            model = self._loaded(which, fsdp, tp, ep)
            return model, declared(checkpoint_shards(model, str(self.checkpoints[which])))

    def _loaded(self, which: str, fsdp: int, tp: int, ep: int) -> Any:
        from transformers.distributed import DistributedConfig

        cut = DistributedConfig(fsdp_size=fsdp, tp_size=tp, ep_size=ep)
        options = {} if fsdp * tp == 1 else {"distributed_config": cut}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformers.AutoModelForCausalLM.from_pretrained(self.checkpoints[which], **options)


def memory(model: Any) -> dict[str, torch.Tensor]:
    """Return this rank's shard of each tensor."""
    return {name: getattr(one, "_local_tensor", one) for name, one in model.state_dict().items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("which", "engine"), PAIRS, ids=str)
def test_sync_fills_engine_exactly_as_its_loader_does(models: Models, which: str, engine: tuple[int, int]) -> None:
    tp, ep = engine
    made = models.ranks("engine", which, 1, tp, ep)
    true = [{name: one.clone() for name, one in memory(model).items()} for model, _ in made]
    for trainer in (one for one in TRAINERS if fits(which, *one)):
        held = models.ranks("trainer", which, *trainer)
        for model, _ in made:
            spoil(memory(model).values())
        move([rows for _, rows in held], [rows for _, rows in made])
        for (model, _), wanted in zip(made, true, strict=True):
            for name, one in memory(model).items():
                assert torch.equal(one, wanted[name]), (trainer, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", CONFIGS)
def test_recording_fills_model_exactly_as_its_loader_does(which: str, dtype: str, tmp_path: Path) -> None:
    made = make(CONFIGS[which]())
    tensors = saved(made, tmp_path)
    true = type(made).from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    live = shuffled(copy.deepcopy(true))
    before = {name: (t.data_ptr(), t.clone()) for name, t in live.state_dict().items()}
    recording = record(live, table_of(tensors), load=weights_loader(live))
    for name, t in live.state_dict().items():
        assert t.data_ptr() == before[name][0]
        assert torch.equal(t, before[name][1]), name
    assert not recording.unrecorded
    assert not recording.unfilled
    assert not recording.unused
    fill(recording, tensors, live)
    assert_same(live, true)
    again = shuffled(copy.deepcopy(live))
    weights_loader(again)(iter(tensors.items()))
    assert_same(again, true)
