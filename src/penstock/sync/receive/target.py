"""The tensors that a subscriber fills, as rows, and the memory that receives them.

In: a module with or without a loader, or tensors by name; the checkpoint's table.
Out: `Requirements`, `ReceiveBuffers`.
Not here: recording (`sync.recording.record`), rows of records (`sync.recording.requirements`), receiving
(`subscriber`).

Staging copy: second memory of the same size that a version is read into, and the flip that makes it live.

In: live memory, and the strips of it that a part fills. Out: registered memory of the same sizes; the copy, and its
seconds.
Not here: reading (`transfer`), pausing the engine (`subscriber`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from penstock.digest.strip import Strips
from penstock.errors import BudgetTooSmall, PlanError
from penstock.lifecycle import Closing
from penstock.memory.arena import Arena
from penstock.memory.rehome import rehome
from penstock.plan.intersect import MAX_LISTED
from penstock.plan.layout import Layout
from penstock.plan.sync import Part
from penstock.sync.copy_plan import Copy
from penstock.sync.local_version import LocalVersion, Regions
from penstock.sync.recording.layout import Load, Recording
from penstock.sync.recording.requirements import Requirements, record, wanted
from penstock.sync.shards import Declarable, Row, Shard, declared, layout_of, regions_of
from penstock.transport.choose import Links
from penstock.transport.protocol import Memory
from penstock.types import TensorTable


def received(part: Part) -> Strips:
    """Return the strips of the receiver's memory that a part fills."""
    return Strips(at=part.dst, run_bytes=part.run_bytes, num_rows=part.num_rows, pitch=part.dst_pitch)


def allocate_like(memories: Sequence[Memory]) -> list[Memory]:
    """Allocate arenas of the same sizes on the same devices.

    Raises:
        DeviceOutOfMemory, DestinationError: there is not enough memory.
    """
    copies = []
    for memory in memories:
        arena = Arena.allocate(max(memory.nbytes, 1), memory.device)
        copies.append(Memory(address=arena.address, nbytes=memory.nbytes, device=arena.device, owner=arena))
    return copies


class StagingCopy(Closing):
    """Second memory for a target's regions, as large as they are, on the same devices; a context manager.

    Attributes:
        regions: the memory that a `Transfer` reads into, in place of the live regions.

    Args:
        live: the live regions' memory, in the layout's order; never moved.
        links: the transports that register the staging memory.

    Raises:
        DeviceOutOfMemory, DestinationError: there is not enough memory.
        ConfigError: no transport reaches it.
    """

    def __init__(self, live: Sequence[Memory], links: Links) -> None:
        self._live = tuple(live)
        self.regions = Regions(allocate_like(live), links)
        self._copies: dict[str, Copy] = {}

    def flip(self, part: Part, *, stall_s: float = 30.0) -> float:
        """Copy the strips that the part filled to the live memory, and return the seconds.

        Raises:
            DestinationError: the device failed; the live memory is a mix of two versions.

        Order: while nothing reads the live memory; after the work queued on the current stream. Cost: one pass on the
            device; the copies are prepared at the first flip of a plan.
        """
        # Only the strips of the part: the rest of a region belongs to the engine, and may have changed since. One
        # prepared copy is enough, because a new plan replaces the old one for good.
        if part.key not in self._copies:
            self._copies = {part.key: Copy(self._live, self.regions.memories, received(part))}
        return self._copies[part.key].run(stall_s=stall_s)

    def close(self) -> None:
        """End the registrations and release the memory. Idempotent."""
        self.regions.close()
        self._copies.clear()


Target = torch.nn.Module | Mapping[str, Declarable]
"""A module whose loader is recorded, or tensors by the checkpoint's names."""


def wanted_of(
    target: Target, table: TensorTable, load: Load | None, *, strict: bool, tags: Mapping[str, str] | None = None
) -> Requirements:
    """Return the target's requirements of the checkpoint.

    Args:
        target, load, strict: see `subscriber`.
        table: names, dtypes and shapes.
        tags: the tags of the names that are read under a tag.

    Raises:
        PlanError: names, dtypes or shapes do not match; see `record` and `wanted`. With `strict`, a module has
            parameters that no tensor of the checkpoint fills; lists them.
    """
    if isinstance(target, torch.nn.Module):
        device = next((tensor.device for tensor in target.parameters()), torch.device("cpu"))
        recording = record(target, table, load=load, device=device)
        if strict:
            _check(recording, target)
        return wanted(target, recording, table, load=load, tags=tags)
    return Requirements.as_declared([_tagged(row, (tags or {}).get(row.name, "")) for row in declared(target)])


def _tagged(row: Row, tag: str) -> Row:
    """Return the row with a tag, unless it has one already."""
    return replace(row, form=replace(row.form, tag=tag)) if tag and not row.form.tag else row


def _check(recording: Recording, model: torch.nn.Module) -> None:
    """Raise PlanError if no published tensor fills some of the parameters."""
    params = dict(model.named_parameters(remove_duplicate=False))
    lacking = [name for name in recording.unfilled if name in params]
    # Tensors that pass through the loader at each update may fill the rest: that cannot be known before.
    if not lacking or recording.unrecorded:
        return
    lines = [f"{name}: {recording.unfilled[name]} of {params[name].numel()} elements" for name in lacking]
    lines = lines[:MAX_LISTED] + ([f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else [])
    unused = ", ".join(recording.unused[:5])
    hint = f"published and not used: {unused}" if unused else "pass strict=False if they are not to be published"
    raise PlanError("the publishers do not fill all parameters:\n  " + "\n  ".join(lines), hint=hint)


def to_arenas(params: Target) -> None:
    """Move the declared tensors into one arena per device; see `memory.rehome`."""
    if isinstance(params, torch.nn.Module):
        named: dict[str, torch.Tensor] = {**dict(params.named_parameters()), **dict(params.named_buffers())}
    else:
        named = {}
        for name, value in params.items():
            parts = [value] if isinstance(value, torch.Tensor | Shard) else value
            for number, part in enumerate(parts):
                named[f"{name} {number}"] = part.tensor if isinstance(part, Shard) else part
    rehome({name: tensor._local_tensor if isinstance(tensor, DTensor) else tensor for name, tensor in named.items()})
    if isinstance(params, torch.nn.Module):
        # FSDP2 keeps references to its shards' memory from the first forward on, and takes new ones when a module is
        # converted: without this it would compute with the memory that the parameters were moved out of.
        params._apply(lambda tensor: tensor)


class ReceiveBuffers:
    """The memory that receives versions: the target's own, and in staged mode a staging copy.

    Attributes:
        wanted: the rows, and the steps after their arrival.
        local_version: the target's memory, served to others once it has a version; None: it is not served.
        layout, digest: the layout for the planner, and its digest.
        into: the memory that a transfer reads into.

    Args:
        requirements: the rows to receive.
        member: the id of this member.
        links: its transports.
        staged: whether to receive into a staging copy.
        serve: whether others may read the target between updates.
        memory_bytes: bound of the staging copy; None: as much as it needs.

    Raises:
        BudgetTooSmall: the staging copy needs more than `memory_bytes`.
        DeviceOutOfMemory, DestinationError: there is not enough memory. ConfigError: no transport reaches the memory.
    """

    def __init__(
        self,
        requirements: Requirements,
        member: str,
        links: Links,
        *,
        staged: bool,
        serve: bool,
        memory_bytes: int | None,
    ) -> None:
        memories = regions_of(requirements.rows)
        needed = sum(memory.nbytes for memory in memories)
        if staged and memory_bytes is not None and needed > memory_bytes:
            raise BudgetTooSmall(f"the staging copy of a version needs {needed} bytes", minimum_bytes=needed)
        self.wanted = requirements
        # A new address for each registration: a planner that knows the old layout must not reuse its descriptors.
        self.layout: Layout = layout_of(requirements.rows, member, secrets.token_hex(8), memories)
        self.digest = self.layout.digest()
        self._memories = memories
        self.local_version = LocalVersion(self.layout, memories, links) if serve or not staged else None
        self._staging_copy: StagingCopy | None = None
        try:
            if staged:
                self._staging_copy = StagingCopy(memories, links)
        except BaseException:
            self.close()
            raise

    @property
    def into(self) -> Regions:
        """Return the memory that a transfer reads into."""
        if self._staging_copy is not None:
            return self._staging_copy.regions
        assert self.local_version is not None
        return self.local_version.regions

    def flip(self, part: Part, *, stall_s: float) -> None:
        """Copy what was received to the target; nothing to do in direct mode."""
        if self._staging_copy is not None:
            self._staging_copy.flip(part, stall_s=stall_s)

    def install(self) -> None:
        """Finish the update once all bytes are in the target's memory and scratch."""
        self.wanted.install()
        self.wanted.finish()
        # The engine resumes on streams of its own: without this it could compute with weights that are still being
        # permuted or cast.
        for device in {memory.device for memory in self._memories} - {"cpu"}:
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """End the registrations and free the staging copy. Idempotent."""
        for memory in (self.local_version, self._staging_copy):
            if memory is not None:
                memory.close()
