"""A user's own operation: `module:name`, an `Operation`, or a plain function of one tensor.

In: where it is. Out: an `Operation`.
Not here: what happens when it raises, hangs or gives other tensors than it said (`jobs.workers.worker`,
`jobs.coordinator`).

    def halved(tensor, name): return tensor / 2          every floating tensor, whole; shape and dtype stay
    halved.rows = True                                   it may be given some rows at a time
    halved.names = "mlp"                                 only tensors in whose names this pattern is found
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
    as_it_is,
    one,
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
        options: for what is called to make one.

    Raises:
        ConfigError: nothing is there, or it is none of these.
    """
    module, _, name = function.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except PenstockError:  # the module was found, and needs a package: MissingExtra is an ImportError too
        raise
    except ImportError as error:
        raise ConfigError(f"{function}: {error}", hint="is its directory in PYTHONPATH?") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{module} has no {name}")
        found = getattr(found, part)
    if isinstance(found, type):
        found = found(**options)
    if all(hasattr(found, verb) for verb in ("recipes", "run", "config", "name")):
        return found  # type: ignore[no-any-return]
    if not callable(found) or options:
        raise ConfigError(f"{function} is neither an operation nor a function of a tensor", hint="see docs/convert.md")
    return Function(function, found)


def code_of(operation: Operation) -> str:
    """What tells the code of a user's operations from what it was: a digest of their modules' files; "" of our own.

    Those are where it is, and where it is from; what else such a module imports is not looked at.
    """
    if isinstance(operation, Chain):
        return "".join(map(code_of, operation.operations))
    modules = [type(operation).__module__]
    if isinstance(operation, Function):
        modules = [operation.words.partition(":")[0], getattr(operation.call, "__module__", None) or ""]
    theirs = (one for one in dict.fromkeys(modules) if not one.startswith("penstock."))
    paths = (getattr(sys.modules.get(one), "__file__", None) for one in theirs)
    return "".join(blake3(Path(path).read_bytes()).hexdigest() for path in paths if path)


@dataclass(frozen=True, slots=True)
class Function(Unchanged):
    """A function of one tensor and its name, on every floating tensor that it names."""

    words: str
    call: Callable[[torch.Tensor, str], torch.Tensor]

    @property
    def name(self) -> str:
        """See `Operation.name`."""
        return self.words

    def recipes(self, sources: Sequence[TensorTable]) -> Sequence[Recipe]:
        """See `Operation.recipes`."""
        wanted, rows = str(getattr(self.call, "names", "")), bool(getattr(self.call, "rows", False))
        found = []
        for spec in specs_of(one(sources, self.words)):
            if spec.dtype not in FLOATS or not re.search(wanted, spec.name):
                found.append(as_it_is(0, spec))
            elif rows and spec.shape:
                inputs = (whole(0, spec),)
                found.append(Recipe(outputs=(Output(spec=spec),), inputs=inputs, num_rows=spec.shape[0], align=1))
            else:
                inputs = (all_of(0, spec),)
                found.append(Recipe(outputs=(Output(spec=spec, per=0),), inputs=inputs, num_rows=1, align=0))
        return found

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
        made = self.call(tensor, spec.name)
        if not isinstance(made, torch.Tensor) or (made.dtype, made.shape) != (tensor.dtype, tensor.shape):
            given = f"{made.dtype} {list(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
            message = f"{self.words} gave {given}, not {tensor.dtype} {list(tensor.shape)}"
            raise OperationFailed(message, tensor=spec.name, hint="an operation that gives others is a class")
        return [made]
