"""Choice between a publisher's plain tensors and its tagged ones, for one receiver.

In: the publishers' tensors, with tags; the requested tags, or the model. Out: a table, and the tag of each of its
names.
Not here: recording a loader with the table (`sync.recording.record`), making tagged tensors
(`sync.publish.transformed`).
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
    """The checkpoint as one receiver reads it."""

    table: TensorTable
    tags: Mapping[str, str]
    """The tag of each name that has one."""


def shown(checkpoint: TableReply, requested: str | Sequence[str] | None, model: torch.nn.Module | None = None) -> Shown:
    """Return the checkpoint's table, with tensors of the requested tags in the place of their plain sources.

    Args:
        checkpoint: all tensors of the publishers.
        requested: tags; None: those that the model has parameters for, else no tags.
        model: the module to fill.

    Raises:
        PlanError: a requested tag is not offered; lists the offered ones.
    """
    tags = checkpoint.tags or ("",) * len(checkpoint.names)
    offered = tuple(dict.fromkeys(tag for tag in tags if tag))
    wanted = (
        (requested,)
        if isinstance(requested, str)
        else _fitting(offered, model)
        if requested is None
        else tuple(requested)
    )
    if missing := [tag for tag in wanted if tag not in offered]:
        message = f"no publisher offers tensors as {', '.join(missing)}; offered are {', '.join(offered) or 'none'}"
        raise PlanError(message, hint="pass transforms= to the publisher")
    rows = {name: (dtype, shape, "") for name, dtype, shape, tag in _rows(checkpoint, tags) if not tag}
    for name, _, _, tag in _rows(checkpoint, tags):
        if tag in wanted:
            rows.pop(name.removesuffix(_suffix(tag)), None)
    for name, dtype, shape, tag in _rows(checkpoint, tags):
        if tag in wanted:
            if name in rows:
                raise PlanError(f"it is offered as {rows[name][2] or 'a plain tensor'} and as {tag}", tensor=name)
            rows[name] = dtype, shape, tag
    table = tabulate(tuple(rows), [DType(dtype) for dtype, _, _ in rows.values()], [row[1] for row in rows.values()])
    return Shown(table=table, tags={name: tag for name, (_, _, tag) in rows.items() if tag})


def _rows(checkpoint: TableReply, tags: Sequence[str]) -> list[tuple[str, str, tuple[int, ...], str]]:
    return list(zip(checkpoint.names, checkpoint.dtypes, checkpoint.shapes, tags, strict=True))


def _suffix(tag: str) -> str:
    """Return the suffix that a format adds to the name of its codes; a user's own tag adds none."""
    return format_of(tag).values_suffix if is_format(tag) else ""


def _fitting(offered: Sequence[str], model: torch.nn.Module | None) -> tuple[str, ...]:
    """Return the one offered block format that the model has codes and scales for; () where none or several fit."""
    if model is None:
        return ()
    live = live_tensors(model)
    usable = [tag for tag in offered if is_format(tag) and _has(live, format_of(tag))]
    # Two formats may store the same dtypes: a guess could fill the model with wrong scales, so the caller must say.
    return tuple(usable) if len(usable) == 1 else ()


def _has(live: Mapping[str, torch.Tensor], form: Format) -> bool:
    """Return whether a parameter has the codes' dtype, with a parameter for their scales."""
    if form.scaling == "none":
        return False
    codes, scales = torch_dtype(DType.U8 if form.values is DType.F4 else form.values), torch_dtype(form.scales)
    for name, tensor in live.items():
        scale = live.get(name.removesuffix(form.values_suffix) + form.scales_suffix)
        if tensor.dtype is codes and name.endswith(form.values_suffix) and scale is not None:
            return scale.dtype is scales
    return False
