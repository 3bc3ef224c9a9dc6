"""Decides which tensor of a weight set fills which target. One PlanError lists all mismatches before any read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import torch

from penstock.errors import ConfigError, PlanError
from penstock.loader.session import LoadSession
from penstock.loader.tensor import torch_dtype, torch_shape
from penstock.loader.tied import differing_rows
from penstock.memory.local_shards import is_sharded, local_parts
from penstock.memory.targets import require_memory, sources_differ, tied_targets
from penstock.types import Box, DType, TensorTable

Rename = Callable[[str], str | None] | Mapping[str, str] | None
"""Maps a checkpoint name to a target name, or to None to skip the tensor. A mapping skips the names that it lacks."""

Cast = torch.dtype | Literal["target"] | None
"""The dtype of the target tensors if it differs from the stored one. `"target"` means the dtype of each target. None
means no cast."""

_CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Dtypes whose elements are plain numbers. FP8 and FP4 codes have no value without their scales."""

_RENAME = "give the weights for this target, or map their names to the target's names with rename="
_SHOWN = 3
"""Number of names that a message lists for each kind of mismatch."""

Part = tuple[Box | None, torch.Tensor]
"""A box of a tensor, or None for the whole tensor, and the memory that the box fills."""


class MatchedLines(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The parts that this process fills, in file order, with the row, box and memory of each part."""

    table: TensorTable
    boxes: tuple[Box | None, ...]
    tensors: list[torch.Tensor]

    def memory(self, line: int) -> torch.Tensor | None:
        """Return the memory of a part as flat uint8 if the stored bytes can be read directly into it."""
        tensor = self.tensors[line]
        if not tensor.is_contiguous() or tensor.dtype != torch_dtype(self.table.dtypes[line]):
            return None
        return tensor.reshape(-1).view(torch.uint8)


class Matched(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The rows to load in file order, and for each row the parts that this process fills."""

    table: TensorTable
    parts: list[list[Part]]

    def lines(self) -> MatchedLines:
        """Return the parts, without the rows that have no part in this process."""
        rows = [row for row, parts in enumerate(self.parts) for _ in parts]
        flat = [part for parts in self.parts for part in parts]
        table = self.table if len(rows) == len(self.parts) == len(self.table) else self.table.take(rows)
        return MatchedLines(table=table, boxes=tuple(box for box, _ in flat), tensors=[tensor for _, tensor in flat])


def require_cast(dtype: object) -> Cast:
    """Check the `dtype` argument of a verb. Raise ConfigError unless it is a plain floating-point dtype."""
    if dtype is None or dtype == "target" or (isinstance(dtype, torch.dtype) and dtype in _CASTABLE):
        return dtype
    hint = 'pass torch.bfloat16, torch.float16, torch.float32, torch.float64, or "target" for the dtype of each target'
    raise ConfigError(f"weights cannot be cast to dtype={dtype!r}", hint=hint)


def match_targets(
    session: LoadSession,
    targets: Mapping[str, torch.Tensor],
    rename: Rename,
    strict: bool,
    *,
    cast: Cast = None,
    whole: str = "",
) -> Matched:
    """Return the rows to load, and the targets that each row fills.

    Args:
        session: an open session, which reads and compares tensors that fill the same memory and have no digests.
        targets: tensors by name. For a DTensor, this rank's shard is filled.
        rename, strict, cast: see `load_into`.
        whole: name of the verb if the verb rejects DTensors, or an empty string if the verb accepts them.

    Raises:
        PlanError: names, shapes or dtypes do not match, targets overlap, or a target has no allocated memory.
    """
    table = session.table()
    rows: list[int] = []
    parts: list[list[Part]] = []
    used: dict[str, str] = {}
    mismatches = _Mismatches(cast)
    for row, name in enumerate(table.names):
        wanted = name if rename is None else rename(name) if callable(rename) else rename.get(name)
        if wanted is None:
            continue
        if wanted not in targets:
            if strict:
                mismatches.absent.append(name if wanted == name else f"{wanted} for {name}")
            continue
        if wanted in used:
            mismatches.twice.append(f"{name} and {used[wanted]} both go to {wanted}")
            continue
        used[wanted] = name
        tensor = targets[wanted]
        dtype, shape = torch_dtype(table.dtypes[row]), torch_shape(table.dtypes[row], table.shapes[row])
        if tuple(tensor.shape) != shape:
            mismatches.shapes.append(
                f"{name} has shape {list(shape)} in the weight set and {list(tensor.shape)} in the target"
            )
        elif tensor.dtype != dtype and not (can_cast(dtype, tensor.dtype) and cast in ("target", tensor.dtype)):
            mismatches.dtypes.setdefault((dtype, tensor.dtype), []).append(name)
        else:
            rows.append(row)
            parts.append(_parts_of(wanted, tensor, table.dtypes[row], whole))
    if strict:
        places = {_place(tensor) for some in parts for _, tensor in some} if len(used) < len(targets) else set()
        mismatches.missing = [n for n, t in targets.items() if n not in used and t.numel() and _place(t) not in places]
    elif not used and targets and len(table):
        message = f"no name matches: the weight set has {_some(table.names)}, and the target has {_some(list(targets))}"
        raise PlanError(message, hint=_RENAME)
    # Report all mismatches in one error, so that one run shows everything that `rename` must fix.
    mismatches.check(any_used=bool(used))
    return _without_tied_names(session, table, rows, parts)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and size of a tensor, which are equal for tied weights."""
    return tensor.data_ptr(), tensor.nbytes


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return `place_of` for a tensor or for the shard of a DTensor, and a unique value for any other wrapper."""
    if is_sharded(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return place_of(tensor) if type(tensor) in {torch.Tensor, torch.nn.Parameter} else (id(tensor), -1)


def _parts_of(name: str, tensor: torch.Tensor, dtype: DType, whole: str) -> list[Part]:
    if not is_sharded(tensor):
        return [(None, tensor)]
    if whole or dtype is DType.F4:
        why = f"{whole} fills whole tensors, and this is a DTensor" if whole else "a tensor of F4 is only loaded whole"
        hint = "load_into fills the part of each rank, and so does penstock_dcp.CheckpointReader"
        raise PlanError(why, tensor=name, hint=hint)
    full = Box.full(tuple(tensor.shape))
    return [(None if box == full else box, part) for box, part in local_parts(name, tensor)]


def can_cast(stored: torch.dtype, target: torch.dtype) -> bool:
    """Return whether both dtypes hold plain floating-point numbers."""
    return {stored, target} <= _CASTABLE


def _without_tied_names(session: LoadSession, table: TensorTable, rows: list[int], parts: list[list[Part]]) -> Matched:
    """Return rows and parts without the duplicate names of tied weights. Raise PlanError if tied weights differ."""
    flat = [(at, number) for at, some in enumerate(parts) for number in range(len(some))]
    names = [table.names[rows[at]] for at, _ in flat]
    if groups := tied_targets(names, [parts[at][number][1] for at, number in flat]):
        if pair := differing_rows(session, table, [[rows[flat[one][0]] for one in group] for group in groups]):
            raise sources_differ(*(table.names[row] for row in pair))
        second = {flat[one] for group in groups for one in group[1:]}
        parts = [[p for n, p in enumerate(some) if (at, n) not in second] for at, some in enumerate(parts)]
        # Keep rows of DTensors, because a rank without a shard cannot detect that they are tied.
        dropped = {at for at, _ in second if not parts[at]}
        rows, parts = ([one for at, one in enumerate(both) if at not in dropped] for both in (rows, parts))  # type: ignore[assignment]
    return Matched(table=table.take(rows), parts=parts)


class _Mismatches:
    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self.missing: list[str] = []
        self.absent: list[str] = []
        self.twice: list[str] = []
        self.shapes: list[str] = []
        self.dtypes: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}

    def check(self, *, any_used: bool) -> None:
        words = []
        # Report missing tensors first, because a large checkpoint may have many surplus tensors.
        if self.missing:
            words.append(f"the weight set has no tensor for {_some(self.missing)}")
        for (stored, target), names in self.dtypes.items():
            words.append(f"{_some(names)} have dtype {stored} in the weight set and {target} in the target")
        if self.shapes:
            words.append(_some(self.shapes))
        words += self.twice[:_SHOWN]
        if self.absent:
            words.append(f"the target has no tensor {_some(self.absent)}")
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
            return "cast only float16, bfloat16, float32 and float64, and convert FP8 codes with dequantise"
        if self.shapes or self.twice:
            return "give targets with the stored shapes, because tensors are never reshaped"
        return "pass strict=False to fill the tensors that match" if any_used else _RENAME


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def require_whole(targets: Mapping[str, torch.Tensor], verb: str) -> None:
    """Raise PlanError if a target is a wrapper such as a DTensor, for a verb that fills whole tensors only."""
    for name, tensor in targets.items():
        if is_sharded(tensor):
            _parts_of(name, tensor, DType.F32, verb)
        require_memory(name, tensor)
