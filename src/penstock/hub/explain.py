"""Explain in words why members read a model from their upstreams: differing identities, states, complaints.

In: a question, what the hub knows of each key. Out: lines for people. Not here: the answer's transport (`app`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.hub.identity import Identity
from penstock.hub.messages import WhyRequest
from penstock.hub.snapshot import HoldingEntry, HubSnapshot

_MAX_LINES = 200


def explain_lines(request: WhyRequest, views: Mapping[str, HubSnapshot]) -> tuple[str, ...]:
    """Return the explanation, at most 200 lines."""
    if not views:
        return (f"nobody has or wants {request.model}: the first to ask reads storage",)
    found = list(_lines(request, views))
    if len(found) > _MAX_LINES:
        found[_MAX_LINES:] = [f"... and {len(found) - _MAX_LINES} lines more: name a member"]
    return tuple(found)


def _lines(request: WhyRequest, views: Mapping[str, HubSnapshot]) -> Iterator[str]:
    if request.identity is not None:
        yield from _of_identity(request.identity, request.identity.key(), views)
        return
    askers = [
        (key, name, held)
        for key, view in sorted(views.items())
        for name, held in sorted(view.held.items())
        if (request.member == name if request.member else held.holding.state == "filling")
    ]
    if not askers:
        if request.member:
            yield f"{request.member} neither has nor wants {request.model}"
        else:
            yield f"nobody waits for {request.model}"
        for key, view in sorted(views.items()):
            for name, held in sorted(view.held.items()):
                demoted = f"; {words}" if (words := _demoted(view, name)) else ""
                yield f"{name} {_has(held)} under key {key[:8]}{_came(held)}{demoted}"
        yield from _between_keys(views)
        return
    for key, name, held in askers:
        yield from _of_member(key, name, held, views)


def _of_member(key: str, name: str, held: HoldingEntry, views: Mapping[str, HubSnapshot]) -> Iterator[str]:
    view = views[key]
    if held.holding.state != "filling":
        yield f"{name} {_has(held)}: it takes from nobody{_came(held)}"
        return
    order = view.relay(held.holding.num_chunks).upstreams(name)
    yield f"{name} {_has(held)} and takes from {', then '.join(order) if order else 'storage alone'}{_came(held)}"
    for other, theirs in sorted(view.held.items()):
        if other != name:
            yield f"  {other}: {_between(name, held, other, theirs, view, order)}"
    yield from (f"  {line}" for line in _of_identity(held.holding.identity, key, views, ours=False))


def _between(
    name: str, held: HoldingEntry, other: str, theirs: HoldingEntry, view: HubSnapshot, order: tuple[str, ...]
) -> str:
    facts = [_has(theirs)]
    if theirs.holding.num_chunks != held.holding.num_chunks:
        facts.append(f"cuts the line into {theirs.holding.num_chunks} chunks, not {held.holding.num_chunks}")
    facts += [
        f"{complaint.member} complains: {complaint.fault} {complaint.detail}".rstrip()
        for complaint in view.complaints
        if complaint.of == other
    ]
    if words := _demoted(view, other):
        facts.append(words)
    if 0 < theirs.holding.max_readers <= theirs.holding.num_readers:
        facts.append(f"busy with {theirs.holding.num_readers} readers of at most {theirs.holding.max_readers}")
    if other in order:
        facts.append("parent" if order[0] == other else f"stands in, number {order.index(other)}")
    elif theirs.holding.parent == name:
        facts.append("takes from it")
    else:
        facts.append("not among its upstreams: others are nearer, further ahead, or it hangs below")
    return "; ".join(facts)


def _of_identity(identity: Identity, key: str, views: Mapping[str, HubSnapshot], *, ours: bool = True) -> Iterator[str]:
    for other, view in sorted(views.items()):
        for name, held in sorted(view.held.items()):
            if other == key:
                if ours:
                    can = "it lets nobody new in" if held.holding.state == "draining" else "it can be taken from"
                    yield f"{name} {_has(held)}: the identities are equal, {can}"
                continue
            differing = identity.differences(held.holding.identity)
            words = "; ".join(
                f"{field}: {mine or 'empty'} is not {theirs or 'empty'}" for field, (mine, theirs) in differing.items()
            )
            yield f"{name}: cannot be taken from, the identities differ: {words}"


def _between_keys(views: Mapping[str, HubSnapshot]) -> Iterator[str]:
    """Yield the identity fields that keep the keys of one model apart, each compared with the first."""
    found = [(key, next(iter(view.held.values())).holding.identity) for key, view in sorted(views.items()) if view.held]
    for key, identity in found[1:]:
        first, of_first = found[0]
        words = "; ".join(f"{name}: {a!r} is not {b!r}" for name, (a, b) in of_first.differences(identity).items())
        yield f"key {first[:8]} and key {key[:8]} are not exchanged, the identities differ: {words}"


def _came(held: HoldingEntry) -> str:
    """Return the path of a member's bytes and the reason for it."""
    holding = held.holding
    why = f" ({holding.why})" if holding.why else ""
    return f"; its bytes came by: {holding.path}{why}" if holding.path else ""


def _demoted(view: HubSnapshot, name: str) -> str:
    """Return that a member is the last choice for everyone, and why; empty: it is not."""
    if not view.demoted(name):
        return ""
    why = ": it signed digests that are not the revision's" if name in view.proven else ""
    return f"demoted for everyone{why}"


def _has(held: HoldingEntry) -> str:
    holding = held.holding
    if holding.state == "whole":
        return "is whole"
    return f"is {holding.state} with {held.num_have} of {holding.num_chunks} chunks"
