"""Which tensor of a weight set fills which target, and which part of it.

In: the table of a weight set; tensors by name. Out: `Matched`; a PlanError that says what does not fit, before anything
is read.
Not here: the targets of a module (`into`), reading (`session`), memory that targets share (`memory.targets`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from penstock.errors import ConfigError, PlanError
from penstock.loader.session import LoadSession
from penstock.loader.tensor import torch_dtype, torch_shape
from penstock.loader.tied import differing_rows
from penstock.memory.local_shards import is_sharded, local_parts
from penstock.memory.targets import require_memory, sources_differ, tied_targets
from penstock.types import Box, DType, TensorTable

Rename = Callable[[str], str | None] | Mapping[str, str] | None
"""Checkpoint name -> target name; None leaves the tensor out. A mapping leaves out the names that it does not have."""

Cast = torch.dtype | Literal["target"] | None
"""The dtype to which tensors of another one are cast; `"target"`: that of each target; None: nothing is cast."""

_CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Dtypes of plain numbers. FP8 and FP4 are codes: without their scales a cast would give wrong values."""

_RENAME = "give the weights of this target; load_into(rename=) gives the target's names where they differ"
_SHOWN = 3
"""Names that a message lists of each kind of fault: a wrong dtype or prefix concerns all tensors of a model."""

Part = tuple[Box | None, torch.Tensor]
"""A box of a tensor, None for all of it, and the memory that it fills."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RenameLines:
    """The parts that this process fills, one after the other in file order: the row, the box and the memory of each."""

    table: TensorTable
    boxes: tuple[Box | None, ...]
    tensors: list[torch.Tensor]

    def memory(self, line: int) -> torch.Tensor | None:
        """Return the memory of a part, flat uint8, where the stored bytes can be read straight into it."""
        tensor = self.tensors[line]
        if not tensor.is_contiguous() or tensor.dtype != torch_dtype(self.table.dtypes[line]):
            return None
        return tensor.reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Matched:
    """The rows to load, in file order, and the parts of each that this process fills: several of a sharded tensor."""

    table: TensorTable
    parts: list[list[Part]]

    def lines(self) -> RenameLines:
        """Return the parts, without the rows of which this process has none."""
        rows = [row for row, parts in enumerate(self.parts) for _ in parts]
        flat = [part for parts in self.parts for part in parts]
        table = self.table if len(rows) == len(self.parts) == len(self.table) else self.table.take(rows)
        return RenameLines(table=table, boxes=tuple(box for box, _ in flat), tensors=[tensor for _, tensor in flat])


def require_cast(dtype: object) -> Cast:
    """Return the argument `dtype` of a verb. ConfigError: it is no dtype of plain floating-point numbers."""
    if dtype is None or dtype == "target" or (isinstance(dtype, torch.dtype) and dtype in _CASTABLE):
        return dtype
    hint = 'give torch.bfloat16, torch.float16, torch.float32 or torch.float64, or "target" for that of each target'
    raise ConfigError(f"dtype={dtype!r}: weights cannot be cast to it", hint=hint)


def match_targets(
    session: LoadSession,
    targets: Mapping[str, torch.Tensor],
    rename: Rename,
    strict: bool,
    *,
    cast: Cast = None,
    whole: str = "",
) -> Matched:
    """Return the rows to load, and what each fills.

    Args:
        session: opened; it reads tensors that go to one memory and have no digests, to compare them.
        targets: tensors by name. Of a DTensor this rank's part is filled.
        rename, strict: see `load_into`.
        cast: see `Cast`.
        whole: the verb, if it fills whole tensors only: DTensors are refused.

    Raises:
        PlanError: names, shapes or dtypes do not fit. Not strict: no name fits. Targets share memory, and one would
            overwrite the other. A target has no memory of its own.
    """
    table = session.table()
    rows: list[int] = []
    parts: list[list[Part]] = []
    used: dict[str, str] = {}
    faults = _Faults(cast)
    for row, name in enumerate(table.names):
        wanted = name if rename is None else rename(name) if callable(rename) else rename.get(name)
        if wanted is None:
            continue
        if wanted not in targets:
            if strict:
                faults.absent.append(name if wanted == name else f"{wanted} for {name}")
            continue
        if wanted in used:
            faults.twice.append(f"{name} and {used[wanted]} both go to {wanted}")
            continue
        used[wanted] = name
        tensor = targets[wanted]
        dtype, shape = torch_dtype(table.dtypes[row]), torch_shape(table.dtypes[row], table.shapes[row])
        if tuple(tensor.shape) != shape:
            faults.shapes.append(f"{name} is {list(shape)} in the weight set and {list(tensor.shape)} in the target")
        elif tensor.dtype != dtype and not _is_cast(dtype, tensor.dtype, cast):
            faults.dtypes.setdefault((dtype, tensor.dtype), []).append(name)
        else:
            rows.append(row)
            parts.append(_parts_of(wanted, tensor, table.dtypes[row], whole))
    if strict:
        places = {_place(tensor) for some in parts for _, tensor in some} if len(used) < len(targets) else set()
        faults.missing = [n for n, t in targets.items() if n not in used and t.numel() and _place(t) not in places]
    elif not used and targets and len(table):
        message = f"no tensor fits: the weight set has {_some(table.names)}, and the target {_some(list(targets))}"
        raise PlanError(message, hint=_RENAME)
    # All faults in one error: a wrong `rename` is then plain from a single run.
    faults.check(any_used=bool(used))
    return _once(session, table, rows, parts)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the bytes of a tensor: equal for tied weights."""
    return tensor.data_ptr(), tensor.nbytes


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return `place_of`, of a DTensor that of this rank's part; of other wrappers a value that no other tensor has."""
    if is_sharded(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return place_of(tensor) if type(tensor) in {torch.Tensor, torch.nn.Parameter} else (id(tensor), -1)


def _parts_of(name: str, tensor: torch.Tensor, dtype: DType, whole: str) -> list[Part]:
    """Return the parts of a target that this process has. PlanError: the verb fills whole tensors only."""
    if not is_sharded(tensor):
        return [(None, tensor)]
    if whole or dtype is DType.F4:
        why = f"{whole} fills whole tensors, and this is a DTensor" if whole else "a tensor of F4 is only loaded whole"
        hint = "load_into fills the part of each rank, and so does penstock.dcp.CheckpointReader"
        raise PlanError(why, tensor=name, hint=hint)
    full = Box.full(tuple(tensor.shape))
    return [(None if box == full else box, part) for box, part in local_parts(name, tensor)]


def can_cast(stored: torch.dtype, target: torch.dtype) -> bool:
    """Return whether both dtypes are of plain floating-point numbers."""
    return {stored, target} <= _CASTABLE


def _is_cast(stored: torch.dtype, target: torch.dtype, cast: Cast) -> bool:
    return cast is not None and can_cast(stored, target) and (cast == "target" or cast == target)


def _once(session: LoadSession, table: TensorTable, rows: list[int], parts: list[list[Part]]) -> Matched:
    """Return rows and parts with each memory once: a module lists a tied weight under all its names.

    Raises:
        PlanError: two of the tensors share a part of their memory, or are one memory and their rows have other bytes.
    """
    flat = [(at, number) for at, some in enumerate(parts) for number in range(len(some))]
    names = [table.names[rows[at]] for at, _ in flat]
    if groups := tied_targets(names, [parts[at][number][1] for at, number in flat]):
        if pair := differing_rows(session, table, [[rows[flat[one][0]] for one in group] for group in groups]):
            raise sources_differ(*(table.names[row] for row in pair))
        second = {flat[one] for group in groups for one in group[1:]}
        parts = [[p for n, p in enumerate(some) if (at, n) not in second] for at, some in enumerate(parts)]
        # Rows of DTensors stay: ranks that have no part of them cannot know that they are tied.
        dropped = {at for at, _ in second if not parts[at]}
        rows, parts = ([one for at, one in enumerate(both) if at not in dropped] for both in (rows, parts))  # type: ignore[assignment]
    return Matched(table=table.take(rows), parts=parts)


class _Faults:
    """What does not fit, by kind."""

    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self.missing: list[str] = []
        self.absent: list[str] = []
        self.twice: list[str] = []
        self.shapes: list[str] = []
        self.dtypes: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}

    def check(self, *, any_used: bool) -> None:
        """Raise PlanError if there is a fault."""
        words = []
        # First what the target lacks: a large checkpoint may have many tensors too many, and these few are the reason.
        if self.missing:
            words.append(f"the weight set has no tensor for {_some(self.missing)}")
        for (stored, target), names in self.dtypes.items():
            words.append(f"{_some(names)}: dtype {stored} in the weight set and {target} in the target")
        if self.shapes:
            words.append(_some(self.shapes))
        words += self.twice[:_SHOWN]
        if self.absent:
            words.append(f"the target has no {_some(self.absent)}")
        if not words:
            return
        num_dtypes = sum(map(len, self.dtypes.values()))
        count = len(self.missing) + num_dtypes + len(self.shapes) + len(self.twice) + len(self.absent)
        how = "differ in dtype only" if count == num_dtypes else "do not fit"
        raise PlanError(f"{count} tensors {how}: {'; '.join(words)}", hint=self._hint(any_used))

    def _hint(self, any_used: bool) -> str:
        if self.dtypes and not self.shapes and not self.twice:
            if all({*pair} <= _CASTABLE for pair in self.dtypes):
                return 'load_into(dtype="target") casts each tensor to the dtype of its target'
            return (
                "only float16, bfloat16, float32 and float64 are cast: codes of FP8 need their scales, see dequantise"
            )
        if self.shapes or self.twice:
            return "tensors are filled unchanged: nothing is reshaped"
        return "or pass strict=False" if any_used else _RENAME


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def require_whole(targets: Mapping[str, torch.Tensor], verb: str) -> None:
    """Raise PlanError if a target has no memory of its own, as a DTensor: the verb fills whole tensors only."""
    for name, tensor in targets.items():
        if is_sharded(tensor):
            _parts_of(name, tensor, DType.F32, verb)
        require_memory(name, tensor)
