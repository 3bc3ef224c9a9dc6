"""A model that fuses, transposes and merges tensors serves the checkpoint's tensors from its own memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.unit.sync.moved import assert_same, move, spoil
from tests.unit.sync.recording.test_record import LOADERS, Holder, W, each_tensor
from tests.unit.sync.toy import Place, Toy, checkpoint, table_of

from penstock.errors import PlanError
from penstock.memory.local_shards import local_runs
from penstock.sync.recording.layout import checkpoint_shards
from penstock.sync.recording.requirements import record, wanted
from penstock.sync.shards import Shard, declared


def cuts_of(model: torch.nn.Module, count: int, dim: int) -> list[dict[str, Shard]]:
    """Shard a model's parameters over `count` ranks with separate memory."""
    ranks = []
    for rank in range(count):
        shards = {}
        for name, whole in model.state_dict().items():
            cut = min(dim, whole.ndim - 1)
            ((start, stop),) = local_runs(whole.shape[cut], [(count, rank, 1)]) or [(0, 0)]
            part = whole.narrow(cut, start, stop - start).clone()
            offset = tuple(start if d == cut else 0 for d in range(whole.ndim))
            shards[name] = Shard(tensor=part, global_shape=tuple(whole.shape), offset=offset)
        ranks.append(shards)
    return ranks


@pytest.mark.parametrize(("count", "dim"), [(1, 0), (2, 0), (3, 0), (5, 0), (2, 1), (3, 1), (2, 2)])
def test_reversed_recording_yields_checkpoint_tensors(count: int, dim: int) -> None:
    tensors = checkpoint()
    table = table_of(tensors)
    model = Toy(Place())
    model.load_weights(tensors.items())
    with torch.device("meta"):
        recording = record(Toy(Place()), table)
    ranks = [declared(checkpoint_shards(shards, recording)) for shards in cuts_of(model, count, dim)]
    mine = {row.name: torch.zeros(row.form.shape) for rows in ranks for row in rows}
    assert set(mine) == set(tensors) - {"vision.proj", "none.weight"}
    move(ranks, [declared(mine)])
    for name, tensor in mine.items():
        assert torch.equal(tensor, tensors[name]), name


def test_engine_fills_engine_with_different_parallelism() -> None:
    tensors = checkpoint()
    table = table_of(tensors)
    holders, receivers = [], []
    for rank in range(2):
        place = Place(tp_rank=rank, tp=2)
        model = Toy(place)
        model.load_weights(tensors.items())
        holders.append(declared(checkpoint_shards(model, record(model, table))))
    for t, e in itertools.product(range(4), range(2)):
        model = Toy(Place(tp_rank=t, tp=4, ep_rank=e, ep=2))
        receivers.append((model, wanted(model, record(model, table), table)))
        spoil(model.state_dict().values())
    move(holders, [want.rows for _, want in receivers])
    for model, want in receivers:
        want.install()
        want.finish()
        true = Toy(model.place)
        true.load_weights(tensors.items())
        assert_same(model, true)


@pytest.mark.parametrize("what", LOADERS)
def test_recording_with_view_copies_is_reversible(what: str) -> None:
    shape, load = LOADERS[what]
    model = Holder(shape, each_tensor(load))
    recording = record(model, table_of({"w": W}))
    model.load_weights([("w", W)])
    for row in declared(checkpoint_shards(model, recording)):
        box = tuple(slice(a, b) for a, b in zip(row.form.box.start, row.form.box.stop, strict=True))
        assert torch.equal(row.tensor, W[box])
        assert row.tensor.untyped_storage().data_ptr() == model.p.untyped_storage().data_ptr()
    counted = torch.zeros(W.shape)
    for row in declared(checkpoint_shards(model, recording)):
        counted[tuple(slice(a, b) for a, b in zip(row.form.box.start, row.form.box.stop, strict=True))] += 1
    assert counted.sum() == sum(r.source_box.num_elements for r in recording.records)


def test_unrecorded_or_reinterpreted_tensor_raises() -> None:
    model = Holder((8, 6), each_tensor(lambda p, w: p.copy_(w * 2)))
    with pytest.raises(PlanError, match="w: mul"):
        checkpoint_shards(model, record(model, table_of({"w": W})))
    model = Holder((8, 6), each_tensor(lambda p, w: p.copy_(w.view(torch.float8_e4m3fn))), torch.float8_e4m3fn)
    with pytest.raises(PlanError, match="as another dtype"):
        checkpoint_shards(model, record(model, table_of({"w": torch.zeros(8, 6, dtype=torch.uint8)})))
