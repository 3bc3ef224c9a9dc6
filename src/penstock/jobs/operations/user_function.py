"""A user's own operation: `module:name`, an `Operation`, or a plain function of one tensor.

In: its import path. Out: an `Operation`.
Not here: the handling of an operation that raises, hangs, or returns other tensors than its recipe says
(`jobs.workers.worker`, `jobs.coordinator`).

    def halved(tensor, name): return tensor / 2          every floating tensor, whole; shape and dtype stay
    halved.rows = True                                   it can work on some rows at a time
    halved.names = "mlp"                                 only tensors whose name contains this pattern
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from penstock.errors import ConfigError, OperationFailed, PenstockError
from penstock.jobs.operations.operation import (
    FLOATS,
    Chain,
    Operation,
    Unchanged,
    all_of,
    copy_recipe,
    only_source,
    specs_of,
    whole,
)
from penstock.plan.tasks import Output, Recipe
from penstock.types import TensorTable

if TYPE_CHECKING:
    import torch


def function_of(function: str, **options: Any) -> Operation:
    """Return the operation at `module:name`.

    Args:
        function: names an `Operation`, or a callable that makes one of `options` (a class), or a function of a tensor.
        options: arguments of the class that makes it.

    Raises:
        ConfigError: nothing is there, or it is none of these.
    """
    module, _, name = function.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except PenstockError:  # the module was found, and needs a package: MissingExtra is an ImportError too
        raise
    except ImportError as error:
        raise ConfigError(f"{function}: {error}", hint="is its directory in PYTHONPATH?") from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"{module} has no {name}")
        target = getattr(target, part)
    if isinstance(target, type):
        target = target(**options)
    if all(hasattr(target, verb) for verb in ("recipes", "run", "config", "name")):
        return target  # type: ignore[no-any-return]
    if not callable(target) or options:
        raise ConfigError(f"{function} is neither an operation nor a function of a tensor", hint="see docs/convert.md")
    return Function(function, target)


def code_of(operation: Operation) -> str:
    """Return a digest of the module files of a user's operations, which changes with their code; "" for built-in ones.

    The files are that of the given module and that of the function itself; modules that they import are not included.
    """
    if isinstance(operation, Chain):
        return "".join(map(code_of, operation.operations))
    modules = [type(operation).__module__]
    if isinstance(operation, Function):
        modules = [operation.path.partition(":")[0], getattr(operation.call, "__module__", None) or ""]
    theirs = (name for name in dict.fromkeys(modules) if not name.startswith("penstock."))
    paths = (getattr(sys.modules.get(name), "__file__", None) for name in theirs)
    return "".join(blake3(Path(path).read_bytes()).hexdigest() for path in paths if path)


@dataclass(frozen=True, slots=True)
class Function(Unchanged):
    """A function of one tensor and its name, on every floating tensor that it names."""

    path: str
    call: Callable[[torch.Tensor, str], torch.Tensor]

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return self.path

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        wanted, rows = str(getattr(self.call, "names", "")), bool(getattr(self.call, "rows", False))
        recipes = []
        for spec in specs_of(only_source(sources, self.path)):
            if spec.dtype not in FLOATS or not re.search(wanted, spec.name):
                recipes.append(copy_recipe(0, spec))
            elif rows and spec.shape:
                inputs = (whole(0, spec),)
                recipes.append(Recipe(outputs=(Output(spec=spec),), inputs=inputs, num_rows=spec.shape[0], align=1))
            else:
                inputs = (all_of(0, spec),)
                recipes.append(Recipe(outputs=(Output(spec=spec, per=0),), inputs=inputs, num_rows=1, align=0))
        return recipes

    def run(
        self, recipe: Recipe, start: int, stop: int, inputs: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """See `Operation.run`."""
        import torch

        spec = recipe.outputs[0].spec
        (tensor,) = inputs
        assert tensor is not None
        if spec.dtype not in FLOATS or not re.search(str(getattr(self.call, "names", "")), spec.name):
            return [tensor]
        result = self.call(tensor, spec.name)
        if not isinstance(result, torch.Tensor) or (result.dtype, result.shape) != (tensor.dtype, tensor.shape):
            returned = (
                f"{result.dtype} {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            )
            message = f"{self.path} gave {returned}, not {tensor.dtype} {list(tensor.shape)}"
            raise OperationFailed(message, tensor=spec.name, hint="an operation that gives others is a class")
        return [result]
