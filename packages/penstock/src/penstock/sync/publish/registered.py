"""The registration of a trainer rank's tensors: what is on offer, and the memory that receivers read.

In: a module or tensors by name, how they are offered. Out: an `Offer` and its `LocalVersion`, which are made again when
the tensors have moved.
Not here: whether tensors moved (`sync.placed`), the moment of a version (`publisher`).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.errors import ConfigError
from penstock.lifecycle import Closeable
from penstock.logs import log_named
from penstock.peer.member import Member
from penstock.plan.layout import Layout
from penstock.sync.local_version import LocalVersion
from penstock.sync.membership import Membership
from penstock.sync.placed import Placed, is_at
from penstock.sync.publish.offer import Offer, VersionSnapshot
from penstock.sync.publish.transformed import Transforms
from penstock.sync.shards import Declarable, ShardRow, declared, layout_of, regions_of, to_arenas
from penstock.transport.protocol import Memory
from penstock.transport.storages import RegisteredStorages
from penstock.types import Box, DType

_LISTED = 5

log = log_named("penstock.sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferOptions:
    """How a rank offers its tensors; see `publisher`."""

    copies: str | None
    """The place that versions are copied to, `device` or `cpu`. None: they are not copied."""
    transforms: Transforms | None
    keep_plain: bool
    arena: bool
    memory_bytes: int | None
    pack_bytes: int
    world_size: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Registration:
    """One registration: what is on offer, and the memory that receivers read."""

    offer: Offer
    local_version: LocalVersion
    snapshot: VersionSnapshot | None
    storages: RegisteredStorages

    def close(self) -> None:
        """End the registrations. Idempotent."""
        self.offer.close()
        if self.snapshot is not None:
            self.snapshot.close()
        self.local_version.close()


def warn_of_state_dict(name: str, params: torch.nn.Module | Mapping[str, Declarable]) -> None:
    """Log a warning if tensors are those of `state_dict()`, which cannot be followed.

    They are detached: the module may get other memory, and they keep the former. Nothing leads from them to the module.
    """
    # Torch marks a state dict by `_metadata`. `keep_vars=True` leaves the parameters themselves in it.
    if isinstance(params, torch.nn.Module) or not hasattr(params, "_metadata"):
        return
    if not any(isinstance(value, torch.nn.Parameter) for value in params.values()):
        log.warning(
            "the publisher of %r has the tensors of a state dict: if parameters of the module get other memory "
            "(`.data =`, a cast, offloading), it publishes the former values; pass the module itself",
            name,
        )


class Registered(Closeable):
    """The tensors of one rank, registered for receivers, and registered again by `follow` after they moved.

    Attributes:
        layout: the layout of the newest registration.
        digest: its digest.

    Args:
        params: a module or tensors by name; kept, because its tensors are looked up again.
        options: how they are offered.

    Raises:
        See `publisher`.
    """

    layout: Layout
    digest: str

    def __init__(self, params: torch.nn.Module | Mapping[str, Declarable], options: OfferOptions) -> None:
        self._params = params
        self._options = options
        # Connects an offer to those of the other ranks; None: `connect` was not called yet.
        self._connect: Callable[[Offer], None] | None = None
        self._registration: _Registration | None = None
        if options.arena:
            to_arenas(params)
        self._rows = declared(params)
        self._placed = Placed(params)
        # Before anything is registered: an offer that is refused must not have joined a fleet.
        self._offer: Offer | None = self._make_offer()

    def register(self, member: Member) -> None:
        """Register the tensors with the transports of this process. Order: once, before anything else."""
        self._member = member
        self._register(self.offer)

    @property
    def is_empty(self) -> bool:
        """Return whether this rank has no tensors."""
        return not self._rows

    @property
    def served(self) -> LocalVersion | None:
        """Return the memory as receivers read it: that of the tensors, or a copy. None: nothing is registered."""
        registration = self._registration
        return None if registration is None else registration.local_version

    @property
    def local_version(self) -> LocalVersion:
        """Return the memory as receivers read it. Order: while the tensors are registered."""
        return self._registered().local_version

    @property
    def offer(self) -> Offer:
        """Return the rows on offer. Order: after `follow`, which raises where there is no offer."""
        assert self._offer is not None
        return self._offer

    @property
    def snapshot(self) -> VersionSnapshot | None:
        """Return the copy that receivers read; None: they read the tensors. Order: while they are registered."""
        return self._registered().snapshot

    def _registered(self) -> _Registration:
        assert self._registration is not None, "`follow` comes first"
        return self._registration

    def connect(self, sync: Membership, *, rank: int) -> None:
        """Join the exchange of the ranks, where there is one. Order: before the first version."""
        world_size = self._options.world_size
        self._connect = lambda offer: offer.connect(sync, rank=rank, world_size=world_size)
        self._connect(self.offer)

    def follow(self, before_end: Callable[[], None]) -> bool:
        """Register the tensors that the module or mapping has now, if any of them moved; return whether one did.

        Args:
            before_end: called before the former registration ends.

        Raises:
            ConfigError: they have other names, dtypes or shapes; names them. The registration is as before.
            PlanError: one cannot be declared, such as one whose memory was freed. The registration is as before.
            Others as `publisher`: nothing is registered, and the next call tries again.

        Order: while nothing reads the parameters.
        """
        registration = self._registration
        is_there = registration is not None and registration.storages.are_there()
        if is_there and self._placed.is_same():
            return False
        rows = declared(self._params)
        require_same(self._rows, rows)
        regions_of(rows)  # raises for tensors without memory
        if is_there and _are_in_place(self._rows, rows):
            # The objects differ and the memory does not, as after FSDP2 has sharded the parameters again.
            self._placed.refresh()
            return False
        if registration is not None:
            before_end()
            registration.close()
        # All references to the former memory, and to the copy: a device rarely has room for two.
        self._registration = registration = self._offer = None
        if self._options.arena:
            to_arenas(self._params)
            rows = declared(self._params)
        self._rows = rows
        self._placed.refresh()
        offer = self._make_offer()
        self._register(offer)
        self._offer = offer
        return True

    def _make_offer(self) -> Offer:
        options = self._options
        return Offer(
            self._rows,
            options.transforms,
            keep_plain=options.keep_plain,
            world_size=options.world_size,
            copies=options.copies,
            memory_bytes=options.memory_bytes,
        )

    def _register(self, offer: Offer) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(offer.close)
            local_version, snapshot = self._serve(stack, offer)
            # Here and not when a receiver first asks: engines would wait for it, and a live publish for them.
            local_version.regions.warm_up()
            if self._connect is not None:
                self._connect(offer)
            # From here on `close` ends the registrations.
            stack.pop_all()
        self.layout, self.digest = local_version.layout, local_version.layout.digest()
        self._registration = _Registration(
            offer=offer,
            local_version=local_version,
            snapshot=snapshot,
            storages=RegisteredStorages((*offer.memories, *offer.filled)),
        )

    def _serve(self, stack: contextlib.ExitStack, offer: Offer) -> tuple[LocalVersion, VersionSnapshot | None]:
        """Return the memory that readers see, registered until the stack is left: the offer's own, or a copy."""
        options, links = self._options, self._member.links
        memories: tuple[Memory, ...] = (*offer.memories, *offer.filled)
        layout = layout_of(offer.rows, self._member.id, "", memories)
        # A new address for each registration: a planner that knows the old layout must not reuse its descriptors.
        address = secrets.token_hex(8)
        if options.copies is None:
            layout = replace(layout, address=address)
            local_version = LocalVersion(layout, memories, links, pack_bytes=options.pack_bytes)
            stack.callback(local_version.close)
            return local_version, None
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
        return snapshot.local_version, snapshot

    def close(self) -> None:
        """End the registrations. Idempotent."""
        if self._registration is not None:
            self._registration.close()


def require_same(before: Iterable[ShardRow], now: Iterable[ShardRow]) -> None:
    """Check that these are the same boxes of the same tensors; strides and places may differ.

    Raises:
        ConfigError: names the tensors that differ.
    """
    were, are = _boxes(before), _boxes(now)
    if were == are:
        return
    names = sorted({box[0] for box in were ^ are})
    some = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    raise ConfigError(
        f"these tensors have another dtype or shape than when the publisher was made, or are gone or new: {some}",
        tensor=names[0],
        hint="close this publisher, and make a new publisher of the tensors as they are now",
    )


def _boxes(rows: Iterable[ShardRow]) -> set[tuple[str, tuple[DType, tuple[int, ...], Box, str]]]:
    return {(row.name, row.form.values) for row in rows}


def _are_in_place(before: Sequence[ShardRow], now: Sequence[ShardRow]) -> bool:
    """Return whether each row is a view of the same memory as before."""
    return all(
        mine.name == other.name and mine.form == other.form and is_at(mine.tensor, other.tensor)
        for mine, other in zip(before, now, strict=True)
    )
