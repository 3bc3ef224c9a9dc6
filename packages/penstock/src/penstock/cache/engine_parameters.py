"""Caches parameters that an engine has processed (fused, sharded, cast), so that the next engine can map them.

The engine offers its parameters as a member of the fleet and sends a `HandOver` to the cache, which fetches them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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
from penstock.errors import MALFORMED, BudgetTooSmall, NotFound, OperationFailed, PenstockError, PlanError
from penstock.fetcher.join import join
from penstock.holding.placement import device_id
from penstock.http.control import ControlConnection, over_unix
from penstock.hub.client import resolve_connection
from penstock.hub.messages import Fault
from penstock.loader.target_tensors import own_state
from penstock.memory.arena import needed_bytes
from penstock.net.unix_sockets import private_directory, private_socket_fault
from penstock.peer.server import MAX_BODY_BYTES, SOCKET_NAME, Query

HANDLER = "keep"
ACCEPTS = "accepts"
"""File next to a cache's socket, with the id of the device for which the cache accepts parameters."""
_SHOWN = 3


class HandOver(msgspec.Struct, frozen=True, kw_only=True):
    """A request to keep weights that a member on this host offers."""

    model: str
    revision: str
    """The `w1-` root of the weights' digests."""
    nbytes: int
    """Bytes of memory for the weights, including gaps between tensors."""
    parallel: dict[str, str] = {}
    """Parallel coordinates of the process. Processes with different coordinates have different parameters."""

    @property
    def key(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """Return the key of these parameters. The cache keeps parameters with the same key only once."""
        return self.model, self.revision, tuple(sorted(self.parallel.items()))


class HandOverState(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a `HandOver` in the cache."""

    state: Literal["filling", "kept", "failed"]
    error: str = ""
    hint: str = ""
    minimum_bytes: int = 0
    """The limit in bytes that the cache would need. 0 unless the cache's limit is too small."""


class HandOverHandler:
    """Stores parameters from engines by calling `keep` in the executor's single thread, and reports the progress."""

    def __init__(self, keep: Callable[[HandOver], None], executor: Executor) -> None:
        self._keep = keep
        self._executor = executor
        self._started: dict[tuple[str, str, tuple[tuple[str, str], ...]], Future[None]] = {}

    def answer(self, verb: str, path: list[str], query: Query, body: Callable[[int], bytes]) -> object:
        """Return a request's progress. Start a request that is new or has failed before."""
        hand_over = msgspec.msgpack.decode(body(MAX_BODY_BYTES), type=HandOver)
        if verb != "POST" or path:
            raise NotFound("no such path")
        # Connections have separate threads, and two engines may submit the same parameters. Keep the parameters once.
        running = self._started.get(hand_over.key)
        if running is None:
            try:
                running = self._started[hand_over.key] = self._executor.submit(self._keep, hand_over)
            except RuntimeError as error:
                raise NotFound("this weight cache is shutting down") from error
            return HandOverState(state="filling")
        if not running.done():
            return HandOverState(state="filling")
        failure = running.exception()
        if failure is None:
            return HandOverState(state="kept")
        self._started.pop(hand_over.key, None)
        if not isinstance(failure, PenstockError):
            return HandOverState(state="failed", error=repr(failure), hint="report this as a bug in Penstock")
        minimum = failure.minimum_bytes if isinstance(failure, BudgetTooSmall) else 0
        return HandOverState(state="failed", error=failure.message, hint=failure.hint or "", minimum_bytes=minimum)

    def forget(self, model: str) -> None:
        """Forget the requests for a dropped model, so that an engine can submit the model again."""
        for key in [key for key in list(self._started) if key[0] == model]:
            self._started.pop(key, None)


def cache_parameters(
    module: torch.nn.Module, model: str, *, connection: ConnectionSettings | str | None = None, verify: bool = True
) -> Attached:
    """Pass a module's parameters to the cache on this host, and bind the module to the cached memory.

    The next process with the same module calls `attach(model)` and `attach_into(module)`, without a checkpoint. The
    cache copies the bytes once. Until the module is bound, the host holds two copies.

    Args:
        module: the module, whose parameters and persistent buffers must be processed, contiguous and on one device.
        model: the name under which the parameters are cached. The name must include everything that changes the
            parameters: revision, engine version, dtype, quantisation and rank.
        connection: see `join`. The cache must be connected to the same hub.
        verify: see `attach`.

    Returns:
        The attached weights. Close or drop this object together with the module.

    Raises:
        NotFound: no cache on this host accepts parameters for this device. Start `penstock cache --accept`.
        PlanError: a tensor is of a special class, such as a quantised tensor, or is not contiguous.
        BudgetTooSmall: the parameters do not fit in the cache's `memory_bytes`.
        OperationFailed: the cache could not keep the parameters.
        PenstockError: see `join` and `attach`. The module is unchanged.
    """
    require_name("model", model)
    require_type("the target", module, torch.nn.Module, "a torch.nn.Module")
    tensors = _plain_tensors(module)
    devices = {tensor.device for tensor in tensors.values() if tensor.numel()}
    if len(devices) != 1:
        hint = "pass a module whose parameters are on one device"
        raise PlanError(f"the module's parameters are on {len(devices)} devices", hint=hint)
    device = devices.pop()
    connection = resolve_connection(connection)
    server = _cache_of(device)
    with join(model, connection=connection) as fleet:
        fleet.offer(tensors)
        (offered,) = fleet.member.weights
        # Match before the cache stores anything, because caching parameters that cannot be bound is useless.
        kept = {name: tensors[name] for name in offered.layout.table.names}
        match_parameters(module, kept, strict=True)
        nbytes = needed_bytes([*offered.layout.table.nbytes.tolist(), 0])
        revision = offered.verified.root()
        _ask(server, HandOver(model=model, revision=revision, nbytes=nbytes), connection)
        bound = attach(model, connection=connection, device=device, revision=revision, verify=verify)
    # Bind last. The cache no longer reads the module's memory, and an earlier error leaves the module unchanged.
    try:
        bound.attach_into(module)
    except BaseException:
        bound.close()
        raise
    return bound


def _plain_tensors(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    tensors = own_state(module, whole=True)
    odd = [
        f"{name} ({type(tensor).__name__})" for name, tensor in tensors.items() if type(tensor.data) is not torch.Tensor
    ]
    if odd:
        message = f"{len(odd)} tensors have a special class: {', '.join(odd[:_SHOWN])}"
        raise PlanError(
            message, hint="keep the checkpoint with `penstock cache URI`, because only plain tensors are accepted"
        )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _cache_of(device: torch.device) -> Path:
    for marker in sorted(private_directory().glob(f"p-*/{ACCEPTS}")):
        socket = marker.with_name(SOCKET_NAME)
        try:
            accepts = marker.read_text(encoding="utf-8")
        except OSError:
            continue
        if accepts != device_id(device) or private_socket_fault(str(socket)):
            continue
        with ControlConnection(over_unix(str(socket)), "localhost") as connection:
            try:
                status, _ = connection.request("GET", "/v1/alive", timeout_s=Settings.read().stall_s)
            except OSError:
                continue
            if status == HTTPStatus.NO_CONTENT:
                return socket
    hint = "start `penstock cache --accept` with the same user and PENSTOCK_RUNTIME_DIR"
    raise NotFound(f"no weight cache on this host accepts parameters for {device}", hint=hint)


def _ask(server: Path, wanted: HandOver, connection: ConnectionSettings) -> None:
    stall_s = Settings.read(stall_s=connection.stall_s).stall_s
    body = msgspec.msgpack.encode(wanted)
    with ControlConnection(over_unix(str(server)), "localhost") as control:
        while True:
            try:
                status, answer = control.request("POST", f"/v1/{HANDLER}", body, timeout_s=stall_s)
            except OSError as error:
                message, hint = f"the weight cache does not respond: {error}", "see the weight cache's log"
                raise OperationFailed(message, uri=str(server), hint=hint) from error
            if status != HTTPStatus.OK:
                raise OperationFailed(f"the weight cache refused the parameters: {_fault(answer)}", uri=str(server))
            state = msgspec.msgpack.decode(answer, type=HandOverState)
            if state.state == "kept":
                return
            if state.minimum_bytes:
                raise BudgetTooSmall(state.error, minimum_bytes=state.minimum_bytes)
            if state.state == "failed":
                message = f"the weight cache could not keep the parameters: {state.error}"
                raise OperationFailed(message, hint=state.hint or None)
            # This loop is bounded, because the cache's fetch fails when no byte arrives for its stall deadline.
            time.sleep(attached.TIMING.cache_pause_s)


def _fault(answer: bytes) -> str:
    try:
        return msgspec.msgpack.decode(answer, type=Fault).error
    except MALFORMED:
        return "its answer is malformed"
