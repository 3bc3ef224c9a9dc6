"""The registration of a trainer rank's tensors: an `Offer` and its `LocalVersion`, created again if tensors move."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping

import msgspec
import torch

from penstock.errors import ConfigError
from penstock.lifecycle import Closeable
from penstock.logs import log_named
from penstock.peer.member import Member
from penstock.plan.layout import Layout
from penstock.report import names_text
from penstock.sync.local_version import LocalVersion
from penstock.sync.membership import Membership
from penstock.sync.placed import Placed, is_at
from penstock.sync.publish.offer import Offer, OfferOptions, VersionSnapshot
from penstock.sync.shards import Declarable, ShardRow, declared, layout_of, regions_of, to_arenas
from penstock.transport.protocol import Memory
from penstock.transport.storages import RegisteredStorages

log = log_named("penstock.sync")


class _Registration(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """An offer, and the memory that receivers read."""

    offer: Offer
    local_version: LocalVersion
    snapshot: VersionSnapshot | None
    storages: RegisteredStorages

    def close(self) -> None:
        self.offer.close()
        if self.snapshot is not None:
            self.snapshot.close()
        self.local_version.close()


def warn_of_state_dict(name: str, params: torch.nn.Module | Mapping[str, Declarable]) -> None:
    """Log a warning if the tensors come from `state_dict()`, because they do not follow the module to new memory."""
    # Torch marks a state dict with `_metadata`. With `keep_vars=True` it contains the parameters themselves.
    if isinstance(params, torch.nn.Module) or not hasattr(params, "_metadata"):
        return
    if not any(isinstance(value, torch.nn.Parameter) for value in params.values()):
        log.warning(
            "the publisher of %r has the tensors of a state dict. If the module's parameters get other memory "
            "(`.data =`, a cast, offloading), it publishes the old values. Pass the module instead",
            name,
        )


class Registered(Closeable):
    """The tensors of one rank, registered for reads by receivers. `follow` registers tensors again after they moved."""

    layout: Layout
    digest: str

    def __init__(self, params: torch.nn.Module | Mapping[str, Declarable], options: OfferOptions) -> None:
        self._params = params
        self._options = options
        self._connect: Callable[[Offer], None] | None = None
        self._registration: _Registration | None = None
        if options.arena:
            to_arenas(params)
        self._rows = declared(params)
        self._placed = Placed(params)
        # Create the offer before registering, because a process with an invalid offer must not join a fleet.
        self._offer: Offer | None = Offer(self._rows, options)

    def register(self, member: Member) -> None:
        """Register the tensors with the transports of this process. Call this first."""
        self._member = member
        self._register(self.offer)

    @property
    def is_empty(self) -> bool:
        """Return whether this rank has no tensors."""
        return not self._rows

    @property
    def served(self) -> LocalVersion | None:
        """Return the memory that receivers read, or None if nothing is registered."""
        registration = self._registration
        return None if registration is None else registration.local_version

    @property
    def local_version(self) -> LocalVersion:
        """Return the memory that receivers read. Call this only while the tensors are registered."""
        return self._registered().local_version

    @property
    def offer(self) -> Offer:
        """Return the offer. Call this only after `follow` has succeeded."""
        assert self._offer is not None
        return self._offer

    @property
    def snapshot(self) -> VersionSnapshot | None:
        """Return the copy that receivers read, or None if receivers read the parameters."""
        return self._registered().snapshot

    def _registered(self) -> _Registration:
        assert self._registration is not None, "call `follow` first"
        return self._registration

    def connect(self, sync: Membership, *, rank: int) -> None:
        """Join the boundary exchange if a format quantises in blocks. Call this before the first version."""
        world_size = self._options.world_size
        self._connect = lambda offer: offer.connect(sync, rank=rank, world_size=world_size)
        self._connect(self.offer)

    def follow(self, before_end: Callable[[], None]) -> bool:
        """If tensors moved, call `before_end`, and register the tensors again. Return whether any moved.

        Raises:
            ConfigError: names, dtypes or shapes changed. The old registration stays.
            PlanError: a tensor cannot be declared. The old registration stays.
            PenstockError: see `publisher`. After this error nothing is registered, and the next call retries.
        """
        registration = self._registration
        is_there = registration is not None and registration.storages.are_there()
        if is_there and self._placed.is_same():
            return False
        rows = declared(self._params)
        require_same(self._rows, rows)
        regions_of(rows)  # raises an error for tensors without memory
        pairs = zip(self._rows, rows, strict=True)
        if is_there and all(a.name == b.name and a.form == b.form and is_at(a.tensor, b.tensor) for a, b in pairs):
            # The objects are new but their memory is the same, for example after FSDP2 has resharded the parameters.
            self._placed.refresh()
            return False
        if registration is not None:
            before_end()
            registration.close()
        # Drop all references to the old copy, because a device rarely has memory for two copies.
        self._registration = registration = self._offer = None
        if self._options.arena:
            to_arenas(self._params)
            rows = declared(self._params)
        self._rows = rows
        self._placed.refresh()
        offer = Offer(rows, self._options)
        self._register(offer)
        self._offer = offer
        return True

    def _register(self, offer: Offer) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(offer.close)
            options, links = self._options, self._member.links
            memories: tuple[Memory, ...] = (*offer.memories, *offer.filled)
            layout = layout_of(offer.rows, self._member.id, "", memories)
            # Change the address, so that a planner that knows the old layout does not reuse its descriptors.
            address = secrets.token_hex(8)
            snapshot: VersionSnapshot | None = None
            if options.copies is None:
                layout = msgspec.structs.replace(layout, address=address)
                local_version = LocalVersion(layout, memories, links, pack_bytes=options.pack_bytes)
                stack.callback(local_version.close)
            else:
                snapshot = VersionSnapshot(
                    layout,
                    offer.memories,
                    links,
                    address=address,
                    on_host=options.copies == "cpu",
                    filled=offer.filled,
                    pack_bytes=options.pack_bytes,
                )
                stack.callback(snapshot.close)
                local_version = snapshot.local_version
            # Load the kernels now. At a receiver's first request, engines and a live publish would wait for loading.
            local_version.regions.warm_up()
            if self._connect is not None:
                self._connect(offer)
            stack.pop_all()
        self.layout, self.digest = local_version.layout, local_version.layout.digest()
        self._registration = _Registration(
            offer=offer, local_version=local_version, snapshot=snapshot, storages=RegisteredStorages(memories)
        )

    def close(self) -> None:
        """End the registrations. Idempotent."""
        if self._registration is not None:
            self._registration.close()


def require_same(before: Iterable[ShardRow], now: Iterable[ShardRow]) -> None:
    """Raise ConfigError unless the rows are the same regions of the same tensors. Strides and addresses may differ."""
    were, are = ({(row.name, row.form.values) for row in rows} for rows in (before, now))
    if were == are:
        return
    names = sorted({box[0] for box in were ^ are})
    some = names_text(names, 5)
    raise ConfigError(
        f"tensors changed their dtype or shape, disappeared or appeared since the publisher was created: {some}",
        tensor=names[0],
        hint="close this publisher and create a new one with the current tensors",
    )
