"""Operations: recipes of copies and renames, and chains of them that stay row by row where they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError, PlanError
from penstock.types import DType, TensorTable
from penstock_convert.operations.merge import Linear
from penstock_convert.operations.operation import Chain, CopyOperation, Rename, specs_of, whole
from penstock_convert.operations.spec import operation_of
from penstock_convert.plan.tasks import Recipe, Spec, TaskOutput, lay_out


def table(**shapes: tuple[int, ...]) -> TensorTable:
    specs = [Spec(name=name, dtype=DType.F32, shape=shape) for name, shape in shapes.items()]
    return lay_out(specs, shard_bytes=1 << 40).table


@dataclass(frozen=True)
class Doubled:
    """Twice each element, on multiples of so many rows."""

    align: int
    name = "doubled"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        return [
            Recipe(outputs=(TaskOutput(spec=spec),), inputs=(whole(0, spec),), num_rows=spec.shape[0], align=self.align)
            for spec in specs_of(sources[0])
        ]

    def run(self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        return [tensor * 2 for tensor in inputs if tensor is not None]

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config, "doubled": config.get("doubled", 0) + 1}


@dataclass(frozen=True)
class Summed:
    """All tensors in one, whole."""

    name = "summed"

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        specs = specs_of(sources[0])
        out = replace(specs[0], name="sum")
        inputs = tuple(whole(0, spec) for spec in specs)
        return [Recipe(outputs=(TaskOutput(spec=out),), inputs=inputs, num_rows=out.shape[0], align=1)]

    def run(self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        return [torch.stack([tensor for tensor in inputs if tensor is not None]).sum(0)]

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return config


def test_copy_preserves_names_and_splits_rows():
    recipes = CopyOperation().recipes([table(a=(4, 2), b=())])
    assert {recipe.outputs[0].spec.name: recipe.align for recipe in recipes} == {"a": 1, "b": 0}


def test_packed_rows_ending_midbyte_are_not_split():
    odd = lay_out([Spec(name="a", dtype=DType.F4, shape=(4, 3))], shard_bytes=1 << 40).table
    assert CopyOperation().recipes([odd])[0].align == 0


def test_rename_applies_first_matching_rule():
    rename = Rename(((r"^old\.", "new."), (r"drop", ""), (r"old", "never")))
    recipes = rename.recipes([table(**{"old.a": (1,), "drop": (1,), "kept": (1,)})])
    assert [recipe.outputs[0].spec.name for recipe in recipes] == ["new.a", "kept"]


def test_rename_to_duplicate_name_is_rejected():
    recipes = Rename((("[ab]", "c"),)).recipes([table(a=(1,), b=(1,))])
    with pytest.raises(PlanError, match="same name"):
        lay_out([recipe.outputs[0].spec for recipe in recipes], shard_bytes=1000)


def test_chained_row_operations_combine_row_alignment():
    chain = Chain(Doubled(4), Chain(Rename((("a", "b"),)), Doubled(6)))
    recipes = chain.recipes([table(a=(24, 3), c=(12, 1))])
    assert [recipe.align for recipe in recipes] == [12, 12]
    data = torch.arange(72, dtype=torch.float32).reshape(24, 3)
    made = chain.run(recipes[0], 12, 24, [data[12:24]])
    assert torch.equal(made[0], data[12:24] * 4)
    assert chain.config({"x": 1}) == {"x": 1, "doubled": 2}


def test_chained_merge_slices_all_inputs_alike():
    chain = Chain(Doubled(2), Summed())
    recipes = chain.recipes([table(a=(4, 3), b=(4, 3))])
    assert [recipe.align for recipe in recipes] == [2]
    a, b = torch.rand(4, 3), torch.rand(4, 3)
    assert torch.equal(chain.run(recipes[0], 2, 4, [a[2:], b[2:]])[0], a[2:] * 2 + b[2:] * 2)
    whole = Chain(Doubled(0), Summed())
    recipes = whole.recipes([table(a=(4, 3), b=(4, 3))])
    assert len(recipes) == 1 and recipes[0].align == 0
    assert torch.equal(whole.run(recipes[0], 0, 1, [a, b])[0], a * 2 + b * 2)
    assert recipes[0].nbytes(0, 1) == (96, 48)


def test_chain_prepares_each_source_separately():
    chain = Chain([Doubled(2), CopyOperation()], Linear((1.0, 1.0), normalize=False))
    recipes = chain.recipes([table(a=(4, 3), b=(2,)), table(b=(2,), a=(4, 3))])
    assert [(recipe.outputs[0].spec.name, recipe.align) for recipe in recipes] == [("a", 2), ("b", 2)]
    assert [given.source for given in recipes[0].inputs] == [0, 1]
    a, b = torch.rand(4, 3), torch.rand(4, 3)
    assert torch.equal(chain.run(recipes[0], 2, 4, [a[2:].clone(), b[2:].clone()])[0], a[2:] * 2 + b[2:])
    with pytest.raises(PlanError, match="prepared for 2 sources, not 1"):
        chain.recipes([table(a=(4, 3))])


def test_chain_omits_inputs_dropped_by_rename():
    chain = Chain(CopyOperation(), Rename((("drop", ""),)))
    recipes = chain.recipes([table(a=(4,), drop=(4,), z=(4,))])
    assert [recipe.inputs[0].spec.name for recipe in recipes] == ["a", "z"]
    x = torch.rand(4)
    assert torch.equal(chain.run(recipes[1], 0, 4, [x])[0], x)


def test_rename_dropping_everything_is_refused():
    with pytest.raises(PlanError, match="left out"):
        Rename(((".", ""),)).recipes([table(a=(1,))])


def test_invalid_operation_arguments_raise_config_error():
    assert operation_of([]).name == "copy"
    assert operation_of([{"op": "rename", "rules": [["a", "b"]]}, {"op": "copy"}]).name == "rename(a=b), copy"
    with pytest.raises(ConfigError, match="unknown operation 'fly'"):
        operation_of([{"op": "fly"}])
    with pytest.raises(ConfigError, match="rename:"):
        operation_of([{"op": "rename", "rule": 1}])
    for rules in ([["(", "b"]], [["a", "\\9"]], [[1, "b"]]):
        with pytest.raises(ConfigError, match="not a valid rule"):
            operation_of([{"op": "rename", "rules": rules}])
    for rules in ("x", [["a"]], ["ab"]):
        with pytest.raises(ConfigError, match="pairs"):
            operation_of([{"op": "rename", "rules": rules}])
    for word in ({"op": "slerp", "t": "x"}, {"op": "linear", "weights": ["a", 1]}, {"op": "ties", "density": "x"}):
        with pytest.raises(ConfigError, match="is not a number"):
            operation_of([word])
    with pytest.raises(ConfigError, match="reshard: invalid options"):
        operation_of([{"op": "reshard", "to": "x"}])


def test_single_source_operation_rejects_two_sources():
    with pytest.raises(PlanError, match="takes one source, not 2"):
        CopyOperation().recipes([table(a=(1,)), table(a=(1,))])


def test_unsliced_output_ignores_row_range():
    assert TaskOutput(spec=Spec(name="g", dtype=DType.F32, shape=(1,)), per=0).byte_range(7, 9) == (0, 4)
    assert np.array_equal(lay_out([], shard_bytes=10).table.nbytes, [])
