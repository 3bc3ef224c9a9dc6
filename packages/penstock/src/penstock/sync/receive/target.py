"""The target of a subscriber: the tensors to fill, as rows of the publishers' checkpoint, and the memory for them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch

from penstock.digest.strip import Strips
from penstock.errors import BudgetTooSmall, PlanError
from penstock.holding.regions import VersionRegions
from penstock.holding.weight_layout import tabulate
from penstock.lifecycle import paused_gc
from penstock.loader.tensor import as_tensors, torch_dtype, torch_shape
from penstock.memory.arena import Arena, needed_bytes
from penstock.memory.targets import note_written
from penstock.plan.intersect import MAX_LISTED, prefix_hint
from penstock.plan.layout import Layout
from penstock.report import names_text
from penstock.sync.copy_plan import StagingCopy, aliases_of
from penstock.sync.local_version import LocalVersion
from penstock.sync.messages import TableReply
from penstock.sync.receive.staged import UpdateOptions
from penstock.sync.recording.layout import Load, Recording, live_tensors
from penstock.sync.recording.loader_run import user_code
from penstock.sync.recording.requirements import Requirements, record, wanted
from penstock.sync.shards import Declarable, ShardRow, declared, layout_of, regions_of
from penstock.transform.formats import Format, format_of, is_format
from penstock.transport.choose import PeerLinks
from penstock.types import U64, DType, TensorTable

TargetFunction = Callable[[Mapping[str, torch.Tensor]], Mapping[str, Declarable]]
"""Returns the tensors to fill. It receives the published tensors on the meta device."""

Target = torch.nn.Module | Mapping[str, Declarable] | TargetFunction
"""A module whose loader is recorded, or tensors by the checkpoint's names, or a function that returns these."""


class TensorSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors that one receiver reads, with the tag of each transformed tensor."""

    table: TensorTable
    tags: Mapping[str, str]


def select_tensors(
    checkpoint: TableReply, requested: str | Sequence[str] | None, model: torch.nn.Module | None = None
) -> TensorSelection:
    """Return the checkpoint's table, with tensors of the requested tags in place of their plain sources."""
    tags = checkpoint.tags or ("",) * len(checkpoint.names)
    offered = tuple(dict.fromkeys(tag for tag in tags if tag))
    if requested is None:
        chosen = _fitting(offered, model)
    else:
        chosen = (requested,) if isinstance(requested, str) else tuple(requested)
    if missing := [tag for tag in chosen if tag not in offered]:
        message = (
            f"no publisher offers tensors as {', '.join(missing)}, only as {', '.join(offered) or 'plain tensors'}"
        )
        raise PlanError(message, hint="pass transforms= to the publisher")
    rows = {name: (dtype, shape, "") for name, dtype, shape, tag in _rows(checkpoint, tags) if not tag}
    for name, _, _, tag in _rows(checkpoint, tags):
        if tag in chosen:
            rows.pop(name.removesuffix(format_of(tag).values_suffix if is_format(tag) else ""), None)
    for name, dtype, shape, tag in _rows(checkpoint, tags):
        if tag in chosen:
            if name in rows:  # two of the requested tags store a tensor under the same name
                raise PlanError(f"published twice, as {rows[name][2] or 'a plain tensor'} and as {tag}", tensor=name)
            rows[name] = dtype, shape, tag
    table = tabulate(tuple(rows), [DType(dtype) for dtype, _, _ in rows.values()], [row[1] for row in rows.values()])
    return TensorSelection(table=table, tags={name: tag for name, (_, _, tag) in rows.items() if tag})


def _rows(checkpoint: TableReply, tags: Sequence[str]) -> list[tuple[str, str, tuple[int, ...], str]]:
    return list(zip(checkpoint.names, checkpoint.dtypes, checkpoint.shapes, tags, strict=True))


def _fitting(offered: Sequence[str], model: torch.nn.Module | None) -> tuple[str, ...]:
    """Return the only offered block format whose codes and scales the model has, or () if no or several formats fit."""
    if model is None:
        return ()
    live = live_tensors(model)
    usable = [tag for tag in offered if is_format(tag) and _has(live, format_of(tag))]
    # Two formats may store the same dtypes, and a guess could fill the model with wrong scales.
    return tuple(usable) if len(usable) == 1 else ()


def _has(live: Mapping[str, torch.Tensor], form: Format) -> bool:
    # A cast is not selected automatically: it has no scales, so every BF16 model would match `cast:BF16`.
    if form.scaling == "none":
        return False
    # Engines store F4 codes as bytes, because few kernels accept torch's dtype.
    codes, scales = torch_dtype(DType.U8 if form.values is DType.F4 else form.values), torch_dtype(form.scales)
    for name, tensor in live.items():
        scale = live.get(name.removesuffix(form.values_suffix) + form.scales_suffix)
        if tensor.dtype is codes and name.endswith(form.values_suffix) and scale is not None:
            return scale.dtype is scales
    return False


def tensors_of(target: Target, table: TensorTable) -> torch.nn.Module | Mapping[str, Declarable]:
    """Return the module or the tensors to fill. Raise PlanError if the target function raised an error."""
    if isinstance(target, MutableMapping) and not target:
        return _new_tensors(table)
    if isinstance(target, torch.nn.Module | Mapping):
        return target
    published = {
        name: torch.empty(torch_shape(dtype, shape), dtype=torch_dtype(dtype), device="meta")
        for name, dtype, shape in _columns(table)
    }
    with user_code("the target function"):
        return target(published)


def requirements_for(
    target: torch.nn.Module | Mapping[str, Declarable],
    table: TensorTable,
    load: Load | None,
    *,
    strict: bool,
    tags: Mapping[str, str] | None = None,
) -> Requirements:
    """Return the requirements for a result of `tensors_of`. `tags` maps transformed tensors to their tags."""
    if not len(table):
        raise PlanError("the publishers have no tensors")
    if isinstance(target, torch.nn.Module):
        if not live_tensors(target):
            raise _no_tensors()
        # Loaders compare devices, so the recording tensors must report the model's device.
        device = next((tensor.device for tensor in target.parameters()), torch.device("cpu"))
        # This creates many small, long-lived objects, which would trigger repeated full garbage collections.
        with paused_gc():
            recording = record(target, table, load=load, device=device)
            if strict:
                _check(recording, target)
            requirements = wanted(target, recording, table, load=load, tags=tags).with_tied(_tied(recording, table))
        if not requirements.rows:
            raise PlanError(f"no published tensor fills a parameter of the module: {names_text(table.names)}")
        return requirements
    if not target:
        raise _no_tensors()
    rows = declared(target)
    if not strict:
        published = set(table.names)
        rows = tuple(row for row in rows if row.name in published)
        if not rows:
            raise PlanError(f"no published tensor fills a tensor of the target: {names_text(table.names)}")
    return Requirements.as_declared([_tagged(row, (tags or {}).get(row.name, "")) for row in rows])


def _tied(recording: Recording, table: TensorTable) -> Mapping[str, str]:
    kinds = {name: (dtype, tuple(shape)) for name, dtype, shape in _columns(table)}
    for name, other in recording.repeated.items():
        if kinds[name] != kinds[other]:
            one, two = (f"{dtype} {list(shape)}" for dtype, shape in (kinds[name], kinds[other]))
            message = f"{name} and {other} fill one tied parameter, but are published as {one} and {two}"
            raise PlanError(message, hint="publish only one of these tensors, or untie the parameter")
    return recording.repeated


def _no_tensors() -> PlanError:
    hint = "pass a module or dict that has tensors, or an empty dict to receive new tensors"
    return PlanError("the target has no tensors to fill", hint=hint)


def _new_tensors(table: TensorTable) -> dict[str, torch.Tensor]:
    nbytes = table.nbytes.tolist()
    arena = Arena.allocate(needed_bytes(nbytes))
    flat = arena.bytes_at(0, arena.nbytes)
    return dict(zip(table.names, as_tensors(flat, table.dtypes, table.shapes, arena.place(nbytes)), strict=True))


def _columns(table: TensorTable) -> Iterator[tuple[str, DType, Sequence[int]]]:
    return zip(table.names, table.dtypes, table.shapes, strict=True)


def _tagged(row: ShardRow, tag: str) -> ShardRow:
    return replace(row, form=msgspec.structs.replace(row.form, tag=tag)) if tag and not row.form.tag else row


def _check(recording: Recording, model: torch.nn.Module) -> None:
    # Check only parameters, because the model itself computes buffers such as rotary tables.
    params = dict(model.named_parameters(remove_duplicate=False))
    lacking = [name for name in recording.unfilled if name in params]
    if recording.unrecorded:
        # Tensors that pass through the loader at each update may fill these parameters.
        fillable = recording.fillable
        lacking = [] if fillable is None else [name for name in lacking if name not in fillable]
    if not lacking:
        return
    lines = [f"{name}: {recording.unfilled[name]} of {params[name].numel()} elements" for name in lacking]
    lines = lines[:MAX_LISTED] + ([f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else [])
    unused = ", ".join(recording.unused[:5])
    hint = f"published but not used: {unused}" if unused else "pass strict=False to leave them unfilled"
    hint = prefix_hint(lacking, recording.unused) or hint
    raise PlanError("the publishers do not fill all parameters:\n  " + "\n  ".join(lines), hint=hint)


class ReceiveBuffers:
    """The memory that receives versions: the target's memory, and in staged mode a staging copy.

    Raises:
        BudgetTooSmall: the staging copy needs more than `options.memory_bytes`.
        ConfigError, DeviceOutOfMemory, DestinationError: no transport reaches the memory, or allocation fails.
    """

    def __init__(self, requirements: Requirements, member: str, links: PeerLinks, options: UpdateOptions) -> None:
        memories, staged = regions_of(requirements.rows), options.staged
        needed = sum(memory.nbytes for memory in memories)
        if staged and options.memory_bytes is not None and needed > options.memory_bytes:
            raise BudgetTooSmall(f"the staging copy of a version needs {needed} bytes", minimum_bytes=needed)
        self.wanted = requirements
        # The random address identifies this registration, so that a planner does not reuse old descriptors.
        self.layout: Layout = layout_of(requirements.rows, member, secrets.token_hex(8), memories)
        self.digest = self.layout.digest()
        self.memories = memories
        # Aliases stay with their memory when a flip exchanges the target's memory.
        aliases = aliases_of(memories) if staged else None
        registered = memories if aliases is None else aliases
        # In staged mode without `serve`, the target is registered only if it will become the staging copy.
        self.local_version: LocalVersion | None = None
        self.staging_copy: StagingCopy | None = None
        self._spare: VersionRegions | None = None
        try:
            if options.serve or not staged:
                self.local_version = LocalVersion(self.layout, registered, links)
            elif aliases is not None:
                self._spare = VersionRegions(aliases, links)
            if staged:
                served = self._spare if self.local_version is None else self.local_version.regions
                self.staging_copy = StagingCopy(memories, links, served=None if aliases is None else served)
        except BaseException:
            self.close()
            raise

    def has(self, proven: Iterable[tuple[Strips, U64]], links: PeerLinks) -> bool:
        """Return whether the strips of the target's memory still match these digests."""
        with VersionRegions(self.memories, links) as regions:
            return all(bool((regions.digests(strips) == wanted).all()) for strips, wanted in proven)

    def altered(self, proven: Iterable[tuple[Strips, U64]]) -> list[str]:
        """Return the names of tensors in the staging copy whose bytes no longer match these digests."""
        # Wait before the digests, because a check hook may have queued work on other streams.
        self._synchronize()
        wrong = [strips.at[self.into.digests(strips) != wanted] for strips, wanted in proven]
        if not any(map(len, wrong)):
            return []
        span = np.array([form.span_bytes for form in self.layout.forms], np.int64)[self.layout.form]
        begin = self.layout.offset
        rows = {i for at in np.concatenate(wrong) for i in np.flatnonzero((begin <= at) & (at < begin + span)).tolist()}
        return sorted({self.layout.names[i] for i in rows})

    @property
    def staging_bytes(self) -> int:
        """Return the size of the staging copy and the scratch in bytes, not counting the target's memory."""
        copied = 0 if self.staging_copy is None else self.staging_copy.regions.nbytes
        return copied + self.wanted.scratch_bytes

    @property
    def into(self) -> VersionRegions:
        """Return the memory that a transfer reads into."""
        if self.staging_copy is not None:
            return self.staging_copy.regions
        assert self.local_version is not None
        return self.local_version.regions

    def install(self) -> None:
        """Finish the update when all bytes are in the target's memory and scratch."""
        # Autograd does not detect writes to raw addresses.
        note_written(row.tensor for row in self.wanted.rows[: self.wanted.num_live])
        self.wanted.install()
        self.wanted.finish()
        # The engine resumes on other streams and must not compute with weights that are still being permuted.
        self._synchronize()

    def _synchronize(self) -> None:
        for device in {memory.device for memory in self.memories} - {"cpu"}:
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """Close the registrations and release the staging copy. Idempotent."""
        for memory in (self.local_version, self.staging_copy, self._spare):
            if memory is not None:
                memory.close()
