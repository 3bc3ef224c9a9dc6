"""The client of the hub, with a method for each operation, and the verbs `status`, `why` and `drain`."""

from __future__ import annotations

import os
import secrets
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from penstock.arguments import require_hub_address, require_name, wrong
from penstock.config import ConnectionSettings, Settings
from penstock.errors import (
    MALFORMED,
    ConfigError,
    HubUnavailable,
    NotFound,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceBusy,
    UnknownMember,
    class_named,
    printable,
)
from penstock.http.client import connect_tcp
from penstock.http.control import ControlPool, MalformedAnswer, NoAnswer, PoolClosed, over_tcp, over_unix
from penstock.hub import messages
from penstock.hub.address import HubEndpoint
from penstock.hub.auth import LIFE_HEADER, first_token, member_of
from penstock.hub.job_state import JobState
from penstock.hub.messages import PROTOCOL, Status, Why
from penstock.interrupts import is_of_handler
from penstock.lifecycle import Closeable
from penstock.waits import jitter

TIMEOUT_S = 10.0
"""Deadline for a request with all its retries. Members that the caller already knows stay usable until then."""
ATTEMPT_S = 5.0
"""Deadline for one attempt. A hub on two cores responds to 1,000 members in milliseconds. Source:
benchmarks/results/cpu2_202611/hub.md."""
REACH_S = 20.0
"""Seconds for which `connect` waits for the process that starts this host's hub."""
REST = 4.0
"""A polling loop pauses for this multiple of the last response time, so a slow hub gets fewer requests."""
MAX_REST_S = 5.0
_TLS_PROBE_S = 1.0
"""Deadline for a handshake with a server that does not respond to plain HTTP."""
_MAX_PAUSE_S = 0.5
_ID_LENGTH = len(member_of(""))
_MAX_REASON = 256
T = TypeVar("T")
_FAULT = msgspec.json.Decoder(messages.Fault)
_ERRORS: dict[int, type[PenstockError]] = {
    400: ConfigError,
    401: PermissionDenied,
    403: PermissionDenied,
    404: ConfigError,
    405: ConfigError,
    409: PlanError,
    410: UnknownMember,
    413: PlanError,
    422: PlanError,
    429: SourceBusy,
}


def resolve_connection(connection: ConnectionSettings | str | None) -> ConnectionSettings:
    """Return a verb's settings, with an unset hub or token taken from the environment. Raise ConfigError if invalid."""
    settings, environment = ConnectionSettings.of(connection), Settings.read()
    with _from_variable("PENSTOCK_HUB"):
        settings = msgspec.structs.replace(settings, hub=settings.hub or environment.hub)
    if settings.token_file is not None:
        return msgspec.structs.replace(settings, token=first_token(os.fspath(settings.token_file)), token_file=None)
    with _from_variable("PENSTOCK_TOKEN_FILE"):
        return msgspec.structs.replace(settings, token=settings.token or first_token(environment.token_file))


@contextmanager
def _from_variable(name: str) -> Iterator[None]:
    """Add the name of an environment variable to a ConfigError about the variable's value."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"environment variable {name}: {error.message}", hint=error.hint) from error


class HubClient(Closeable):
    """A thread-safe client of the hub. Every request is safe to repeat, and is retried until its deadline.

    Args:
        token: sent to the hub, and never to another member.
        ca_file: PEM bundle that is trusted in addition to the system's roots.
        certificate: PEM files with this client's certificate and its key, or one file with both.
        timeout_s: deadline of a request.
        life: the secret of the member for which this client speaks. None creates a secret.

    Attributes:
        member: the only member id that the hub accepts from this client.
        is_local: whether the client uses the hub of this host.
    """

    def __init__(
        self,
        endpoint: HubEndpoint,
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        certificate: tuple[Path, Path | None] | None = None,
        timeout_s: float = TIMEOUT_S,
        life: str | None = None,
    ) -> None:
        self._endpoint = endpoint
        life = life or secrets.token_hex(16)
        self.member = member_of(life)
        self.has_token = token is not None
        self._headers = {LIFE_HEADER: life, messages.PROTOCOL_HEADER: PROTOCOL}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._ca_file = ca_file
        self._certificate = certificate
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pool: tuple[str, ControlPool] | None = None
        self._closed = False
        self.is_local = False
        # Duration of the last successful request, with all its attempts.
        self._took_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Return whether the hub is slow but its process is running. See `HubEndpoint`."""
        return self._endpoint.is_busy

    @property
    def rest_s(self) -> float:
        """Return the minimum pause before the next request of a polling loop. See `REST`."""
        return min(REST * self._took_s, MAX_REST_S)

    @classmethod
    def connect(
        cls,
        hub: str | None,
        token: str | None = None,
        *,
        ca_file: Path | None = None,
        certificate: tuple[Path, Path | None] | None = None,
        timeout_s: float = TIMEOUT_S,
        life: str | None = None,
    ) -> HubClient:
        """Connect to the hub at a URL, or with None to the hub of this host and user, which the first caller hosts.

        The default certificates are the files in `PENSTOCK_CA_FILE`, `PENSTOCK_CERT_FILE` and `PENSTOCK_KEY_FILE`.

        Raises:
            ConfigError: the URL is not valid.
            MissingExtra: the URL is None, and Starlette is not installed.
            HubUnavailable: the URL is None, and the hub cannot be hosted.
        """
        endpoint: HubEndpoint
        if hub is None:
            from penstock.hub.local_hub import LocalEndpoint

            endpoint = LocalEndpoint.open()
        else:
            require_hub_address(hub)
            endpoint = HubEndpoint(hub.rstrip("/"))
        settings = Settings.read()
        if certificate is None and settings.cert_file is not None:
            certificate = settings.cert_file, settings.key_file
        ca_file = settings.ca_file if ca_file is None else ca_file
        client = cls(endpoint, token=token, ca_file=ca_file, certificate=certificate, timeout_s=timeout_s, life=life)
        client.is_local = hub is None
        # The hub of this host may have to be started now. The first request connects to a hub with an address.
        if hub is None:
            endpoint.reach(REACH_S)
        return client

    def hello(self, hello: messages.Hello, *, timeout_s: float | None = None) -> messages.Welcome:
        """Join the fleet. Raise PermissionDenied for a wrong token or id, or ConfigError for an incompatible hub."""
        return self._request("POST", "/v1/hello", hello, messages.Welcome, timeout_s=timeout_s)

    def beat(self, member: str, beat: messages.Beat, *, within_s: float | None = None) -> messages.BeatReply:
        """Send a heartbeat with all holdings and syncs. On UnknownMember, call `hello` and send the heartbeat again."""
        path = f"/v1/members/{quote(member, safe='')}"
        # A hub of an earlier release responds with 204, without a body.
        return self._request("PUT", path, beat, messages.BeatReply, within_s=within_s) or messages.BeatReply()

    def leave(self, member: str, *, within_s: float | None = None) -> None:
        """Leave the fleet permanently."""
        self._request("DELETE", f"/v1/members/{quote(member, safe='')}", None, None, within_s=within_s)

    def upstreams(
        self, request: messages.UpstreamsRequest, *, within_s: float | None = None
    ) -> messages.UpstreamsReply:
        """Return the upstreams from which to read chunks. On UnknownMember see `beat`."""
        return self._request("POST", "/v1/flight", request, messages.UpstreamsReply, within_s=within_s)

    def claim(self, request: messages.ClaimRequest) -> messages.ClaimReply:
        """Claim chunks to read from storage. On UnknownMember see `beat`."""
        return self._request("POST", "/v1/claim", request, messages.ClaimReply)

    def sync(self, request: messages.SyncRequest) -> messages.SyncReply:
        """Return the members of a sync, with grants for some of the members. On UnknownMember see `beat`."""
        return self._request("POST", "/v1/sync", request, messages.SyncReply)

    def decide(self, request: messages.DecideRequest) -> messages.DecideReply:
        """Propose or request the decision on a version of a sync. On UnknownMember see `beat`."""
        return self._request("POST", "/v1/decide", request, messages.DecideReply)

    def complain(self, complaint: messages.FaultReport) -> None:
        """Report an unusable source. On UnknownMember see `beat`."""
        self._request("POST", "/v1/complain", complaint, None)

    def status(self, model: str | None = None, *, within_s: float | None = None) -> Status:
        """Return the members and their holdings, for one model or all."""
        query = "" if model is None else f"?model={quote(model, safe='')}"
        return self._request("GET", f"/v1/status{query}", None, Status, within_s=within_s)

    def job(self, state: JobState, *, within_s: float) -> None:
        """Report the state of a conversion, under the id of this client."""
        self._request("PUT", f"/v1/jobs/{self.member}", state, None, within_s=within_s)

    def drain(self, member: str, drain: messages.Drain | None) -> None:
        """Drain a member, or end the drain with None. Raise UnknownMember or PermissionDenied."""
        path = f"/v1/drains/{quote(member, safe='')}"
        self._request("DELETE" if drain is None else "PUT", path, drain, None)

    def why(self, request: messages.WhyRequest) -> Why:
        """Explain why members read a model from their upstreams."""
        return self._request("POST", "/v1/why", request, Why)

    def close(self) -> None:
        """Close the connections, and the hub if this process hosts it. Idempotent."""
        with self._lock:
            # Set the flag before closing the connections, so that a thread whose request fails does not retry.
            self._closed = True
            before, self._pool = self._pool, None
        if before is not None:
            before[1].close()
        self._endpoint.close()

    def _request(
        self,
        method: str,
        path: str,
        body: object,
        reply_type: type[T] | None,
        *,
        within_s: float | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """Send a request until it gets a response, or until the earlier deadline of `timeout_s` and `within_s`.

        Raises:
            HubUnavailable: the deadline passed. The error's `__cause__` is the last failure.
            PenstockError: the hub refused the request. The response's status determines the error class.
        """
        content = None if body is None else msgspec.json.encode(body)
        begun = time.monotonic()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = begun + (timeout_s if within_s is None else min(timeout_s, within_s))
        pause_s = 0.01
        is_first = True
        last: Exception
        while True:
            # Make at least one real attempt. A running hub responds in 1 ms.
            left_s = max(0.05, deadline - time.monotonic())
            attempt_s = min(left_s, ATTEMPT_S)
            url = self._endpoint.reach(left_s)
            pool, prefix = self._connections(url)
            try:
                with pool.connection() as connection:
                    target = prefix + path
                    status, reply = connection.request(method, target, content, self._headers, timeout_s=attempt_s)
            except PoolClosed as error:
                # Another thread closed the pool, because the hub's address changed.
                last = error
                self._drop(pool)
            except OSError as error:
                if is_of_handler(error):
                    raise
                last = error
                # Another attempt would not make the server speak TLS.
                if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
                    message = "the hub at this address does not speak TLS"
                    hint = "write http:// if it was started without --cert, or correct the port"
                    raise ConfigError(message, uri=url, hint=hint) from error
                if is_first and isinstance(error, ConnectionResetError | MalformedAnswer) and _speaks_tls(url):
                    message, hint = "the hub at this address speaks TLS", "write https:// instead of http://"
                    raise ConfigError(message, uri=url, hint=hint) from error
                is_first = False
                # A silent hub cannot be distinguished from a busy hub if the deadline shortened the attempt.
                had_time = attempt_s >= min(ATTEMPT_S, self._timeout_s / 2)
                if isinstance(error, TimeoutError):
                    self._took_s = time.monotonic() - begun
                # Other threads may wait for responses, so keep the pool open.
                self._endpoint.failed(url, silent=had_time and isinstance(error, NoAnswer))
            else:
                self._endpoint.reached()
                self._took_s = time.monotonic() - begun
                # Status 503 is temporary: the hub's store is unavailable, or the hub has too many connections.
                if status != 503:
                    return _decode(status, reply, reply_type, url)
                last = HubUnavailable(printable(_fault(status, reply).error), uri=url)
            if self._closed or time.monotonic() + pause_s >= deadline:
                message = _failure_text(last, time.monotonic() - begun)
                hint = "check that the hub is running and that this host can reach its address"
                if isinstance(last, ssl.SSLCertVerificationError):
                    message = f"the hub's certificate does not verify: {last.verify_message}"
                    hint = "set PENSTOCK_CA_FILE to the certificate that signed it, and use a name that is in it"
                raise HubUnavailable(message, uri=url, hint=hint) from last
            # Members that lost the hub at the same moment must not all return at the same moment.
            time.sleep(pause_s * jitter(0.5, 1.0))
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _connections(self, url: str) -> tuple[ControlPool, str]:
        """Return the connections to an address and the prefix of its paths. Close connections to an earlier address."""
        prefix = "" if url.startswith("unix://") else urlsplit(url).path
        with self._lock:
            if self._closed:
                raise HubUnavailable("this hub client was closed", uri=url)
            if self._pool is not None and self._pool[0] == url:
                return self._pool[1], prefix
            before, self._pool = self._pool, (url, self._open(url))
            opened = self._pool[1]
        if before is not None:
            before[1].close()
        return opened, prefix

    def _open(self, url: str) -> ControlPool:
        if url.startswith("unix://"):
            return ControlPool(over_unix(url.removeprefix("unix://")), "hub")
        parts = urlsplit(url)
        trust: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                trust = ssl.create_default_context()
                if self._ca_file is not None:
                    trust.load_verify_locations(self._ca_file)
                if self._certificate is not None:
                    trust.load_cert_chain(*self._certificate)
            except OSError as error:
                hint = "set PENSTOCK_CA_FILE, PENSTOCK_CERT_FILE and PENSTOCK_KEY_FILE to PEM files"
                raise ConfigError(f"cannot use the certificates for {url}: {error}", hint=hint) from error
        port = parts.port or (443 if trust is not None else 80)
        return ControlPool(over_tcp(parts.hostname or "", port, trust), parts.netloc.rpartition("@")[2])

    def _drop(self, pool: ControlPool) -> None:
        """Drop a closed pool, unless another thread has replaced it, so that the next request opens a new pool."""
        with self._lock:
            if self._pool is not None and self._pool[1] is pool:
                self._pool = None


def _speaks_tls(url: str) -> bool:
    """Return whether a server that did not respond to plain HTTP responds to a TLS handshake. Send nothing else."""
    parts = urlsplit(url)
    if parts.scheme != "http":
        return False
    # The certificate does not matter here.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        connect_tcp(parts.hostname or "", parts.port or 80, _TLS_PROBE_S, context).close()
    except OSError:
        return False
    return True


def _decode(status: int, reply: bytes, reply_type: type[T] | None, url: str) -> T:
    """Return the message in a response, or raise the error for its status."""
    if 200 <= status < 300:
        if reply_type is None or status == 204:
            return None  # type: ignore[return-value]
        try:
            # Decode only the version first, because other fields from a hub of another version may not decode.
            if reply_type is messages.Welcome:
                theirs = msgspec.json.decode(reply, type=messages.AnnouncedVersion).protocol
                if theirs and (difference := messages.version_fault(theirs, "the hub", "this process")):
                    raise ConfigError(difference, uri=url, hint=messages.UPGRADE_HINT)
            return msgspec.json.decode(reply, type=reply_type)
        except MALFORMED as error:
            message = f"the response does not match this version of the protocol: {error}"
            raise HubUnavailable(message, uri=url, hint="compare the outputs of `penstock version`") from error
    fault = _fault(status, reply)
    # An internal error of the hub has no status for its class, only the name of its class.
    least = _ERRORS.get(status, PenstockError if status == 500 else HubUnavailable)
    kind = class_named(fault.kind or "", least)
    kind = HubUnavailable if kind is PenstockError else kind
    raise kind(printable(fault.error), uri=url, hint=printable(fault.hint) or None)


def _failure_text(last: Exception, waited_s: float) -> str:
    if isinstance(last, HubUnavailable):
        return f"the hub refused to serve for {waited_s:.1f} s: {last.message}"
    if isinstance(last, NoAnswer):
        return f"the hub accepted the connection and sent no answer for {waited_s:.1f} s"
    if isinstance(last, ConnectionRefusedError):
        return f"the hub's address refused connections for {waited_s:.1f} s: no process listens there"
    return f"the hub could not be reached for {waited_s:.1f} s: {last or type(last).__name__}"


def _fault(status: int, reply: bytes) -> messages.Fault:
    try:
        return _FAULT.decode(reply)
    except MALFORMED:  # proxies send no `Fault`
        return messages.Fault(error=f"status {status} with a body that did not come from a hub")


def status(model: str | None = None, *, connection: ConnectionSettings | str | None = None) -> Status:
    """Return the members of a fleet, their holdings, their progress and the sources of their bytes.

    Args:
        model: only members that have or fetch this model, or None for all members.
        connection: the hub and its token, or only the hub's address as a str. The default is `PENSTOCK_HUB`, or the
            hub of this host if that variable is not set.

    Raises:
        HubUnavailable: there is no hub.
        PermissionDenied: the hub does not accept the token.
        ConfigError: an argument is wrong.
        MissingExtra: a package is not installed.
    """
    settings = resolve_connection(connection)
    if model is not None:
        require_name("model", model)
    with HubClient.connect(settings.hub, settings.token) as client:
        return client.status(model)


def why(model: str, *, member: str | None = None, connection: ConnectionSettings | str | None = None) -> Why:
    """Return why members read a model from their upstreams and not from others, with one reason per line.

    Args:
        model: the name of the model in the fleet.
        member: id of a member. None means all members.
        connection: see `status`.

    Raises:
        NotFound: there is no such member.
        PenstockError: see `status`.
    """
    settings = resolve_connection(connection)
    require_name("model", model)
    with HubClient.connect(settings.hub, settings.token) as client:
        return client.why(messages.WhyRequest(model=model, member=member))


def drain(
    member: str, *, undo: bool = False, reason: str = "", connection: ConnectionSettings | str | None = None
) -> str:
    """Send no more readers to a member until it leaves or the drain is undone. Return the member's id.

    Current readers finish or continue with other members. The member's own fetches and syncs continue.

    Args:
        member: id of the member, or the beginning of the id as `status` shows it.
        undo: send readers to the member again.
        reason: text for the audit log and the fleet page.
        connection: see `status`. A hub with tokens requires an operator's token.

    Raises:
        NotFound: there is no such member.
        ConfigError: several ids begin with `member`, or an argument is wrong.
        PermissionDenied: the token is not an operator's.
        PenstockError: see `status`.
    """
    settings = resolve_connection(connection)
    require_name("member", member)
    if not isinstance(reason, str) or len(reason) > _MAX_REASON:
        raise wrong("reason", reason, f"a str of at most {_MAX_REASON} characters")
    with HubClient.connect(settings.hub, settings.token) as client:
        # A token limited to some models may not read the list of members. A complete id does not require the list.
        names = [member]
        if len(member) < _ID_LENGTH:
            names = [known.member for known in client.status().members if known.member.startswith(member)]
        if not names:
            raise NotFound(f"no member's id begins with {member!r}", hint="run `penstock status` to list the members")
        if len(names) > 1:
            raise ConfigError(f"{len(names)} members' ids begin with {member!r}", hint="pass more characters of the id")
        try:
            client.drain(names[0], None if undo else messages.Drain(reason=reason))
        except UnknownMember as error:
            raise NotFound(f"unknown member {names[0]}", hint="run `penstock status` to list the members") from error
        return names[0]
