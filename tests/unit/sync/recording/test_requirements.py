"""A receiver gets each required element once, and `install` and `finish` have the effect of its loader."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.unit.sync.moved import assert_same, move, spoil
from tests.unit.sync.recording.test_record import LOADERS, Holder, V, W, each_tensor
from tests.unit.sync.toy import Place, Toy, checkpoint, table_of

from penstock.errors import PlanError
from penstock.sync.recording.requirements import Requirements, record, wanted
from penstock.sync.shards import declared


def fill_by_rows(shape: tuple[int, ...], load: Callable, tensors: dict[str, torch.Tensor]) -> Requirements:
    """Fill one model from rows and another with the loader, and compare the models."""
    model, true = Holder(shape, load), Holder(shape, load)
    table = table_of(tensors)
    want = wanted(model, record(model, table), table)
    spoil([*want._whole.values(), *(row.tensor for row in want.rows[want.num_live :])])
    move([declared(tensors)], [want.rows])
    want.install()
    want.finish()
    true.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    assert_same(model, true)
    return want


@pytest.mark.parametrize("what", LOADERS)
def test_loader_that_copies_views_receives_all_bytes(what: str) -> None:
    shape, load = LOADERS[what]
    fill_by_rows(shape, each_tensor(load), {"w": W})


def test_contiguous_tensor_allocates_no_scratch() -> None:
    def load(model: Holder, weights) -> None:
        tensors = dict(weights)
        model.p[:8].copy_(tensors["q"])
        model.p[8:, :3].copy_(tensors["k"][:, 3:])

    want = fill_by_rows((16, 6), load, {"q": W, "k": V})
    assert (want.scratch_bytes, want.num_live, want.names) == (0, 2, ("q", "k"))
    assert not want.why()


def test_elements_used_twice_are_received_once() -> None:
    def load(model: Holder, weights) -> None:
        for _, w in weights:
            model.p[:8].copy_(w)
            model.p[8:16].copy_(w)
            model.p[16:20].copy_(w[2:6])
            model.p[20:26, :3].copy_(w[:6, 3:])

    want = fill_by_rows((26, 6), load, {"w": W})
    assert sum(row.tensor.numel() for row in want.rows) == W.numel()
    assert want.scratch_bytes == 0


def test_overlapping_slices_are_received_once() -> None:
    def load(model: Holder, weights) -> None:
        for _, w in weights:
            model.p[:5].copy_(w[:5])
            model.p[5:10].copy_(w[3:])
            model.p[10:14].copy_(w[2:6])
            model.p[14:20, :4].copy_(w[1:5, :].t())

    want = fill_by_rows((20, 6), load, {"w": W})
    assert sum(row.tensor.numel() for row in want.rows) == W.numel()


def test_cast_and_transpose_use_scratch() -> None:
    model = Holder((6, 8), each_tensor(lambda p, w: p.copy_(w.t())), torch.bfloat16)
    table = table_of({"w": W})
    want = wanted(model, record(model, table), table)
    assert (want.num_live, len(want.rows)) == (0, 1)
    assert want.scratch_bytes >= W.nbytes
    move([declared({"w": W})], [want.rows])
    assert not model.p.any()
    want.install(["w"])
    assert torch.equal(model.p, W.t().to(torch.bfloat16))


def test_tensor_viewed_as_another_dtype_needs_no_scratch() -> None:
    raw = torch.arange(48, dtype=torch.uint8).view(8, 6)
    model = Holder((8, 6), each_tensor(lambda p, w: p.copy_(w.view(torch.float8_e4m3fn))), torch.float8_e4m3fn)
    table = table_of({"w": raw})
    want = wanted(model, record(model, table), table)
    assert want.scratch_bytes == 0
    move([declared({"w": raw})], [want.rows])
    assert torch.equal(model.p.view(torch.uint8), raw)


def test_transposed_parameter_memory_uses_scratch() -> None:
    model = Holder((6, 8), each_tensor(lambda p, w: p.copy_(w.t())))
    model.p.data = torch.zeros(8, 6).t()
    table = table_of({"w": W})
    want = wanted(model, record(model, table), table)
    move([declared({"w": W})], [want.rows])
    want.install()
    assert torch.equal(model.p, W.t())


def double(model: Holder, weights) -> None:
    """Load one tensor by recorded copies and another by arithmetic, which writes to the same parameter first."""
    tensors = dict(weights)
    if "v" in tensors:
        model.p.copy_(tensors["v"] * 2)
        model.b.fill_(3)
    if "w" in tensors:
        model.p[:4].copy_(tensors["w"][:4])


def test_unrecorded_tensor_passes_through_loader_with_warning() -> None:
    with pytest.warns(RuntimeWarning, match=r"1 tensors are received whole, .* pass through the loader: v: mul"):
        want = fill_by_rows((8, 6), double, {"v": V, "w": W})
    assert dict(want.unrecorded) == {"v": "mul of its values"}
    assert want.why()
    assert want.num_live == 0  # the loader itself writes to the only parameter


def test_in_place_loader_preserves_received_bytes() -> None:
    with pytest.warns(RuntimeWarning, match="w: mul_"):
        want = fill_by_rows((8, 6), each_tensor(lambda p, w: p.copy_(w.mul_(2))), {"w": W.clone()})
    (row,) = want.rows
    assert torch.equal(row.tensor, W)


def test_partially_recorded_tensor_is_received_once() -> None:
    def load(model: Holder, weights) -> None:
        for _, w in weights:
            model.p[:8].copy_(w)
            model.p[8:].copy_(w + 1)

    with pytest.warns(RuntimeWarning, match="1 tensors"):
        want = fill_by_rows((16, 6), load, {"w": W})
    assert [row.tensor.numel() for row in want.rows] == [W.numel()]


def test_loader_replacing_parameter_memory_raises_plan_error() -> None:
    def load(model: Holder, weights) -> None:
        for _, w in weights:
            model.p = torch.nn.Parameter(w * 2, requires_grad=False)

    model = Holder((8, 6), load)
    table = table_of({"w": W})
    with pytest.warns(RuntimeWarning):
        want = wanted(model, record(model, table), table)
    move([declared({"w": W})], [want.rows])
    want.install()
    with pytest.raises(PlanError, match="replaced the memory") as caught:
        want.finish()
    assert (caught.value.mutated, caught.value.tensor) == (True, "p")


def test_staged_rows_leave_model_unchanged_until_flip() -> None:
    tensors = checkpoint()
    table = table_of(tensors)
    model, true = Toy(Place(tp_rank=1, tp=2)), Toy(Place(tp_rank=1, tp=2))
    model.load_weights(checkpoint(seed=1).items())
    true.load_weights(tensors.items())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    want = wanted(model, record(model, table), table)
    live = [row.tensor.clone() for row in want.rows[: want.num_live]]
    staging_copy = [row.tensor for row in want.rows]
    shadows = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in live]
    # The live rows arrive in shadows of their memory.
    rows = [
        type(row)(name=row.name, tensor=shadows[i] if i < want.num_live else row.tensor, form=row.form)
        for i, row in enumerate(want.rows)
    ]
    move([declared(tensors)], [rows])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for tensor, arrived in zip(staging_copy, shadows, strict=False):
        tensor.copy_(arrived)
    want.install()
    want.finish()
    assert_same(model, true)


def test_receiver_serves_rows_of_its_version() -> None:
    tensors = checkpoint()
    table = table_of(tensors)
    first, second = Toy(Place(dtype=torch.bfloat16)), Toy(Place(dtype=torch.bfloat16))
    wants = [wanted(model, record(model, table), table) for model in (first, second)]
    move([declared(tensors)], [wants[0].rows])
    wants[0].install()
    wants[0].finish()
    move([wants[0].rows], [wants[1].rows])
    wants[1].install()
    wants[1].finish()
    assert_same(second, first)


def test_mismatched_table_and_meta_model_are_rejected() -> None:
    model = Holder((8, 6), each_tensor(lambda p, w: p.copy_(w)))
    recording = record(model, table_of({"w": W}))
    with pytest.raises(PlanError, match="different checkpoint"):
        wanted(model, recording, table_of({"w": W.double()}))
    with torch.device("meta"):
        empty = Holder((8, 6), each_tensor(lambda p, w: p.copy_(w)))
    with pytest.raises(PlanError, match="meta device"):
        wanted(empty, recording, table_of({"w": W}))


def test_requested_tensors_retain_their_format_tag() -> None:
    model = Holder((8, 6), each_tensor(lambda p, w: p.copy_(w)))
    table = table_of({"w": W})
    (row,) = wanted(model, record(model, table), table, tags={"w": "fp8-block128"}).rows
    assert row.form.tag == "fp8-block128"
