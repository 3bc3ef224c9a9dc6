"""A target's memory while the engine sleeps, and versions that are restored from outside the sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch

from penstock.cuda.device_memory import DeviceMemory, memory_of
from penstock.digest.strip import Strips
from penstock.errors import (
    ConfigError,
    DestinationError,
    DeviceOutOfMemory,
    IntegrityError,
    NotFound,
    PeerLost,
    PenstockError,
    PlanError,
    SourceError,
    StaleDescriptor,
)
from penstock.loader.tensor import torch_dtype, torch_shape
from penstock.memory.arena import ALIGN_BYTES
from penstock.memory.targets import sources_differ
from penstock.report import names_text
from penstock.sync.memory_digests import MemoryDigests, named_tensors
from penstock.sync.receive.leases import Leases
from penstock.sync.receive.staged import Staged
from penstock.sync.receive.states import SubscriberState, SubscriberStates
from penstock.sync.receive.target import Target
from penstock.sync.receive.update import UpdateLoop
from penstock.sync.recording.layout import cut, writing
from penstock.sync.recording.requirements import Requirements
from penstock.sync.report import UpdateReport
from penstock.sync.shards import ShardRow
from penstock.timing import Timing
from penstock.transport.choose import PeerLinks
from penstock.types import U64, Box, DType


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """A version stored outside the sync, for `Subscriber.restore`."""

    version: int
    weights: str | Callable[[], Iterable[tuple[str, torch.Tensor]]]
    """A URI as for `penstock.stream`, or a function that returns pairs of name and tensor with the checkpoint's names,
    for example from a weight cache (`attach`) or a fleet (`join`)."""

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and tensors. Tensors from a URI are on `device`."""
        if isinstance(self.weights, str):
            # Most subscribers read no storage, so import the loader here.
            from penstock.loader.load import stream

            with stream(self.weights, device) as tensors:
                yield from tensors
        else:
            yield from self.weights()


class ReleasedMemory:
    """The freed storages of a target. `kept_bytes` counts the bytes of filled tensors whose memory cannot be freed."""

    def __init__(self, target: Target, requirements: Requirements) -> None:
        filled, others = _sorted_out(target, requirements)
        self._kept_tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        # Storages that torch cannot resize, but whose physical memory can be unmapped. Their addresses stay the same.
        self._remappable: list[DeviceMemory] = []
        self.freed_bytes = self.kept_bytes = 0
        for storage, mine in filled.values():
            nbytes = storage.nbytes()
            unfilled = others.get(storage.data_ptr(), [])
            # A storage may also contain tensors outside the target. Free it only if the target fills it except gaps.
            covered = sum(tensor.numel() * tensor.itemsize + ALIGN_BYTES for tensor in (*mine, *unfilled))
            remappable = memory_of(storage.data_ptr())
            if not (storage.resizable() or remappable) or covered < nbytes:
                self.kept_bytes += nbytes
                continue
            self._kept_tensors += [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in unfilled]
            if remappable is not None:
                self._remappable.append(remappable)
            else:
                self._storages.append((storage, nbytes))
            self.freed_bytes += nbytes
        for memory in self._remappable:
            memory.unmap()
        for storage, _ in self._storages:
            storage.resize_(0)
        if self._remappable or any(storage.device.type == "cuda" for storage, _ in self._storages):
            # Do not leave the memory in torch's cache, because another process needs it.
            torch.cuda.empty_cache()

    def take_back(self) -> None:
        """Allocate the storages again. Idempotent. Callers may retry after DeviceOutOfMemory or DestinationError."""
        for memory in self._remappable:
            try:
                try:
                    memory.renew()
                except DeviceOutOfMemory:
                    torch.cuda.empty_cache()
                    memory.renew()
            except DeviceOutOfMemory as error:
                error.mutated = True
                raise
        for storage, nbytes in self._storages:
            if storage.nbytes() == nbytes:
                continue
            try:
                storage.resize_(nbytes)
            except torch.OutOfMemoryError as error:
                message = f"{storage.device} has too little memory for {nbytes} bytes of released weights"
                raise DeviceOutOfMemory(
                    message, mutated=True, hint="free memory on the device, and restore again"
                ) from error
            except RuntimeError as error:
                # torch's allocator for host memory raises no more specific error.
                raise DestinationError(
                    f"cannot allocate {nbytes} bytes of host memory: {error}", mutated=True
                ) from error
        with writing(tensor for tensor, _ in self._kept_tensors):
            for tensor, value in self._kept_tensors:
                tensor.copy_(value)


def _sorted_out(
    target: Target, requirements: Requirements
) -> tuple[dict[int, tuple[torch.UntypedStorage, list[torch.Tensor]]], dict[int, list[torch.Tensor]]]:
    filled: dict[int, tuple[torch.UntypedStorage, list[torch.Tensor]]] = {}
    others: dict[int, list[torch.Tensor]] = {}
    seen: set[tuple[int, int, int]] = set()

    def note(tensor: torch.Tensor, *, is_filled: bool) -> None:
        storage = tensor.untyped_storage()
        # Count tied tensors once, because they share memory under several names.
        key = storage.data_ptr(), int(tensor.storage_offset()), tensor.numel()
        if tensor.numel() and key not in seen:
            seen.add(key)
            if is_filled:
                filled.setdefault(storage.data_ptr(), (storage, []))[1].append(tensor)
            else:
                others.setdefault(storage.data_ptr(), []).append(tensor)

    if isinstance(target, torch.nn.Module):
        for name, tensor in named_tensors(target):
            # Treat non-persistent buffers as unfilled, because no checkpoint contains them.
            note(tensor, is_filled=name is not None and name not in requirements.unfilled)
    for row in requirements.rows:
        note(row.tensor, is_filled=True)
    return filled, others


class ReleasedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The version that was live when a subscriber released its weights, and the data needed to restore it."""

    name: str
    epoch: str
    version: int
    proven: list[tuple[Strips, U64]]
    memory: ReleasedMemory | None
    """None if the engine frees the memory, and allocates it again before a restore."""
    digests: MemoryDigests | None

    def read_stored(
        self, update_loop: UpdateLoop, stored: StoredVersion, links: PeerLinks, error: PenstockError
    ) -> Staged:
        """Fill the target from a stored version after an update raised `error`. Verify the released version."""
        begun = time.perf_counter()
        if update_loop.checkpoint is None:
            raise error
        is_same = stored.version == self.version and bool(self.proven) and not update_loop.follow()
        buffers = update_loop.allocate_again(self.proven if is_same else [])
        requirements = buffers.wanted
        device = torch.device(next((memory.device for memory in buffers.memories), "cpu"))
        nbytes = fill(requirements, stored.tensors(device))
        read = time.perf_counter()
        if is_same and not buffers.has(self.proven, links):
            message = f"the stored version {stored.version} of {self.name!r} differs from the version that was live"
            raise IntegrityError(message, mutated=True, hint="pass the number of the stored version")
        buffers.install()
        # A version without an epoch is not served, because its bytes may differ from the trainer's.
        epoch = self.epoch if is_same else ""
        staged = update_loop.unread(stored.version, epoch, begun, origin="restore")
        report = msgspec.structs.replace(
            staged.report,
            nbytes=nbytes,
            verified_bytes=nbytes,
            version_bytes=nbytes,
            phases={"plan": 0.0, "wire": read - begun, "install": time.perf_counter() - read},
            path=stored.weights if isinstance(stored.weights, str) else "given tensors",
            why=(f"version {stored.version} was read from outside the sync: {error.message}",),
        )
        return msgspec.structs.replace(staged, report=report)

    def take_in_place(self, update_loop: UpdateLoop) -> Staged:
        """Verify the bytes that the engine itself has restored."""
        begun = time.perf_counter()
        if self.digests is None:
            raise ConfigError("there are no digests of the memory", hint="call release(free=False, returns=True) first")
        if not self.digests.is_same():
            message = f"the engine restored version {self.version} of {self.name!r} with different bytes"
            raise IntegrityError(message, mutated=True, hint="call restore(), which reads the version from the sync")
        if update_loop.checkpoint is not None:
            update_loop.allocate_again(self.proven)
        return update_loop.unread(self.version, self.epoch, begun, origin="restore")


class Release(msgspec.Struct, eq=False):
    """The weights of a subscriber while its engine sleeps. Only one thread at a time may release or restore weights."""

    name: str
    target: Target
    states: SubscriberStates
    update_loop: UpdateLoop
    leases: Leases
    links: PeerLinks
    timing: Timing
    released: ReleasedVersion | None = None

    def require_awake(self) -> None:
        """Raise ConfigError if the weights are released."""
        if self.states.at_rest is SubscriberState.RELEASED:
            raise ConfigError(f"the weights of {self.name!r} are released", hint="call restore()")

    def release(self, *, free: bool, returns: bool) -> int:
        """See `Subscriber.release`."""
        states, loop = self.states, self.update_loop
        if states.at_rest is SubscriberState.RELEASED:
            raise ConfigError(f"the weights of {self.name!r} are already released", hint="call restore()")
        if free and loop.requirements is None:
            message = f"the tensors that a version of {self.name!r} fills are unknown before the first version"
            raise ConfigError(message, hint="call prepare() or update() first, or release(free=False)")
        target = self.target if isinstance(self.target, torch.nn.Module | Mapping) else None
        if returns:
            self._require_returnable(target, free=free)
        self.leases.close_to_readers()
        try:
            digests = MemoryDigests.of_target(target) if returns and target is not None else None
            epoch, version = states.live.epoch, states.version
            self.update_loop.withdraw()
            states.enter(SubscriberState.RELEASED)
            # Close the registrations first, because a registration of unmapped memory cannot be closed.
            proven = loop.free()
            memory = ReleasedMemory(self.target, loop.requirements) if free and loop.requirements else None
            self.released = ReleasedVersion(
                name=self.name, epoch=epoch, version=version, proven=proven, memory=memory, digests=digests
            )
        finally:
            self.leases.open_to_readers()
        return 0 if memory is None else memory.freed_bytes

    def _require_returnable(self, target: torch.nn.Module | Mapping[str, object] | None, *, free: bool) -> None:
        if free:
            message = f"with free=True no engine can restore the weights of {self.name!r}"
            raise ConfigError(message, hint="call release(free=False, returns=True)")
        if target is None:
            message = f"the target of {self.name!r} is a function, and its tensors cannot be digested"
            raise ConfigError(message, hint="pass the tensors to subscriber(), or call release() with returns=False")
        if self.states.at_rest is SubscriberState.DIRTY:
            message = f"the target of {self.name!r} has parts of several versions, so it cannot be restored"
            raise ConfigError(message, hint="call release() with returns=False, or update() first")

    def restore(
        self,
        stored: StoredVersion | None,
        timeout_s: float | None,
        *,
        in_place: bool,
        update: Callable[[float | None], UpdateReport],
        flip: Callable[[Callable[[], Staged]], UpdateReport],
    ) -> UpdateReport:
        """See `Subscriber.restore`. `update` receives a version within a timeout, and `flip` makes it live."""
        released = self.released
        if released is None or self.states.at_rest is not SubscriberState.RELEASED:
            raise ConfigError(f"the weights of {self.name!r} are not released", hint="call update()")
        if in_place:
            return flip(lambda: released.take_in_place(self.update_loop))
        if released.memory is not None:
            released.memory.take_back()
        limit_s = self.timing.version_grace_s if stored is not None and timeout_s is None else timeout_s
        try:
            return update(limit_s)
        except (SourceError, PeerLost, IntegrityError) as error:
            if stored is None:
                if isinstance(error, NotFound | PeerLost | StaleDescriptor):
                    error.hint = "start a publisher, or a subscriber that has a version, or pass stored=StoredVersion()"
                raise
            self.states.enter(SubscriberState.RELEASED)
            cause = error
            return flip(lambda: released.read_stored(self.update_loop, stored, self.links, cause))


def fill(requirements: Requirements, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Copy a checkpoint's tensors into the target's rows. Return the bytes. Raise PlanError on a mismatch."""
    rows: dict[str, list[int]] = {}
    for number, row in enumerate(requirements.rows):
        rows.setdefault(row.name, []).append(number)
    # Tied rows share memory, and a stored version may contain some or all of the rows' names.
    home = {number: group[0] for group in requirements.tied for number in group}
    filled: dict[int, str] = {}
    nbytes = 0
    for name, tensor in tensors:
        for number in rows.pop(name, ()):
            row, at = requirements.rows[number], home.get(number, number)
            shard = _shard(row, tensor)
            if at not in filled:
                with writing([row.tensor]):
                    row.tensor.copy_(shard)
                nbytes += row.tensor.nbytes
            elif not _is_same(row.tensor, shard):
                error = sources_differ(filled[at], name)
                error.mutated = True
                raise error
            filled[at] = name
    lacking = [name for name, mine in rows.items() if any(home.get(number, number) not in filled for number in mine)]
    if lacking:
        raise PlanError(
            f"the stored version lacks {names_text(lacking, 10)}",
            mutated=True,
            hint="pass a stored version that contains all tensors of the publishers",
        )
    return nbytes


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, other.to(tensor.device))]
    return torch.equal(*flat)


def _shard(row: ShardRow, tensor: torch.Tensor) -> torch.Tensor:
    form = row.form
    wanted = torch_dtype(form.dtype), torch_shape(form.dtype, form.shape)
    if (tensor.dtype, tuple(tensor.shape)) != wanted:
        message = f"stored as {tensor.dtype} {list(tensor.shape)}, published as {wanted[0]} {list(wanted[1])}"
        raise PlanError(message, tensor=row.name, mutated=True)
    # A region is given in elements, but torch stores two F4 elements as one.
    if form.dtype is DType.F4 and form.box != Box.full(form.shape):
        raise PlanError("cannot restore a part of an F4 tensor from storage", tensor=row.name, mutated=True)
    return tensor if form.dtype is DType.F4 else cut(tensor, form.box)
