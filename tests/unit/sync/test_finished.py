"""Parameters of one number of ranks, made of those of another, are bit for bit what the loader makes, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from tests.unit.sync.toy import Place, Toy, checkpoint, table_of
from torch import nn

from penstock.errors import FormatError, PenstockError, PlanError
from penstock.hub.messages import HoldingState, Identity
from penstock.peer.local_weights import layout_of_tensors
from penstock.sync.finished import Filling, KeptRank, KeptSet, kept_layout, kept_sets
from penstock.sync.recording.requirements import record
from penstock.types import TensorTable


def places(tp: int, ep: int, dtype: torch.dtype = torch.float32) -> list[Place]:
    return [Place(tp_rank=i, tp=tp, ep_rank=j, ep=ep, dtype=dtype) for i, j in itertools.product(range(tp), range(ep))]


def handed_over(module: nn.Module, table: TensorTable) -> KeptRank:
    """What a keeper has of it: the bytes in memory of its own, one tensor for those that are tied."""
    layout = kept_layout(module, record(module, table), table)
    weights, _ = layout_of_tensors(module.state_dict())
    return KeptRank(tensors={name: module.state_dict()[name].clone() for name in weights.table.names}, layout=layout)


def loaded(place: Place, tensors: dict[str, torch.Tensor]) -> Toy:
    toy = Toy(place)
    toy.load_weights(tensors.items())
    return toy


def same(mine: nn.Module, true: nn.Module) -> None:
    for (name, a), (_, b) in zip(mine.state_dict().items(), true.state_dict().items(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


def filled(module: nn.Module, kept: Sequence[KeptRank], table: TensorTable) -> Filling:
    filling = Filling(module, record(module, table), table, kept)
    filling.run()
    return filling


ONE, TWO, FOUR, EXPERTS, GRID = (1, 1), (2, 1), (4, 1), (1, 2), (2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "cast"])
@pytest.mark.parametrize(
    ("of", "to"),
    [(ONE, TWO), (TWO, ONE), (TWO, FOUR), (FOUR, TWO), (GRID, ONE), (EXPERTS, FOUR), (FOUR, GRID)],
    ids=str,
)
def test_every_rank_of_every_size(of: tuple[int, int], to: tuple[int, int], dtype: torch.dtype) -> None:
    tensors = checkpoint()
    table = table_of(tensors)
    kept = [handed_over(loaded(place, tensors), table) for place in places(*of, dtype)]
    for place in places(*to, dtype):
        mine = Toy(place)
        addresses = [tensor.data_ptr() for tensor in mine.state_dict().values()]
        filling = filled(mine, kept, table)
        same(mine, loaded(place, tensors))
        assert [tensor.data_ptr() for tensor in mine.state_dict().values()] == addresses
        assert mine.head.weight is mine.embed.weight
        # No element is copied twice, though replicated ones are kept by several ranks.
        assert 0 < filling.nbytes <= sum(tensor.nbytes for tensor in mine.parameters()) + 4


def test_equal_parameters_have_equal_layouts() -> None:
    tensors = checkpoint()
    table = table_of(tensors)
    first, again = (handed_over(loaded(Place(), tensors), table) for _ in range(2))
    assert first.layout == again.layout


def test_a_rank_that_is_missing_leaves_a_gap() -> None:
    tensors = checkpoint()
    table = table_of(tensors)
    kept = [handed_over(loaded(place, tensors), table) for place in places(2, 1)]
    mine = Toy(Place())
    before = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
    with pytest.raises(PlanError, match=r"held by no rank(.|\n)*layers\.0\.o\.weight"):
        Filling(mine, record(mine, table), table, kept[:1])
    assert all(torch.equal(mine.state_dict()[name], tensor) for name, tensor in before.items())


def test_values_of_other_casts_are_not_exchanged() -> None:
    tensors = checkpoint()
    table = table_of(tensors)
    kept = [handed_over(loaded(place, tensors), table) for place in places(2, 1, torch.bfloat16)]
    mine = Toy(Place())
    with pytest.raises(PlanError, match="BF16"):
        Filling(mine, record(mine, table), table, kept)


class Layer(nn.Module):
    """One parameter, a buffer that the loader does not touch, and a loader given as a function."""

    def __init__(self, load: Callable[[Layer, torch.Tensor], object], shape: tuple[int, ...] = (4, 6)) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.register_buffer("scale", torch.ones(3))
        self._load = load

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            self._load(self, weight)


W = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
TABLE = table_of({"w": W})


def layer(load: Callable[[Layer, torch.Tensor], object], shape: tuple[int, ...] = (4, 6)) -> Layer:
    made = Layer(load, shape)
    made.load_weights([("w", W)])
    return made


def upper(model: Layer, weight: torch.Tensor) -> object:
    return model.p.copy_(weight[:2])


def whole(model: Layer, weight: torch.Tensor) -> object:
    return model.p.copy_(weight)


def test_a_loader_that_computes_has_no_layout() -> None:
    with pytest.raises(PlanError, match="does more than copy 1 tensors: w: "):
        handed_over(layer(lambda model, weight: model.p.copy_(weight * 2)), TABLE)


def test_a_loader_that_computes_takes_nothing() -> None:
    kept = [handed_over(layer(whole), TABLE)]
    mine = Layer(lambda model, weight: model.p.copy_(weight + 1))
    with pytest.raises(PlanError, match="does more than copy"):
        filled(mine, kept, TABLE)
    assert not mine.p.any()


def test_one_tensor_in_two_dtypes_is_refused() -> None:
    def twice(model: Layer, weight: torch.Tensor) -> None:
        model.p[:2].copy_(weight[:2])
        model.p[2:].copy_(weight[2:].bfloat16())

    with pytest.raises(PlanError, match="two ways"):
        handed_over(layer(twice), TABLE)


def test_a_buffer_that_no_loader_fills_is_the_same_on_both_sides() -> None:
    kept = handed_over(layer(upper, (2, 6)), TABLE)
    mine = Layer(upper, (2, 6))
    filled(mine, [kept], TABLE)
    assert torch.equal(mine.p, W[:2])
    mine.scale[1] = 2
    with pytest.raises(PlanError, match="scale: other values in this module"):
        filled(mine, [kept], TABLE)


def test_a_parameter_that_is_filled_in_part_is_a_gap() -> None:
    def part(model: Layer, weight: torch.Tensor) -> object:
        return model.p[1:].copy_(weight[1:])

    kept = handed_over(layer(part), TABLE)
    with pytest.raises(PlanError, match=r"p: 6 of 24 elements"):
        filled(Layer(part), [kept], TABLE)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda rank: b"", PlanError),
        (lambda rank: rank.layout[:-3], FormatError),
        (lambda rank: handed_over(layer(upper, (2, 6)), TABLE).layout, PlanError),
    ],
    ids=["none", "cut off", "of another rank"],
)
def test_a_layout_that_is_not_of_these_parameters(
    change: Callable[[KeptRank], bytes], error: type[PenstockError]
) -> None:
    kept = handed_over(layer(whole), TABLE)
    mine = Layer(whole)
    with pytest.raises(error):
        filled(mine, [KeptRank(tensors=kept.tensors, layout=change(kept))], TABLE)
    assert not mine.p.any()


def holding(parallel: dict[str, str]) -> HoldingState:
    return HoldingState(key="0" * 32, identity=Identity(model="m", parallel=parallel), num_chunks=1, nbytes=1)


def test_sets_of_which_all_ranks_are_kept() -> None:
    one, two, four = KeptSet(1, "a"), KeptSet(2, "b"), KeptSet(4, "c")
    parallels = [one.coordinates(0), two.coordinates(1), two.coordinates(0), two.coordinates(0)]
    parallels += [four.coordinates(0), four.coordinates(3), {}, {"rank": "first"}, {"tp": "0/8"}]
    holdings = [holding(parallel) for parallel in parallels]
    lacking = ["of 4 ranks, rank 1, 2 is not kept on this host"]
    assert kept_sets(holdings, one) == ([two], lacking)
    assert kept_sets(holdings, two) == ([one], lacking)
    # Of the same size in another configuration.
    assert kept_sets(holdings, KeptSet(2, "d")) == ([one, two], lacking)
    # Ranks of two engines are no set.
    mixed = [holding(KeptSet(2, "b").coordinates(0)), holding(KeptSet(2, "d").coordinates(1))]
    complete, lacking = kept_sets(mixed, one)
    assert not complete and len(lacking) == 2
    assert kept_sets([], one) == ([], [])
