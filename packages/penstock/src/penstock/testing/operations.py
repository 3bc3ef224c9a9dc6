"""Operations run without workers: what they give, with rows cut wherever their recipes allow.

In: an operation, tensors of its sources. Out: its outputs by name, or an AssertionError where cuts change their bits.
Not here: what the outputs should be: a test compares them with a plain reference.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from penstock.jobs.operations.operation import Operation, StreamedOperation
from penstock.loader.tensor import dtype_of, torch_dtype
from penstock.plan.tasks import Recipe, Spec, lay_out
from penstock.types import TensorTable

Tensors = Mapping[str, torch.Tensor]


def table_of(tensors: Tensors) -> TensorTable:
    """Return the table of a checkpoint that holds these."""
    specs = [
        Spec(name=name, dtype=dtype_of(tensor.dtype), shape=tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    return lay_out(specs, shard_bytes=1 << 62).table


def made(operation: Operation, *sources: Tensors, seed: int | None = None) -> dict[str, torch.Tensor]:
    """Return all outputs; with a seed, of recipes cut at random. Dtypes and shapes are those that the recipes say."""
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
    """`made` of whole recipes, held against cuts at random and against what is made in parts, bit for bit."""
    whole = made(operation, *sources)
    if isinstance(operation, StreamedOperation):
        _check_parts(operation, sources, whole)
    for seed in seeds:
        cut = made(operation, *sources, seed=seed)
        assert cut.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.equal(_bytes(tensor), _bytes(cut[name])), (name, seed)
    return whole


def _check_parts(operation: Operation, sources: Sequence[Tensors], whole: Tensors) -> None:
    """Recipes that can be made in parts, made so."""
    assert isinstance(operation, StreamedOperation)
    for recipe in operation.recipes([table_of(tensors) for tensors in sources]):

        def read(index: int, start: int, stop: int, recipe: Recipe = recipe) -> torch.Tensor:
            given = recipe.inputs[index]
            return sources[given.source][given.spec.name].reshape(-1)[start:stop].clone()

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
    for given in recipe.inputs:
        tensor, box = sources[given.source][given.spec.name], given.taken(start, stop)
        if (dtype_of(tensor.dtype), tuple(tensor.shape)) != (given.spec.dtype, given.spec.shape):
            # Its bytes, as an operation may ask for.
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
