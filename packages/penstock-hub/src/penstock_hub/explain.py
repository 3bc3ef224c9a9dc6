"""Explains from which members a member reads a model, and which identities, states or complaints exclude members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice

from penstock.hub.messages import Identity, WhyRequest
from penstock_hub.relay import TREE_NAMES
from penstock_hub.snapshot import HoldingEntry, HubSnapshot, SyncEntry

# A fleet of 1,000 members would fill a terminal with a line for each pair. The limit also limits the response's size.
_MAX_LINES = 200
_DEMOTED = "demoted for everyone"


def explain_lines(
    request: WhyRequest, views: Mapping[str, HubSnapshot], syncs: Mapping[str, SyncEntry]
) -> tuple[str, ...]:
    """Return at most 200 lines about the requested weights and sync. `views` contains the snapshots by key."""
    if not views and not syncs:
        return (
            f"no member has, fetches, publishes or receives {request.model}. "
            "`penstock status` lists the names in use. If it is right, a first fetch with a fallback reads storage",
        )
    # A line for each pair of 1,000 members would take seconds, so create only the lines that are returned.
    of_weights = _lines(request, views) if views else iter(())
    lines = list(islice(chain(_of_sync(request, syncs), of_weights), _MAX_LINES + 1))
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [
            "... and more lines" if request.member else "... and more lines. Name a member to see fewer."
        ]
    return tuple(lines)


def _lines(request: WhyRequest, views: Mapping[str, HubSnapshot]) -> Iterator[str]:
    """Yield the explanation for an identity, for one member, or for all members that fetch the model."""
    # A process that has not joined yet has an identity and no holding.
    if request.identity is not None:
        yield from _of_identity(request.identity, request.identity.key(), views)
        return
    readers = [
        (key, name, holder)
        for key, view in sorted(views.items())
        for name, holder in sorted(view.held.items())
        if (request.member == name if request.member else holder.holding.state == "filling")
    ]
    if not readers:
        yield (
            f"{request.member} does not have or fetch {request.model}"
            if request.member
            else f"no member is fetching {request.model}"
        )
        for key, view in sorted(views.items()):
            for name, holder in sorted(view.held.items()):
                demoted = f"; {_DEMOTED}" if view.demoted(name) else ""
                yield f"{name} {_state_text(holder)} under key {key[:8]}{_path_text(holder)}{demoted}"
        yield from _between_keys(views)
        return
    for key, name, holder in readers:
        yield from _of_member(key, name, holder, views)


def _of_sync(request: WhyRequest, syncs: Mapping[str, SyncEntry]) -> Iterator[str]:
    """Yield the members of a sync, publishers first, with the version, state and path of each."""
    published = [entry.state.version for entry in syncs.values() if entry.state.side == "publisher"]
    newest = max(published, default=-1)
    if syncs and not published:
        yield f"sync {request.model} has no publisher now. Subscribers keep their version."
    for name, entry in sorted(syncs.items(), key=lambda item: (item[1].state.side, item[1].state.rank, item[0])):
        state = entry.state
        if request.member not in (None, name):
            continue
        version = "no version yet" if state.version < 0 else f"version {state.version}"
        behind = newest - state.version if state.side == "subscriber" and state.version >= 0 else 0
        facts = [f"{version}, {behind} behind" if behind > 0 else version, state.state]
        facts += [text for text in (state.fleet, f"path of its bytes: {state.path}" if state.path else "") if text]
        who = f"{name[:8]} {entry.hello.name}"
        yield f"sync {state.name}: {who} is {state.side} {state.rank} of {state.world_size}: {'; '.join(facts)}"


def _of_member(key: str, name: str, holder: HoldingEntry, views: Mapping[str, HubSnapshot]) -> Iterator[str]:
    """Yield a member's upstreams, and for every other member the reason why it is or is not an upstream."""
    view = views[key]
    if holder.holding.state != "filling":
        yield f"{name} {_state_text(holder)} and needs no upstream{_path_text(holder)}"
        return
    orders = view.orders(name, holder.holding.num_chunks)
    paths = [", then ".join(order) if order else "storage alone" for order in orders]
    if len(paths) > 1:
        paths = [f"{path} for {chunks} chunks" for path, chunks in zip(paths, TREE_NAMES, strict=True)]
    yield f"{name} {_state_text(holder)} and reads from {', and from '.join(paths)}{_path_text(holder)}"
    for other, theirs in sorted(view.held.items()):
        if other != name:
            yield f"  {other}: {_between(name, holder, other, theirs, view, orders)}"
    yield from (f"  {line}" for line in _of_identity(holder.holding.identity, key, views, ours=False))


def _between(
    name: str,
    holder: HoldingEntry,
    other: str,
    theirs: HoldingEntry,
    view: HubSnapshot,
    orders: tuple[tuple[str, ...], ...],
) -> str:
    """Return why member `name` reads from `other` or not. `orders` lists the upstreams of `name` in each tree."""
    facts = [_state_text(theirs)]
    if theirs.holding.num_chunks != holder.holding.num_chunks:
        facts.append(f"divides the weights into {theirs.holding.num_chunks} chunks and not {holder.holding.num_chunks}")
    facts += [
        f"{complaint.member} complains: {complaint.fault} {complaint.detail}".rstrip()
        for complaint in view.complaints
        if complaint.of == other
    ]
    if view.demoted(other):
        facts.append(_DEMOTED)
    if other in view.drained:
        facts.append("an operator drains it, so it gets no readers")
    if 0 < theirs.holding.max_readers <= theirs.holding.num_readers:
        facts.append(f"busy with {theirs.holding.num_readers} of at most {theirs.holding.max_readers} readers")
    ranks = [order.index(other) if other in order else -1 for order in orders]
    if max(ranks) >= 0:
        for chunks, rank in zip(TREE_NAMES, ranks, strict=False):
            of_chunks = f" for {chunks} chunks" if len(orders) > 1 else ""
            if rank >= 0:
                facts.append(f"parent{of_chunks}" if rank == 0 else f"substitute, number {rank}{of_chunks}")
    elif name in {theirs.holding.parent, theirs.holding.second_parent}:
        facts.append("reads from it")
    else:
        facts.append("not among its upstreams: others are nearer, further ahead, or it is a descendant")
    return "; ".join(facts)


def _of_identity(identity: Identity, key: str, views: Mapping[str, HubSnapshot], *, ours: bool = True) -> Iterator[str]:
    """Yield whether weights of an identity can be read from each member. `ours` includes equal identities."""
    for other, view in sorted(views.items()):
        for name, holder in sorted(view.held.items()):
            if other == key:
                if ours:
                    can = "it admits no new reader" if holder.holding.state == "draining" else "it can be read"
                    yield f"{name} {_state_text(holder)}: the identities are equal, {can}"
                continue
            differing = identity.differences(holder.holding.identity)
            words = "; ".join(
                f"{field}: {mine or 'empty'} is not {theirs or 'empty'}" for field, (mine, theirs) in differing.items()
            )
            yield f"{name}: cannot be read, because the identities differ: {words}"


def _between_keys(views: Mapping[str, HubSnapshot]) -> Iterator[str]:
    """Yield the identity fields that separate the keys of one model, each compared with the first key."""
    identities = [
        (key, next(iter(view.held.values())).holding.identity) for key, view in sorted(views.items()) if view.held
    ]
    for key, identity in identities[1:]:
        # All pairs of n keys would repeat most differences n times.
        first, of_first = identities[0]
        words = "; ".join(f"{name}: {a!r} is not {b!r}" for name, (a, b) in of_first.differences(identity).items())
        yield f"keys {first[:8]} and {key[:8]} cannot share bytes, because the identities differ: {words}"


def _path_text(holder: HoldingEntry) -> str:
    """Describe the path of a member's bytes and the reason for it."""
    holding = holder.holding
    why = f" ({holding.why})" if holding.why else ""
    return f"; path of its bytes: {holding.path}{why}" if holding.path else ""


def _state_text(holder: HoldingEntry) -> str:
    holding = holder.holding
    if holding.state == "whole":
        return "is whole"
    return f"is {holding.state} with {holder.num_have} of {holding.num_chunks} chunks"
