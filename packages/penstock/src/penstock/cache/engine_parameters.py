"""Processed parameters: what an engine made of a checkpoint (fused, sharded, cast) is kept for the next engine like it.

In: a module with processed parameters, and a name for them. Out: the same module over the cache's memory.
Not here: keeping (`weight_cache`), attaching (`attached`), the names by which engines look for them (adapters).

    engine: offer --HandOver--> cache: fetch from the engine, verify, keep
    engine: attach, bind its module to the kept memory, leave: its own memory is free

The cache listens at its Unix socket, in a directory that only this user can enter; the file `accepts` there
names the device whose parameters it takes. It takes bytes only from members of the fleet, by grants of the hub.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import msgspec
import torch

from penstock.arguments import require_name, require_type
from penstock.cache import attached
from penstock.cache.attached import Attached, attach, match_parameters
from penstock.config import ConnectionSettings, Settings
from penstock.errors import (
    MALFORMED,
    BudgetTooSmall,
    NotFound,
    OperationFailed,
    PenstockError,
    PlanError,
)
from penstock.fetcher.join import join
from penstock.http.control import ControlConnection, over_unix
from penstock.hub.client import resolve_connection
from penstock.hub.messages import Fault
from penstock.loader.into import own_state
from penstock.memory.arena import needed_bytes
from penstock.net.unix_sockets import private_directory, private_socket_fault
from penstock.peer.local_weights import device_id
from penstock.peer.server import MAX_BODY_BYTES, SOCKET_NAME, Query

HANDLER = "keep"
"""Name of the requests at the cache's server."""
ACCEPTS = "accepts"
"""File beside a cache's socket with the id of the device that it takes parameters for."""
_SHOWN = 3


class HandOver(msgspec.Struct, frozen=True, kw_only=True):
    """A request to keep weights that a member of this host offers."""

    model: str
    revision: str
    """The `w1-` root of their digests."""
    nbytes: int
    """Memory that they take, gaps between tensors included."""
    parallel: dict[str, str] = {}
    """Parallel coordinates of the process; others of the same model have other parameters."""

    @property
    def key(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """Return the key of these parameters: they are kept once, however many engines hand them over."""
        return self.model, self.revision, tuple(sorted(self.parallel.items()))


class HandOverState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a request at the cache."""

    state: Literal["filling", "kept", "failed"]
    error: str = ""
    hint: str = ""
    minimum_bytes: int = 0
    """If the cache's limit is too small: what it would have to be."""


class HandOverHandler:
    """The cache's side: starts to keep what is handed over, in a thread, and tells its state. See `RequestHandler`.

    Args:
        keep: keeps what a request names; called by the executor's thread, once for each request that is new.
        executor: one thread; two models at once would need memory for both.
    """

    def __init__(self, keep: Callable[[HandOver], None], executor: Executor) -> None:
        self._keep = keep
        self._executor = executor
        self._started: dict[tuple[str, str, tuple[tuple[str, str], ...]], Future[None]] = {}

    def answer(self, verb: str, path: list[str], query: Query, body: Callable[[int], bytes]) -> object:
        """Return the state of what the body names; start to keep it if it is new. Repeated after a failure: again."""
        wanted = msgspec.msgpack.decode(body(MAX_BODY_BYTES), type=HandOver)
        if verb != "POST" or path:
            raise NotFound("no such path")
        # Of one connection's thread each: two engines may hand over the same parameters at once, and one is enough.
        running = self._started.get(wanted.key)
        if running is None:
            try:
                self._started[wanted.key] = self._executor.submit(self._keep, wanted)
            except RuntimeError as error:
                raise NotFound("this weight cache is leaving") from error
            return HandOverState(state="filling")
        if not running.done():
            return HandOverState(state="filling")
        failure = running.exception()
        if failure is None:
            return HandOverState(state="kept")
        # Another thread may have done so, too.
        self._started.pop(wanted.key, None)
        if not isinstance(failure, PenstockError):
            return HandOverState(state="failed", error=repr(failure), hint="report it: it is an error of Penstock")
        minimum = failure.minimum_bytes if isinstance(failure, BudgetTooSmall) else 0
        return HandOverState(state="failed", error=failure.message, hint=failure.hint or "", minimum_bytes=minimum)

    def forget(self, model: str) -> None:
        """Take a model again if it is handed over again: it was dropped."""
        for key in [key for key in list(self._started) if key[0] == model]:
            self._started.pop(key, None)


def cache_parameters(
    module: torch.nn.Module,
    model: str,
    *,
    connection: ConnectionSettings | str | None = None,
    verify: bool = True,
) -> Attached:
    """Give a module's parameters to the cache of this host, and bind the module to the kept memory.

    The next process with the same module calls `attach(model)` and `attach_into(module)`: it needs no checkpoint, no
    loader and no copy.

    Args:
        module: its parameters and persistent buffers are finished; contiguous, on one device. Tied ones stay tied.
        model: the name under which they are kept. It must tell apart whatever makes parameters differ: the revision of
            the checkpoint, the engine and its version, dtype, quantisation, the rank.
        connection: as of `join`; the cache must be at the same hub.
        verify: digest the kept bytes in this process, too, before the module is bound to them; see `attach`.

    Returns:
        The attached weights. The module holds them; close this, or drop it, with the module.

    Raises:
        NotFound: no cache on this host accepts parameters for this device: `penstock cache --accept`.
        PlanError: a tensor is of a class of its own, as quantised ones are, or is not contiguous.
        BudgetTooSmall: the cache's `memory_bytes` has no room. OperationFailed: it could not keep them; says why.
        PenstockError: as `join` and `attach`. The module is as it was before.

    Cost: the cache copies the bytes once; until the module is bound, this host has them twice.
    """
    require_name("model", model)
    require_type("the target", module, torch.nn.Module, "a torch.nn.Module")
    tensors = _plain_tensors(module)
    devices = {tensor.device for tensor in tensors.values() if tensor.numel()}
    if len(devices) != 1:
        raise PlanError(
            f"the module's parameters are on {len(devices)} devices", hint="hand over one device's at a time"
        )
    device = devices.pop()
    connection = resolve_connection(connection)
    server = _cache_of(device)
    with join(model, connection=connection) as fleet:
        fleet.offer(tensors)
        (offered,) = fleet.member.weights
        # Before the cache has stored anything: what cannot be bound afterwards need not be kept.
        kept = {name: tensors[name] for name in offered.layout.table.names}
        match_parameters(module, kept, strict=True)
        nbytes = needed_bytes([*offered.layout.table.nbytes.tolist(), 0])
        revision = offered.root()
        _ask(server, HandOver(model=model, revision=revision, nbytes=nbytes), connection)
        bound = attach(model, connection=connection, device=device, revision=revision, verify=verify)
    # Only now: nothing reads the module's own memory any more, and nothing above has changed the module.
    try:
        bound.attach_into(module)
    except BaseException:
        bound.close()
        raise
    return bound


def _plain_tensors(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the parameters and persistent buffers. PlanError: one has a class that carries more than its bytes."""
    tensors = own_state(module, whole=True)
    odd = [
        f"{name} ({type(tensor).__name__})" for name, tensor in tensors.items() if type(tensor.data) is not torch.Tensor
    ]
    if odd:
        message = f"{len(odd)} tensors are of a class of their own: {', '.join(odd[:_SHOWN])}"
        raise PlanError(message, hint="only bytes are kept: keep the checkpoint instead, with `penstock cache URI`")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _servers(device: torch.device) -> Iterator[Path]:
    """Yield the sockets of caches of this host that accept parameters for a device."""
    wanted = device_id(device)
    for marker in sorted(private_directory().glob(f"p-*/{ACCEPTS}")):
        socket = marker.with_name(SOCKET_NAME)
        try:
            accepts = marker.read_text(encoding="utf-8")
        except OSError:
            # The cache ended just now.
            continue
        if accepts == wanted and not private_socket_fault(str(socket)):
            yield socket


def _cache_of(device: torch.device) -> Path:
    """Return the socket of the first cache that accepts parameters for a device and answers."""
    for socket in _servers(device):
        with ControlConnection(over_unix(str(socket)), "localhost") as connection:
            try:
                status, _ = connection.request("GET", "/v1/alive", timeout_s=Settings.read().stall_s)
            except OSError:
                continue
            if status == HTTPStatus.NO_CONTENT:
                return socket
    hint = "start `penstock cache --accept`, with the same user and PENSTOCK_RUNTIME_DIR"
    raise NotFound(f"no weight cache on this host accepts parameters for {device}", hint=hint)


def _ask(server: Path, wanted: HandOver, connection: ConnectionSettings) -> None:
    """Ask a cache to keep what this process offers, and wait until it does. Raises the reason against it."""
    stall_s = Settings.read(stall_s=connection.stall_s).stall_s
    body = msgspec.msgpack.encode(wanted)
    with ControlConnection(over_unix(str(server)), "localhost") as control:
        while True:
            try:
                status, answer = control.request("POST", f"/v1/{HANDLER}", body, timeout_s=stall_s)
            except OSError as error:
                hint = "look at its log"
                raise OperationFailed(
                    f"the weight cache does not answer: {error}", uri=str(server), hint=hint
                ) from error
            if status != HTTPStatus.OK:
                raise OperationFailed(f"the weight cache refuses: {_fault(answer)}", uri=str(server))
            said = msgspec.msgpack.decode(answer, type=HandOverState)
            if said.state == "kept":
                return
            if said.minimum_bytes:
                raise BudgetTooSmall(said.error, minimum_bytes=said.minimum_bytes)
            if said.state == "failed":
                raise OperationFailed(f"the weight cache could not keep it: {said.error}", hint=said.hint or None)
            # Bounded by the cache's fetch, which ends when no byte comes for its stall deadline.
            time.sleep(attached.TIMING.cache_pause_s)


def _fault(answer: bytes) -> str:
    try:
        return msgspec.msgpack.decode(answer, type=Fault).error
    except MALFORMED:
        return "its answer is malformed"
