"""The operations of the hub: method, path, message types and the directory's method that answers.

In: nothing. Out: `OPERATIONS`, from which the app makes its routes and the OpenAPI document its paths.
Not here: HTTP (`app`), the answers (`directory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.hub.auth import Caller
from penstock.hub.directory import Directory
from penstock.hub.messages import (
    Beat,
    ClaimReply,
    ClaimRequest,
    Complaint,
    Hello,
    Status,
    UpstreamsReply,
    UpstreamsRequest,
    Welcome,
    Why,
    WhyRequest,
)
from penstock.hub.sync_messages import SyncReply, SyncRequest

FAULTS = {
    400: "the caller speaks another major version of the protocol",
    401: "no token, or not one of this hub's",
    403: "not for this caller, or another process's member",
    409: "the holding contradicts itself",
    410: "the member is not known: register it again (hello)",
    413: "the body is too large",
    422: "the body or a parameter is not what the schema says",
    429: "this caller asks for that too often",
    503: "the hub's store does not answer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of the hub: its method and path, its message types, and the function that answers."""

    name: str
    method: str
    path: str
    about: str
    takes: type | None = None
    gives: type | None = None
    models: Callable[[Any], Iterable[str]] = lambda _: ()
    """Models that the body names, which the caller's token must allow."""
    answer: Callable[[Directory, str, Any, Caller], Any]
    """Called with the directory, the parameter in path or query, the body, and the caller."""
    speaker: Callable[[str, Any], str] | None = None
    """Returns, from the parameter and the body, the member spoken for, whose secret the caller must show."""


def _in_path(parameter: str, _: Any) -> str:
    return parameter


def _in_body(_: str, body: Any) -> str:
    return str(body.member)


def _model_of(request: UpstreamsRequest | ClaimRequest) -> Iterable[str]:
    return (request.holding.identity.model,)


OPERATIONS = (
    Operation(
        name="hello", method="POST", path="/v1/hello", about="A process life joins.", takes=Hello, gives=Welcome,
        speaker=_in_body,
        answer=lambda directory, _, body, caller: directory.hello(body, caller),
    ),
    Operation(
        name="beat", method="PUT", path="/v1/members/{member}", about="A heartbeat, with all that the member holds.",
        takes=Beat, speaker=_in_path,
        models=lambda beat: (
            *(holding.identity.model for holding in beat.holdings), *(state.name for state in beat.syncs),
        ),
        answer=lambda directory, member, body, caller: directory.beat(member, body),
    ),
    Operation(
        name="leave", method="DELETE", path="/v1/members/{member}", about="A member signs off.",
        speaker=_in_path,
        answer=lambda directory, member, _, caller: directory.leave(member),
    ),
    Operation(
        name="flight", method="POST", path="/v1/flight", about="Members to read chunks from, with grants.",
        takes=UpstreamsRequest, gives=UpstreamsReply, models=_model_of, speaker=_in_body,
        answer=lambda directory, _, body, caller: directory.upstreams(body),
    ),
    Operation(
        name="claim", method="POST", path="/v1/claim", about="Chunks to read from storage.",
        takes=ClaimRequest, gives=ClaimReply, models=_model_of, speaker=_in_body,
        answer=lambda directory, _, body, caller: directory.claim(body),
    ),
    Operation(
        name="sync", method="POST", path="/v1/sync", about="Members of a sync, with grants.",
        takes=SyncRequest, gives=SyncReply, models=lambda request: (request.name,),
        speaker=_in_body, answer=lambda directory, _, body, caller: directory.sync(body),
    ),
    Operation(
        name="complain", method="POST", path="/v1/complain", about="A source could not be used.", takes=Complaint,
        speaker=_in_body,
        answer=lambda directory, _, body, caller: directory.complain(body, caller),
    ),
    Operation(
        name="status", method="GET", path="/v1/status", about="Members and what they hold.", gives=Status,
        answer=lambda directory, model, _, caller: directory.status(model or None),
    ),
    Operation(
        name="why", method="POST", path="/v1/why", about="Reasons why members read a model from their upstreams.",
        takes=WhyRequest, gives=Why, models=lambda request: (request.model,),
        answer=lambda directory, _, body, caller: directory.why(body),
    ),
)  # fmt: skip
