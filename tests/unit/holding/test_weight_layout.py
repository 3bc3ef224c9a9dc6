from __future__ import annotations

import msgspec
import pytest
import torch

from penstock.errors import FormatError, PlanError
from penstock.holding.weight_layout import (
    TableMessage,
    WeightLayout,
    from_message,
    layout_of_tensors,
    tabulate,
    to_message,
)
from penstock.types import DType


def test_layout_is_sorted_by_name() -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(4, dtype=torch.bfloat16)}
    layout, rows = layout_of_tensors(tensors)
    again, _ = layout_of_tensors(dict(reversed(tensors.items())))
    assert layout.table.names == ("a", "b") and layout.digest == again.digest
    assert [row.numel() for row in rows] == [8, 24]
    assert rows[1].data_ptr() == tensors["b"].data_ptr()


def test_layout_lists_tied_tensors_once() -> None:
    weight = torch.ones(3)
    layout, rows = layout_of_tensors({"head": weight, "embed": weight.detach()})
    assert layout.table.names == ("embed",) and len(rows) == 1


def test_empty_tensors_are_listed_with_zero_bytes() -> None:
    layout, _ = layout_of_tensors({"a": torch.empty(0, 3), "b": torch.empty(0, 3), "c": torch.ones(2)})
    assert layout.table.nbytes.tolist() == [0, 0, 8] and layout.chunks.num_chunks == 1


def test_non_contiguous_tensor_error_names_tensor() -> None:
    with pytest.raises(PlanError) as caught:
        layout_of_tensors({"w": torch.ones(4, 4).t()[:2]})
    assert caught.value.tensor == "w"


def test_layout_round_trips_through_table_message() -> None:
    table = tabulate(("x", "w"), (DType.BF16, DType.F4), ((4, 4), (2, 6)))
    layout = WeightLayout.of(table, leaf_bytes=8, chunk_bytes=16, stem="adapter_model.fp16")
    assert layout.digest == WeightLayout.of(table, leaf_bytes=8, chunk_bytes=16).digest
    wire = msgspec.msgpack.encode(to_message(layout))
    found = from_message(msgspec.msgpack.decode(wire, type=TableMessage))
    assert found.digest == layout.digest and found.stem == layout.stem
    assert found.table.names == ("w", "x")
    assert found.chunks.nbytes.tolist() == layout.chunks.nbytes.tolist()


def test_table_from_older_release_uses_default_file_stem() -> None:
    message = to_message(WeightLayout.of(tabulate(("w",), (DType.BF16,), ((4, 4),)), stem="adapter_model"))
    fields = msgspec.to_builtins(message)
    del fields["stem"]
    assert from_message(msgspec.convert(fields, TableMessage)).stem == "model"


@pytest.mark.parametrize("stem", ["имя", "a" * 101, ".x"])
def test_invalid_file_stem_is_replaced_with_default(stem: str) -> None:
    layout = WeightLayout.of(tabulate(("w",), (DType.BF16,), ((4, 4),)), stem=stem)
    assert from_message(to_message(layout)).stem == "model"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"names": ("a", "a")}, "duplicate"),
        ({"names": ("a",)}, "different lengths"),
        ({"shapes": ((1,), (-1,))}, "negative"),
        ({"shapes": ((1,), (1 << 40, 1 << 40))}, "bytes"),
        ({"leaf_bytes": 0}, "leaves"),
        ({"chunk_bytes": 1}, "leaves"),
        ({"dtypes": (DType.F4, DType.F4)}, "whole bytes"),
        ({"stem": "../model"}, "stem"),
        ({"stem": "/etc/model"}, "stem"),
        ({"stem": ""}, "stem"),
        ({"stem": ".hidden"}, "stem"),
        ({"stem": "a\0"}, "stem"),
        ({"stem": "a" * 300}, "stem"),
    ],
)
def test_hostile_table_raises_format_error(change: dict[str, object], fault: str) -> None:
    good = TableMessage(
        leaf_bytes=8, chunk_bytes=16, names=("a", "b"), dtypes=(DType.F32, DType.F32), shapes=((1,), (1,))
    )
    with pytest.raises(FormatError, match=fault):
        from_message(msgspec.structs.replace(good, **change))
