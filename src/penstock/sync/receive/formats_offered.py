"""Choose the offered tensors that a receiver is shown: as they are, or under the tags that it requests.

In: what the publishers hold, with tags; what was asked, or the model. Out: a table, and the tag of each of its names.
Not here: what a loader makes of the table (`sync.recording.record`), what is held so (`sync.publish.transformed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.errors import PlanError
from penstock.hub.sync_messages import TableReply
from penstock.loader.tensor import torch_dtype
from penstock.peer.weight_layout import tabulate
from penstock.sync.recording.layout import live_tensors
from penstock.transform.formats import Format, format_of, is_format
from penstock.types import DType, TensorTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The checkpoint, as one receiver takes it."""

    table: TensorTable
    tags: Mapping[str, str]
    """Of the names that have one."""


def shown(told: TableReply, asked: str | Sequence[str] | None, model: torch.nn.Module | None = None) -> Shown:
    """The checkpoint's table: what has a tag that was asked for in the place of what it was made of.

    Args:
        told: everything that is held.
        asked: tags; None: those that the model has parameters for; else nothing under a tag.
        model: to be filled.

    Raises:
        PlanError: nobody offers a tag that was asked for; lists those that are offered.
    """
    tags = told.tags or ("",) * len(told.names)
    offered = tuple(dict.fromkeys(tag for tag in tags if tag))
    wanted = (asked,) if isinstance(asked, str) else _fitting(offered, model) if asked is None else tuple(asked)
    if missing := [tag for tag in wanted if tag not in offered]:
        message = f"nobody publishes tensors as {', '.join(missing)}; offered are {', '.join(offered) or 'none'}"
        raise PlanError(message, hint="give the publisher transforms=")
    rows = {name: (dtype, shape, "") for name, dtype, shape, tag in _rows(told, tags) if not tag}
    for name, _, _, tag in _rows(told, tags):
        if tag in wanted:
            rows.pop(name.removesuffix(_suffix(tag)), None)
    for name, dtype, shape, tag in _rows(told, tags):
        if tag in wanted:
            if name in rows:
                raise PlanError(f"it is offered as {rows[name][2] or 'it is'} and as {tag}", tensor=name)
            rows[name] = dtype, shape, tag
    table = tabulate(tuple(rows), [DType(dtype) for dtype, _, _ in rows.values()], [row[1] for row in rows.values()])
    return Shown(table=table, tags={name: tag for name, (_, _, tag) in rows.items() if tag})


def _rows(told: TableReply, tags: Sequence[str]) -> list[tuple[str, str, tuple[int, ...], str]]:
    return list(zip(told.names, told.dtypes, told.shapes, tags, strict=True))


def _suffix(tag: str) -> str:
    """Return what the codes' name adds to the name of their source; a tag of the user's own adds nothing."""
    return format_of(tag).values_suffix if is_format(tag) else ""


def _fitting(offered: Sequence[str], model: torch.nn.Module | None) -> tuple[str, ...]:
    """The one block format on offer that the model has codes and scales for; none where it has not, or of several."""
    if model is None:
        return ()
    live = live_tensors(model)
    found = [tag for tag in offered if is_format(tag) and _has(live, format_of(tag))]
    return tuple(found) if len(found) == 1 else ()


def _has(live: Mapping[str, torch.Tensor], form: Format) -> bool:
    """Return whether a parameter has the codes' dtype, with a parameter for their scales."""
    if form.scaling == "none":
        return False
    codes, scales = torch_dtype(DType.U8 if form.values is DType.F4 else form.values), torch_dtype(form.scales)
    for name, tensor in live.items():
        beside = live.get(name.removesuffix(form.values_suffix) + form.scales_suffix)
        if tensor.dtype is codes and name.endswith(form.values_suffix) and beside is not None:
            return beside.dtype is scales
    return False
