"""A recording fills a model as its loader does, bit for bit. Recording writes nothing."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from tests.unit.sync.toy import EXPERTS, Place, Toy, checkpoint, table_of
from torch import nn

from penstock.errors import PlanError
from penstock.loader.tensor import dtype_of
from penstock.sync.recording.layout import Recording, fill
from penstock.sync.recording.requirements import record
from penstock.types import Box

PLACES = [
    Place(tp_rank=tp_rank, tp=tp, ep_rank=ep_rank, ep=ep)
    for tp, ep in itertools.product((1, 2, 4), (1, 2, 4))
    for tp_rank, ep_rank in itertools.product(range(tp), range(ep))
]


def assert_same(mine: nn.Module, true: nn.Module) -> None:
    for (name, a), (_, b) in zip(mine.state_dict().items(), true.state_dict().items(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


class Holder(nn.Module):
    """A module with one parameter, one buffer and a loader function."""

    def __init__(self, shape: tuple[int, ...], load: Callable, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(shape).to(dtype), requires_grad=False)
        self.register_buffer("b", torch.zeros(4))
        self._load = load

    def load_weights(self, weights) -> None:
        with torch.no_grad():
            self._load(self, weights)


def each_tensor(load: Callable) -> Callable:
    """Return a loader that calls `load` with every tensor."""

    def run(model: Holder, weights) -> None:
        for _, w in weights:
            load(model.p, w)

    return run


def check(
    shape: tuple[int, ...], load: Callable, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> Recording:
    """Record, fill, and compare with the loader itself. Every tensor must be recorded."""
    model, true = Holder(shape, load, dtype), Holder(shape, load, dtype)
    recording = record(model, table_of(tensors))
    assert all(not tensor.any() for tensor in model.state_dict().values())
    assert not recording.unrecorded
    true.load_weights(tensors.items())
    fill(recording, tensors, model)
    assert_same(model, true)
    return recording


W = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
V = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_recording_fills_model_like_its_loader(place: Place) -> None:
    tensors = checkpoint()
    live, mine, true = Toy(place), Toy(place), Toy(place)
    before = {name: (t.data_ptr(), t.clone()) for name, t in live.state_dict().items()}
    recording = record(live, table_of(tensors))
    for name, t in live.state_dict().items():
        assert t.data_ptr() == before[name][0]
        assert torch.equal(t, before[name][1]), name
    assert not recording.unrecorded
    assert not recording.unfilled
    others = EXPERTS - EXPERTS // place.ep
    assert len(recording.unused) == 1 + 2 * 3 * others
    true.load_weights(tensors.items())
    fill(recording, tensors, mine)
    assert_same(mine, true)
    assert mine.head.weight is mine.embed.weight


def test_recording_lists_slices_that_rank_needs() -> None:
    recording = record(Toy(Place(tp_rank=1, tp=2, ep_rank=1, ep=2)), table_of(checkpoint()))
    wants = {want.name: want.boxes for want in recording.wants()}
    assert wants["layers.0.experts.3.w2"] == (Box(start=(0, 6), stop=(8, 12)),)
    assert wants["layers.0.gate.weight"] == (Box(start=(0, 0), stop=(4, 8)),)
    assert "layers.0.experts.0.w2" not in wants
    assert list(wants) == sorted(wants)


def test_cast_by_loader_is_recorded() -> None:
    tensors = checkpoint(torch.float32)
    live, true = Toy(Place(dtype=torch.bfloat16)), Toy(Place(dtype=torch.bfloat16))
    recording = record(live, table_of(tensors))
    true.load_weights(tensors.items())
    fill(recording, tensors, live)
    assert_same(live, true)
    assert {r.steps for r in recording.records if r.target == "norm"} == {(("cast", dtype_of(torch.bfloat16)),)}


def test_cast_through_second_dtype_rounds_twice() -> None:
    recording = check((8, 6), each_tensor(lambda p, w: p.copy_(w.to(torch.bfloat16))), {"w": W})
    assert [kind for kind, _ in recording.records[0].steps] == ["cast", "cast"]
    check((8, 6), each_tensor(lambda p, w: p.copy_(w.half().float())), {"w": W})


def test_view_as_dtype_of_same_width_is_recorded() -> None:
    raw = torch.arange(48, dtype=torch.uint8).view(8, 6)
    check((8, 6), each_tensor(lambda p, w: p.copy_(w.view(torch.float8_e4m3fn))), {"w": raw}, torch.float8_e4m3fn)
    check((8, 6), each_tensor(lambda p, w: p.view(torch.uint8).copy_(w)), {"w": raw}, torch.float8_e4m3fn)


LOADERS: dict[str, tuple[tuple[int, ...], Callable]] = {
    "transposed": ((6, 8), lambda p, w: p.copy_(w.t())),
    "T": ((6, 8), lambda p, w: p.data.copy_(w.T.contiguous())),
    "every other row": ((4, 6), lambda p, w: p.copy_(w[::2])),
    "rope": ((8, 6), lambda p, w: p.copy_(w.view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6))),
    "interleaved": ((8, 6), lambda p, w: p.view(4, 2, 6).transpose(0, 1).copy_(w.view(2, 4, 6))),
    "swapped halves": ((8, 6), lambda p, w: p.copy_(torch.cat([w[4:], w[:4]]))),
    "cat then view": ((2, 4, 6), lambda p, w: p.copy_(torch.cat(w.chunk(4)[::-1]).view(2, 4, 6))),
    "stacked": ((3, 8, 6), lambda p, w: p.copy_(torch.stack([w, w, w]))),
    "unbound": ((8, 6), lambda p, w: [p[i].copy_(row) for i, row in enumerate(w.unbind(0))]),
    "flat": ((48,), lambda p, w: p.copy_(w.flatten())),
    "flat on both sides": ((8, 6), lambda p, w: p.view(-1).copy_(w.reshape(-1))),
    "rows of a flat view": ((12,), lambda p, w: p.copy_(w.view(-1)[12:24])),
    "padded": ((10, 8), lambda p, w: p.copy_(nn.functional.pad(w, (1, 1, 0, 2), value=3.0))),
    "scratch": ((8, 6), lambda p, w: p.copy_(torch.empty(8, 6).copy_(w))),
    "scratch of zeros": ((9, 6), lambda p, w: (z := torch.zeros(9, 6), z[1:].copy_(w), p.copy_(z))),
    "picked rows": ((3, 6), lambda p, w: p.copy_(w[[5, 0, 3]])),
    "index_select": ((8, 2), lambda p, w: p.copy_(w.index_select(1, torch.tensor([4, 1])))),
    "broadcast": ((3, 6), lambda p, w: p.copy_(w[2])),
    "expanded and kept": ((3, 6), lambda p, w: p.copy_(w[2].expand(3, 6).clone())),
    "set by slices": ((8, 12), lambda p, w: p.__setitem__((slice(None), slice(6, 12)), w)),
    "set by a number": ((2, 8, 6), lambda p, w: p.__setitem__(1, w)),
    "squeezed": ((8, 1, 6), lambda p, w: p.squeeze(1).copy_(w.unsqueeze(0).squeeze(0))),
    "written twice": ((8, 6), lambda p, w: (p.copy_(w), p[2:4, 1:3].copy_(w[:2, :2]))),
    "filled over": ((8, 6), lambda p, w: (p.copy_(w), p[3].zero_(), p[:, 2].fill_(5))),
    "live to live": ((16, 6), lambda p, w: (p[:8].copy_(w), p[8:].copy_(p[:8]))),
    "foreach": ((2, 8, 6), lambda p, w: torch._foreach_copy_(list(p.unbind(0)), [w, w])),
    "moved and cast": ((8, 6), lambda p, w: p.copy_(w.to("cpu", torch.float64, copy=True))),
    "one value": ((1,), lambda p, w: p.copy_(w[3, 3])),
    "doubly split": ((4, 12), lambda p, w: p.copy_(w.view(4, 2, 6).clone().view(4, 12).contiguous())),
}


@pytest.mark.parametrize("what", LOADERS)
def test_loader_that_copies_views_is_recorded(what: str) -> None:
    shape, load = LOADERS[what]
    check(shape, each_tensor(load), {"w": W})


def test_loader_in_inference_mode_is_recorded() -> None:
    def load(model: Holder, weights) -> None:
        with torch.inference_mode():
            for _, w in weights:
                model.p.copy_(w.narrow(0, 4, 4).reshape(2, 12).chunk(2)[1].view(2, 6).contiguous())

    check((2, 6), load, {"w": W})


def test_transpose_is_recorded_as_one_copy() -> None:
    (only,) = check((6, 8), each_tensor(lambda p, w: p.copy_(w.t())), {"w": W}).records
    assert (only.split, only.permutation, only.in_order) == ((8, 6), (1, 0), False)
    assert (only.source_box, only.target_box) == (Box.full((8, 6)), Box.full((6, 8)))


def test_concatenation_before_copy_is_recorded() -> None:
    def load(model: Holder, weights) -> None:
        tensors = dict(weights)
        model.p.copy_(torch.cat([tensors["q"], tensors["k"]], dim=0)[4:12])

    recording = check((8, 6), load, {"q": W, "k": V})
    assert [(r.source, r.source_box.start) for r in recording.records] == [("q", (4, 0)), ("k", (0, 0))]


def test_load_state_dict_and_assignment_are_recorded() -> None:
    for assign in (False, True):
        live, true = nn.Linear(6, 8), nn.Linear(6, 8)
        tensors = {"weight": W, "bias": V[:, 0].clone()}
        before = live.weight
        recording = record(live, table_of(tensors), load=lambda w: live.load_state_dict(dict(w), assign=assign))  # noqa: B023
        assert live.weight is before
        assert not recording.unfilled
        true.load_state_dict(tensors)
        fill(recording, tensors, live)
        assert_same(live, true)
    assert not record(nn.Linear(6, 8), table_of(tensors)).unfilled


def test_tensors_used_in_arithmetic_pass_through_loader() -> None:
    def load(model: Holder, weights) -> None:
        for name, w in weights:
            if name == "plus":
                model.b.copy_(w + 1)
            else:
                model.p.copy_(w)

    tensors = {"w": W, "plus": torch.arange(4.0), "other": torch.zeros(2)}
    model, true = Holder((8, 6), load), Holder((8, 6), load)
    table = table_of({n: tensors[n] for n in ("w", "plus")})
    recording = record(model, table)
    assert recording.unrecorded == {"plus": "add of its values"}
    assert recording.unfilled == {"b": 4}
    assert [(want.name, want.whole) for want in recording.wants()] == [("plus", True), ("w", False)]
    with pytest.raises(PlanError, match="plus: add of its values"):
        fill(recording, tensors, model)
    assert not model.p.any()
    fill(recording, tensors, model, load=model.load_weights)
    true.load_weights((n, tensors[n]) for n in ("w", "plus"))
    assert_same(model, true)


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (lambda p, w: p.copy_(w).mul_(2), "mul_"),
        (lambda p, w: p.copy_(w.mul_(2)), "mul"),
        (lambda p, w: p.add_(w), "add_"),
        (lambda p, w: p.copy_(torch.where(w > 0, w, -w)), "where"),
        (lambda p, w: p.copy_(w.sum(0)), "sum"),
        (lambda p, w: p.view(-1)[1:15].copy_(w.view(-1)[1:15]), "steps unevenly"),
        (lambda p, w: torch.add(w, 1, out=p), "add"),
        (lambda p, w: torch.zeros(4, dtype=torch.int32).copy_(w[0, :4]), "not a parameter"),
        (lambda p, w: p.view(torch.int16).copy_(w.view(torch.int16)), "viewed as"),
        (lambda p, w: p.index_copy_(0, torch.tensor([1]), w[:1]), "index_copy"),
        (lambda p, w: p[0].copy_(w.diagonal()), "steps unevenly"),
        (lambda p, w: p.copy_(w.sort(0).values), "sort"),
    ],
)
def test_report_lists_unrecordable_operation(load: Callable, why: str) -> None:
    model = Holder((8, 6), each_tensor(load))
    recording = record(model, table_of({"w": W}))
    assert list(recording.unrecorded) == ["w"]
    assert why in recording.unrecorded["w"]
    assert not model.p.any()


@pytest.mark.parametrize(
    "reads",
    [
        lambda w: w.item() if w.numel() == 1 else None,
        lambda w: bool((w == 1).all()) if w.numel() == 1 else None,
        lambda w: w.tolist() if w.numel() == 1 else None,
        lambda w: w.numpy() if w.numel() == 1 else None,
        lambda w: torch.equal(w, torch.ones(1)) if w.numel() == 1 else None,
        lambda w: w.nonzero() if w.numel() == 1 else None,
    ],
)
def test_tensors_read_by_value_are_not_recorded(reads: Callable) -> None:
    def load(model: Holder, weights) -> None:
        for _, w in weights:
            if w.numel() == 1:
                model.b.fill_(2.0 if reads(w) else 1.0)
            else:
                model.p.copy_(w)

    tensors = {"s": torch.ones(1), "w": W, "t": torch.ones(1)}
    recording = record(Holder((8, 6), load), table_of(tensors))
    assert set(recording.unrecorded) == {"s", "t"}
    assert all("read" in why for why in recording.unrecorded.values())
    assert [r.source for r in recording.records] == ["w"]


def test_loader_branching_on_parameter_values_raises() -> None:
    def load(model: Holder, weights) -> None:
        for _, w in weights:
            model.p.copy_(w)
            model.p.fill_(1)
            model.b.fill_(model.p.sum().item())

    with pytest.raises(PlanError, match="not from the checkpoint"):
        record(Holder((8, 6), load), table_of({"w": W}))


def test_failing_loader_raises_plan_error_with_cause() -> None:
    model = Holder((8, 5), each_tensor(lambda p, w: p.copy_(w)))
    with pytest.raises(PlanError, match="the loader raised KeyError: 'w' while it was recorded") as caught:
        record(model, table_of({"w": W}), load=lambda weights: {}[next(weights)[0]])
    assert isinstance(caught.value.__cause__, KeyError)
    assert (caught.value.tensor, caught.value.mutated) == ("w", False)
    assert not model.p.any()


def test_mismatched_shapes_raise_loader_error() -> None:
    with pytest.raises(PlanError, match=r"the loader raised \w*Error: "):
        record(Holder((8, 5), each_tensor(lambda p, w: p.copy_(w))), table_of({"w": W}))


def test_unused_tensors_and_unfilled_parameters_are_reported() -> None:
    def load(model: Holder, weights) -> None:
        for name, w in weights:
            if name == "w":
                model.p[:4].copy_(w[:4])

    recording = record(Holder((8, 6), load), table_of({"w": W, "x": V}))
    assert recording.unused == ("x",)
    assert recording.unfilled == {"p": 24, "b": 4}


def test_meta_model_records_like_allocated_model() -> None:
    tensors = checkpoint()
    place = Place(tp_rank=1, tp=2)
    with torch.device("meta"):
        empty = Toy(place)
    assert record(empty, table_of(tensors)).records == record(Toy(place), table_of(tensors)).records


def test_parameters_in_shared_arena_are_recorded_separately() -> None:
    tensors = checkpoint()
    live, true = Toy(Place()), Toy(Place())
    arena = torch.full((sum(p.numel() for p in live.parameters()),), 7.0)
    at = 0
    for p in live.parameters():
        p.data = arena[at : at + p.numel()].view(p.shape)
        at += p.numel()
    recording = record(live, table_of(tensors))
    assert (arena == 7).all()
    true.load_weights(tensors.items())
    fill(recording, tensors, live)
    assert_same(live, true)


def test_transposed_parameter_memory_is_filled() -> None:
    live, true = Holder((6, 8), each_tensor(lambda p, w: p[:, 2:].copy_(w[:6]))), Holder((6, 8), lambda m, w: None)
    live.p.data = torch.zeros(8, 6).t()
    recording = record(live, table_of({"w": W}))
    fill(recording, {"w": W}, live)
    true.p[:, 2:].copy_(W[:6])
    assert_same(live, true)


def test_loader_operators_in_other_threads_are_recorded() -> None:
    def load(model: Holder, weights) -> None:
        tensors = dict(weights)
        cast = {}
        thread = threading.Thread(target=lambda: cast.update(w=tensors["w"][...].to(torch.float64)))
        thread.start()
        thread.join()
        model.p.copy_(cast["w"])

    check((8, 6), load, {"w": W})


def test_overwritten_tensor_leaves_no_record() -> None:
    recording = check((8, 6), each_tensor(lambda p, w: p.copy_(w)), {"first": W, "last": V})
    assert recording.unused == ("first",)


def test_tensors_with_dtypes_missing_in_torch_are_unrecorded() -> None:
    from penstock.holding.weight_layout import tabulate
    from penstock.types import DType

    table = tabulate(["six", "w"], [DType.F6_E2M3, DType.F32], [(4,), (8, 6)])
    recording = record(Holder((8, 6), each_tensor(lambda p, w: p.copy_(w))), table)
    assert list(recording.unrecorded) == ["six"]
    assert [r.source for r in recording.records] == ["w"]


def test_memory_replaced_by_loader_is_restored() -> None:
    model = Holder((8, 6), lambda model, weights: [setattr(model.p, "data", w) for _, w in weights])
    before, place = model.p, model.p.data_ptr()
    recording = record(model, table_of({"w": W}))
    assert recording.unfilled["p"] == 48
    assert recording.unused == ("w",)
    assert (model.p is before, model.p.data_ptr(), model.p.any().item()) == (True, place, False)


def test_loader_with_compiled_function_is_recorded() -> None:
    """The recorder sees each operator, even if the code was compiled before."""
    compiled = torch.compile(lambda p, w: p.copy_(w.t()), backend="eager")
    weights = {"w": torch.randn(3, 5)}
    compiled(torch.zeros(5, 3), weights["w"])
    check((5, 3), each_tensor(compiled), weights)


def test_recording_does_not_import_torch_dynamo() -> None:
    """The import would add seconds to the first update of a process."""
    code = """
import sys, torch
from penstock.sync.recording.requirements import record
from tests.unit.sync.toy import table_of
model = torch.nn.Linear(3, 5)
recording = record(model, table_of(dict(model.state_dict())))
assert not recording.unrecorded, recording.unrecorded
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr
