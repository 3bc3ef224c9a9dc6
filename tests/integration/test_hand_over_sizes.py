"""Parameters that the ranks of one engine handed over, used by an engine of another size, through a real keeper."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from tests.unit.sync.toy import Place, Toy, checkpoint, table_of

import penstock as ps
from penstock.errors import IntegrityError, NotFound, PeerLost, PlanError, SourceBusy, StaleDescriptor
from penstock.keeper.attach import LAYOUT, kept_here
from penstock.keeper.hand_over import hand_over
from penstock.sync.finished import KeptSet, ReshardReport, kept_layout, kept_sets, reshard
from penstock.sync.recording.requirements import record

pytestmark = pytest.mark.usefixtures("own_runtime")
TENSORS = checkpoint()
TABLE = table_of(TENSORS)
TWO = KeptSet(2, "of two")
DAMAGED = IntegrityError, NotFound, PeerLost, SourceBusy, StaleDescriptor
"""By who finds it first: the reader or the keeper, which looks at its memory with each heartbeat."""


def loaded(rank: int, size: int) -> Toy:
    toy = Toy(Place(tp_rank=rank, tp=size))
    toy.load_weights(TENSORS.items())
    return toy


def give(rank: int, size: int, model: str = "finished") -> None:
    toy = loaded(rank, size)
    layout = kept_layout(toy, record(toy, TABLE), TABLE)
    hand_over(toy, model, parallel=KeptSet(size, "of two").coordinates(rank), layout=layout).close()


def filled(toy: Toy, *, verify: bool = True) -> ReshardReport:
    return reshard(toy, record(toy, TABLE), TABLE, "finished", TWO, verify=verify)


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[ps.Keeper]:
    # After damage the keeper looks for another source, for so long.
    monkeypatch.setenv("PENSTOCK_STALL_S", "6")
    with ps.Keeper(accept=True) as keeper:
        yield keeper
        gc.collect()


def sets() -> tuple[list[KeptSet], list[str]]:
    return kept_sets(kept_here("finished", device="cpu"), KeptSet(1, "of one"))


def test_one_rank_of_two(keeper: ps.Keeper) -> None:
    assert sets() == ([], [])
    give(0, 2)
    assert sets() == ([], ["of 2 ranks, rank 1 is not kept on this host"])
    give(1, 2)
    assert sets() == ([TWO], [])
    assert len(keeper.models()) == 2
    for verify in (True, False):
        toy, true = Toy(Place()), loaded(0, 1)
        report = filled(toy, verify=verify)
        assert all(torch.equal(toy.state_dict()[name], tensor) for name, tensor in true.state_dict().items())
        assert report.num_ranks == 2 and report.verified is verify
        assert ("not verified here" in str(report)) is not verify
        assert report.nbytes <= sum(tensor.nbytes for tensor in toy.state_dict().values())
    # No lease is left: what was kept can be dropped at once, all ranks by their name.
    keeper.drop("finished", drain_s=2)
    assert keeper.models() == []


def test_a_rank_is_found_by_its_coordinates(keeper: ps.Keeper) -> None:
    give(0, 2)
    give(1, 2)
    with pytest.raises(ps.ConfigError, match="parallel="):
        ps.attach("finished", timeout_s=0)
    with pytest.raises(NotFound):
        ps.attach("finished", parallel=KeptSet(2, "another").coordinates(0), timeout_s=0)
    toy, true = Toy(Place(tp_rank=1, tp=2)), loaded(1, 2)
    with ps.attach("finished", parallel=TWO.coordinates(1)) as attached:
        assert attached.layout and LAYOUT not in attached
        attached.attach_into(toy)
        assert all(torch.equal(toy.state_dict()[name], tensor) for name, tensor in true.state_dict().items())
        del toy


def test_a_rank_that_is_dropped_meanwhile(keeper: ps.Keeper) -> None:
    give(0, 2)
    with pytest.raises(NotFound):
        filled(Toy(Place()))


def test_a_damaged_byte(keeper: ps.Keeper) -> None:
    give(0, 2)
    give(1, 2)
    (weights,) = [w for w in keeper.member.weights if w.identity.parallel["rank"] == "1/2"]
    weights.rows[3][1] ^= 1
    with pytest.raises(DAMAGED):
        filled(Toy(Place()))


def test_a_damaged_layout(keeper: ps.Keeper) -> None:
    give(0, 2)
    give(1, 2)
    (weights,) = [w for w in keeper.member.weights if w.identity.parallel["rank"] == "0/2"]
    weights.rows[weights.layout.table.names.index(LAYOUT)][7] ^= 1
    with pytest.raises(DAMAGED):
        filled(Toy(Place()))


def test_parameters_without_a_layout(keeper: ps.Keeper) -> None:
    for rank in range(2):
        hand_over(loaded(rank, 2), "finished", parallel=TWO.coordinates(rank)).close()
    with pytest.raises(PlanError, match="rank 0 of 2: where the checkpoint lies in it was not recorded"):
        filled(Toy(Place()))


def test_two_ranks_with_equal_bytes_are_both_kept(keeper: ps.Keeper) -> None:
    for rank in range(2):
        hand_over(loaded(0, 1), "finished", parallel=TWO.coordinates(rank)).close()
    assert len({model.revision for model in keeper.models()}) == 1
    assert sets() == ([TWO], [])
