"""Sources of one version in other processes, reached through their servers.

In: the members of the sync, the sources of a part. Out: a `SourceLink` for each.
Not here: choosing the sources (`sync.planner`), reading their memory (`source_read`).

The source of a transfer as a receiver sees it: its map, and its digests of strips.

In: a `LocalVersion` of this process, or a connection to another member. Out: `SourceLink`.
Not here: requests to other processes (`sources`), reading (`transfer`).

Reads from one source: choose a transport per pair of regions, request digests, read a step and wait for it.

In: a link, the receiver's regions, a step. Out: the source's digests, and its bytes in the receiver's memory.
Not here: the order of steps, comparing digests (`transfer`).

Choice between a publisher's plain tensors and its tagged ones, for one receiver.

In: the publishers' tensors, with tags; the requested tags, or the model. Out: a table, and the tag of each of its
names.
Not here: recording a loader with the table (`sync.recording.record`), making tagged tensors
(`sync.publish.transformed`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.digest.strip import Strips
from penstock.errors import Cancelled, DestinationError, NotFound, PenstockError, PlanError, SourceStalled
from penstock.hub.messages import TableReply
from penstock.loader.tensor import torch_dtype
from penstock.peer.local_weights import tabulate
from penstock.sync.local_version import Answer, LocalVersion, Regions, VersionMap
from penstock.sync.membership import Membership
from penstock.sync.receive.batches import Step
from penstock.sync.recording.layout import live_tensors
from penstock.transform.formats import Format, format_of, is_format
from penstock.transport.protocol import Descriptor, Handle, Pending, Reaching, Striding, Transport, wait_all
from penstock.types import U64, DType, TensorTable


class SourceLink(Protocol):
    """A link to one source of one version, while a receiver reads from it. Used by several threads at once."""

    @property
    def member(self) -> str:
        """Return the member's id, as in the plan's sources."""
        ...

    @property
    def map(self) -> VersionMap:
        """Return the map of the version and generation to read."""
        ...

    @property
    def same_host(self) -> bool:
        """Return whether the source is on this host."""
        ...

    @property
    def same_process(self) -> bool:
        """Return whether the source is this process."""
        ...

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        """Return the source's digests of strips of its memory, of the map's version and generation.

        See `LocalVersion.digests`.

        Raises:
            StaleDescriptor: the source has another version now.
            PeerLost, SourceUnavailable: the source is gone, or does not answer.
        """
        ...


class LocalLink:
    """A `SourceLink` to a `LocalVersion` of this process.

    Args:
        local_version: must have a version.
        same_process: False reads it as if it were in another process of this host.
    """

    same_host = True

    def __init__(self, local_version: LocalVersion, *, same_process: bool = True) -> None:
        self.local_version, self.map, self.same_process = local_version, local_version.map(), same_process
        self.member = local_version.layout.member

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        """See `SourceLink.digests`."""
        return self.local_version.digests(
            strips, version=self.map.version, generation=self.map.generation, wait_s=wait_s
        )


_fits_local: type[SourceLink] = LocalLink


ASK_S = 1.0
"""How long one request waits at the source for its version, before it is repeated."""
# Each source is one round trip that mostly waits: enough threads that hundreds of sources open in a few rounds.
_AT_ONCE = 16


class PeerLink:
    """A `SourceLink` to another member, through its server.

    Args:
        membership: the sessions with members.
        member: the member's id.
        version_map: its map of the version to read.
        same_host: whether it is on this host.
    """

    same_process = False

    def __init__(self, membership: Membership, member: str, version_map: VersionMap, *, same_host: bool) -> None:
        self._membership, self.member, self.map, self.same_host = membership, member, version_map, same_host
        self._channels, self._num_channels = list[str](), itertools.count()

    def digests(self, strips: Strips, *, wait_s: float) -> Answer:
        """See `SourceLink.digests`."""
        # Threads that ask at the same time use a channel each: an answer can wait for rows, and on one connection the
        # others would wait behind it. `list.pop` and `append` are atomic, so the free list needs no lock.
        version, generation = self.map.version, self.map.generation
        try:
            channel = self._channels.pop()
        except IndexError:
            channel = f"digests {next(self._num_channels)}"
        try:
            return self._membership.ask(
                self.member,
                lambda sync_client: sync_client.digests(strips, version, generation, wait_s),
                channel=channel,
            )
        finally:
            self._channels.append(channel)


class SourceFailed(Exception):
    """Failure of one source, so that the caller can go on without it; `error` is the reason."""

    def __init__(self, member: str, error: PenstockError) -> None:
        super().__init__(member)
        self.member, self.error = member, error


def open_links(membership: Membership, members: Sequence[str], version: int, stall_s: float) -> dict[str, SourceLink]:
    """Return links to all members, each with its map of the version.

    Raises:
        SourceFailed: a member cannot be reached, is past the version, or did not begin it within `stall_s`.
    """
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(members)))) as pool:
        links = list(pool.map(lambda member: _open(membership, member, version, stall_s), members))
    return {link.member: link for link in links}


def _open(membership: Membership, member: str, version: int, stall_s: float) -> SourceLink:
    deadline = time.monotonic() + stall_s
    try:
        while True:
            try:
                version_map = membership.ask(member, lambda sync_client: sync_client.version_map(version, ASK_S))
                break
            except NotFound as error:
                if time.monotonic() > deadline:
                    message = f"the source did not begin version {version} within {stall_s:g} s"
                    raise SourceStalled(message, uri=f"penstock:{member}") from error
        return PeerLink(membership, member, version_map, same_host=membership.is_near(member))
    except PenstockError as error:
        raise SourceFailed(member, error) from error


_fits: type[SourceLink] = PeerLink


WAIT_S = 0.5
"""A request for digests is repeated after this time, so that a run that ended stops within half a second."""


class SourceRead:
    """The reads from one source during one run. Used by several threads.

    Attributes:
        path: the transports in use, `shm` or several.
        why: the reason why no nearer transport is used.
    """

    def __init__(self, link: SourceLink, into: Regions) -> None:
        self.link, self._into = link, into
        self.member = link.member
        self._routes: dict[tuple[int, int], tuple[Transport, Descriptor, str]] = {}
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        """Names of the transports in use, nearest first."""
        return "+".join(dict.fromkeys(transport.name for transport, _, _ in self._routes.values()))

    @property
    def why(self) -> str:
        """Return why no nearer transport is used."""
        return "; ".join(dict.fromkeys(why for _, _, why in self._routes.values() if why))

    @property
    def is_ready(self) -> bool:
        """Return whether the source had all rows from the start, so that reads need not wait for its digests."""
        return self.link.map.is_ready

    def ask(self, strips: Strips, *, stall_s: float, is_over: Callable[[], bool]) -> U64:
        """Return the source's digests of its strips, once they are ready.

        Raises:
            SourceStalled: no further row of the source became ready for `stall_s`.
            Cancelled: the run is over.
            PenstockError: from the link.
        """
        seen, moved = -1, time.monotonic()
        while not is_over():
            answer = self.link.digests(strips, wait_s=min(WAIT_S, stall_s))
            if answer.digests is not None:
                if len(answer.digests) != len(strips):
                    message = f"the source answered with {len(answer.digests)} digests for {len(strips)} strips"
                    raise SourceStalled(message, uri=self.member)
                return answer.digests
            # Rows anywhere count, not only those of these strips: a source that quantises layer by layer reaches the
            # last layers long after the first.
            if answer.num_ready != seen:
                seen, moved = answer.num_ready, time.monotonic()
            elif time.monotonic() - moved > stall_s:
                message = f"no row of the source became ready for {stall_s} s, after {seen} rows"
                raise SourceStalled(message, uri=self.member)
        raise Cancelled("the run is over")

    def read(self, step: Step, *, stall_s: float) -> tuple[PenstockError | None, bool]:
        """Read a step; return the first error, and whether a byte was written, once no read is under way any more."""
        return wait_all(self._posting(step), stall_s=stall_s)

    def _posting(self, step: Step) -> Iterator[tuple[Transport, Pending]]:
        """Post the reads of a step, one by one as the caller iterates."""
        for theirs, ours, rows in step.reads:
            transport, descriptor, _ = self._route(theirs, ours)
            into = self._into.handles(ours)[transport.name]
            if isinstance(transport, Striding):
                yield transport, transport.post_rectangles(into, descriptor, rows)
            else:
                yield transport, transport.post_read(into, descriptor, rows.segments())

    def _route(self, theirs: int, ours: int) -> tuple[Transport, Descriptor, str]:
        """Return the transport and descriptor for a pair of regions, chosen at its first read."""
        # Under the lock, so that two threads do not pin the same peer memory twice.
        with self._lock:
            route = self._routes.get((theirs, ours))
            if route is None:
                handles = self._into.handles(ours)
                route = self._choose(theirs, handles)
                if route[0].name == "pinned_shm" and isinstance(route[0], Reaching):
                    # Pinning a peer's memory can fail at first use, for example by the limit of locked memory. The
                    # next nearest transport reads the same bytes, only slower.
                    try:
                        route[0].reach(handles["pinned_shm"], route[1])
                    except DestinationError as error:
                        nearest = {name: handle for name, handle in handles.items() if name != "pinned_shm"}
                        transport, descriptor, why = self._choose(theirs, nearest)
                        route = transport, descriptor, f"{why}; pinned_shm: {error.message}".removeprefix("; ")
                self._routes[theirs, ours] = route
            return route

    def _choose(self, theirs: int, handles: Mapping[str, Handle]) -> tuple[Transport, Descriptor, str]:
        link = self.link
        return self._into.links.choose(
            handles, link.map.regions[theirs], same_host=link.same_host, same_process=link.same_process
        )


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
