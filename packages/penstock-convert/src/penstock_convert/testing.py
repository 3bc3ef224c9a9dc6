"""Run an operation without workers, and check that cutting its recipes into ranges of rows does not change the result.

`check_rows` returns the outputs by name, or raises AssertionError if a cut changes a bit. A test must compare
these outputs with its own reference.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from penstock.loader.tensor import dtype_of, torch_dtype
from penstock.types import TensorTable
from penstock_convert.operations.operation import Operation, StreamedOperation
from penstock_convert.plan.tasks import Recipe, Spec, lay_out

Tensors = Mapping[str, torch.Tensor]


def table_of(tensors: Tensors) -> TensorTable:
    """Return the tensor table of a checkpoint that contains these tensors."""
    specs = [
        Spec(name=name, dtype=dtype_of(tensor.dtype), shape=tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    return lay_out(specs, shard_bytes=1 << 62).table


def outputs_of(operation: Operation, *sources: Tensors, seed: int | None = None) -> dict[str, torch.Tensor]:
    """Return all outputs by name. If `seed` is set, cut the recipes at random rows.

    The outputs have the dtypes and shapes that the recipes declare.
    """
    found: dict[str, torch.Tensor] = {}
    for recipe in operation.recipes([table_of(tensors) for tensors in sources]):
        parts = [_run(operation, recipe, start, stop, sources) for start, stop in _cuts(recipe, seed)]
        for out, *pieces in zip(recipe.outputs, *parts, strict=True):
            name = f"{out.spec.group}/{out.spec.name}" if out.spec.group else out.spec.name
            assert name not in found, name
            flat = torch.cat([_bytes(piece) for piece in pieces])
            assert {piece.dtype for piece in pieces} == {torch_dtype(out.spec.dtype)}, name
            found[name] = flat.view(torch_dtype(out.spec.dtype)).reshape(out.spec.shape)
    return found


def check_rows(operation: Operation, *sources: Tensors, seeds: Sequence[int] = range(3)) -> dict[str, torch.Tensor]:
    """Return the outputs of uncut recipes, and check that random cuts and runs in parts give identical outputs."""
    whole = outputs_of(operation, *sources)
    if isinstance(operation, StreamedOperation):
        _check_parts(operation, sources, whole)
    for seed in seeds:
        cut = outputs_of(operation, *sources, seed=seed)
        assert cut.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.equal(_bytes(tensor), _bytes(cut[name])), (name, seed)
    return whole


def _check_parts(operation: Operation, sources: Sequence[Tensors], whole: Tensors) -> None:
    assert isinstance(operation, StreamedOperation)
    for recipe in operation.recipes([table_of(tensors) for tensors in sources]):

        def read(index: int, start: int, stop: int, recipe: Recipe = recipe) -> torch.Tensor:
            wanted = recipe.inputs[index]
            return sources[wanted.source][wanted.spec.name].reshape(-1)[start:stop].clone()

        unit = operation.part_unit(recipe)
        for num_part in (unit, 3 * unit) if unit else ():
            parts = [[_bytes(tensor) for tensor in part] for part in operation.run_parts(recipe, num_part, read)]
            for out, *pieces in zip(recipe.outputs, *parts, strict=True):
                assert torch.equal(torch.cat(pieces), _bytes(whole[out.spec.path])), (out.spec.name, num_part)


def _cuts(recipe: Recipe, seed: int | None) -> list[tuple[int, int]]:
    places = range(recipe.align, recipe.num_rows, recipe.align) if recipe.align else range(0)
    chance = random.Random(seed)
    inner = [] if seed is None else sorted(chance.sample(places, min(len(places), 1 + seed % 4)))
    bounds = [0, *inner, recipe.num_rows]
    return list(pairwise(bounds))


def _run(
    operation: Operation, recipe: Recipe, start: int, stop: int, sources: Sequence[Tensors]
) -> Sequence[torch.Tensor]:
    inputs: list[torch.Tensor | None] = []
    for wanted in recipe.inputs:
        tensor, box = sources[wanted.source][wanted.spec.name], wanted.taken(start, stop)
        if (dtype_of(tensor.dtype), tuple(tensor.shape)) != (wanted.spec.dtype, wanted.spec.shape):
            # An operation may request a tensor as raw bytes.
            tensor = _bytes(tensor)
        cut = () if box is None else tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        inputs.append(None if box is None else tensor[cut].clone().contiguous())
    found = operation.run(recipe, start, stop, inputs)
    for out, tensor in zip(recipe.outputs, found, strict=True):
        first, last = out.byte_range(start, stop)
        assert tensor.nbytes == last - first, (out.spec, tensor.shape, start, stop)
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
