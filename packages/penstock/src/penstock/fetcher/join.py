"""The public API of the fleet: `join`, then `fetch`, `offer`, `serve` and `leave`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import torch
from blake3 import blake3

from penstock.arguments import formerly, require_name, require_seconds, require_text_map, require_type
from penstock.config import ConnectionSettings, Settings, parse_bytes
from penstock.digest.leaf import revision as root_revision
from penstock.engine.trace import Trace, open_trace
from penstock.errors import ConfigError, HubUnavailable, IntegrityError, PenstockError
from penstock.fetcher.discover import MIN_TIMEOUT_S, Discovery, Target
from penstock.fetcher.report import FetchReport, Provenance, report_of
from penstock.fetcher.run import FetchRun
from penstock.fetcher.storage_reader import StorageReader
from penstock.holding.placement import PlacedChunks
from penstock.holding.weight_layout import layout_of_tensors
from penstock.hub.client import TIMEOUT_S, HubClient, resolve_connection
from penstock.hub.messages import Identity
from penstock.lifecycle import paused_gc
from penstock.loader.progress import Progress, ProgressOption
from penstock.loader.session import resolve_device
from penstock.loader.target_tensors import targets_of
from penstock.logs import Log, log_named
from penstock.memory.targets import note_written
from penstock.peer.local_weights import LocalWeights
from penstock.peer.member import Member
from penstock.phases import Phases
from penstock.storage.locate import display
from penstock.storage.weight_set import Uris
from penstock.telemetry.journey import Journey
from penstock.telemetry.metrics import received_by
from penstock.waits import until_stopped

_log = log_named("penstock.fetch")


class Fleet:
    """This process as a member of the fleet, created by `join`. Only one thread at a time may call the methods.

    Used as a context manager, the member waits for its readers and leaves the fleet on exit.
    """

    def __init__(self, identity: Identity, member: Member, settings: Settings, *, max_readers: int) -> None:
        self.identity = identity
        self.member = member
        self._settings = settings
        self._max_readers = max_readers
        self._left = threading.Event()

    @formerly(wait_s="timeout_s")
    def fetch(
        self,
        target: Target,
        *,
        fallback: Uris | None = None,
        device: str | int | torch.device = "cpu",
        storage_options: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        trace: str | os.PathLike[str] | None = None,
        progress: ProgressOption = None,
    ) -> FetchReport:
        """Fill `target` from members that hold the model. Read from storage only chunks that no member has or reads.

        Args:
            target: a module or a dict of tensors, filled in place. An empty dict receives all new tensors at the end,
                or none if the fetch fails.
            fallback: URI of the model in storage, or None to read from members only.
            device: device of new tensors.
            storage_options: see `load`.
            timeout_s: seconds to wait for a first holder if there is no fallback (default: the stall deadline).
            trace: file for a Chrome trace.
            progress: see `load`. The display shows verified bytes.

        Returns:
            A report of the sources that were used. From now until `leave`, this process is a source.

        Raises:
            NotFound: no member holds the model and there is no fallback.
            HubUnavailable: the hub does not respond and there is no fallback.
            PlanError: the target's tensors differ from those of the fallback.
            SourceError, IntegrityError: see `FetchRun.run`. `mutated` is True if the caller's target was written to.

        Ownership: the caller owns the tensors, and must not change them while this process serves them. See `fence`.
        """
        record = open_trace(trace)
        require_seconds("timeout_s", timeout_s)
        is_over = threading.Event()
        with (
            Phases("discover", journey="fetch", model=self.identity.model) as phases,
            Journey("fetch", self.identity.model, member=self.member.id[:8]) as journey,
            ExitStack() as stack,
        ):
            stack.callback(is_over.set)
            shown = stack.enter_context(Progress(progress, self.identity.model))
            target_weights = Discovery(self.identity, self.member, self._settings, shown.state).find(
                target, fallback, resolve_device(device), storage_options, timeout_s, stack
            )
            phases.enter("allocate")
            weights, make_tensors = target_weights.allocate(target, self._max_readers, is_over.is_set)
            phases.enter("register")
            # Serve the weights now, because other members read each chunk as soon as it is verified.
            self.member.show(weights, report=False)
            storage = (
                StorageReader(target_weights.session, target_weights.layout, weights.memory.rows)
                if target_weights.session is not None
                else None
            )
            phases.enter("connect")
            with shown.watching(weights.progress):
                provenance, new_tensors = self._fill(weights, storage, phases, record, journey, make_tensors)
            weights.set_state("whole")
            self.member.beat_now()
            # Fill an empty target only now, so that it receives all tensors or none.
            if make_tensors is not None:
                assert isinstance(target, MutableMapping)
                target.update(zip(weights.layout.table.names, new_tensors, strict=True))
            if trace is not None:
                record.save(trace)
            storage_bytes = storage.nbytes if storage is not None else 0
            header_bytes = target_weights.session.weights.opening_bytes if target_weights.session is not None else 0
            journey.report = report = report_of(
                weights, provenance, storage_bytes=storage_bytes, header_bytes=header_bytes, phases=phases.stop()
            )
            return report

    def _fill(
        self,
        weights: LocalWeights,
        storage: StorageReader | None,
        phases: Phases,
        record: Trace,
        journey: Journey,
        make_tensors: Callable[[], list[torch.Tensor]] | None,
    ) -> tuple[Provenance, list[torch.Tensor]]:
        """Fill weights that other members can already read. `make_tensors` is None if the caller owns the memory."""
        tensors: list[torch.Tensor] = []
        running = FetchRun(
            self.member,
            weights,
            storage=storage,
            stall_s=self._settings.stall_s,
            trace=record,
            on_first=lambda: phases.enter("move", weights.progress),
            away=self.member.registration.away,
        )
        journey.received = partial(received_by, running.provenance.nbytes_by_path)
        try:
            with running:
                running.start()
                # Overlap this with connecting to the hub and the upstreams. Creating 1,800 tensors takes 4 to 9 ms.
                if make_tensors is not None:
                    with paused_gc():
                        tensors = make_tensors()
                provenance = running.run()
            phases.enter("commit")
            if weights.damage is not None:
                raise weights.damage
            # If there is a manifest, every chunk was already verified against the manifest.
            if not weights.verified.has_manifest:
                weights.verified.check_revision(weights.key, weights.identity.revision, self.identity.revision)
                if storage is not None and storage.nbytes:
                    storage.check_unchanged()
        except BaseException as error:
            # Readers must not wait for chunks that will never arrive.
            self.member.hide(weights, 0.0)
            if isinstance(error, PenstockError) and make_tensors is None:
                # The storage reader writes to the target before it passes on chunks.
                is_touched = running.is_touched or (storage is not None and storage.is_touched)
                error.mutated = error.mutated or is_touched
            raise
        finally:
            # Torch does not detect writes by address. The caller cannot have seen new tensors yet.
            if make_tensors is None and (running.is_touched or (storage is not None and storage.is_touched)):
                note_written(weights.memory.rows)
            journey.num_wrong = running.provenance.num_wrong
            journey.num_retries = len(running.provenance.faults)
        return provenance, tensors

    def offer(self, tensors: torch.nn.Module | Mapping[str, torch.Tensor], *, revision: str | None = None) -> str:
        """Digest weights that this process already has, and let other members read the weights.

        The hub knows about the weights when this returns, or after the next heartbeat if the hub does not respond now.

        Args:
            tensors: contiguous tensors on one device, which must not change until `fence` or `leave`.
            revision: name of the revision, by default the root of the tensors' digests.

        Returns:
            The key under which members find the weights.
        """
        # Digest without a revision first, because the key depends on the revision, which is the root of the digests.
        layout, rows = layout_of_tensors(targets_of(tensors, whole=True))
        chunks = np.arange(layout.chunks.num_chunks)
        leaves = PlacedChunks(layout, rows).digest(chunks)
        root = root_revision(layout.table, layout.chunks.leaf_bytes, leaves)
        identity = msgspec.structs.replace(
            self.identity, revision=revision or self.identity.revision or root, layout=layout.digest
        )
        weights = LocalWeights(identity, layout, rows, max_readers=self._max_readers)
        weights.mark_verified(chunks, leaves)
        weights.fetch.path = "offered"
        weights.set_state("whole")
        self.member.show(weights)
        # The caller may start a reader next, which would find no source before the heartbeat is sent.
        self.member.report_now()
        return weights.key

    def fence(self) -> None:
        """Stop serving before the weights change. Grant no new leases and make the readers' descriptors stale."""
        for weights in self.member.weights:
            self.member.hide(weights, 0.0)

    def serve(self, *, timeout_s: float | None = None) -> None:
        """Serve as a source until `leave`, SIGTERM or SIGINT, then wait for the readers and leave the fleet.

        Args:
            timeout_s: return after this many seconds and stay a member. None means no limit.

        Raises:
            IntegrityError: see `check`. This process has left the fleet.
        """
        require_seconds("timeout_s", timeout_s)
        try:
            if until_stopped(self._left, self.check, timeout_s):
                self.leave()
        except IntegrityError:
            self.leave()
            raise

    def check(self) -> None:
        """Raise IntegrityError if served weights changed in memory after verification. A call takes microseconds.

        One chunk is digested again with every heartbeat. Changed weights are no longer served. Fetch the weights again,
        or call `fence` before an intended change.
        """
        self.member.check()

    def leave(self, drain_s: float = 10.0) -> None:
        """Grant no new leases, wait at most `drain_s` for readers, and leave the hub. Idempotent."""
        require_seconds("drain_s", drain_s)
        self._left.set()
        self.member.leave(drain_s)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Leave at once after an error. Readers find other sources, and the caller is waiting for the error.
        self.leave(10.0 if kind is None else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The properties in which weights of one model and revision may differ.

    Members exchange weights only if all properties are equal. A field of the wrong type raises ConfigError.

    Attributes:
        dtype: the dtype of the weights, under any name that all members use.
        quantization: the quantisation config, or a digest of it.
        parallel: parallel coordinates of this process, such as `{"tp": "1/4", "pp": "0/1"}`.
        role: the role of the weights, such as `target`, `draft` or `lora:NAME`.
        post_processing: the engine's changes to the weights after loading. Empty means no changes.
        engine: name and version of engine and kernels, if `post_processing` depends on them.
        device_capability: the device's compute capability, if `post_processing` depends on it.
    """

    dtype: str = ""
    quantization: str | Mapping[str, Any] = ""
    parallel: Mapping[str, str] | None = None
    role: str = "target"
    post_processing: str = ""
    engine: str = ""
    device_capability: str = ""

    def __post_init__(self) -> None:
        for name in ("dtype", "role", "post_processing", "engine", "device_capability"):
            require_type(name, getattr(self, name), str, "a str that all members share")
        require_type("quantization", self.quantization, (str, Mapping), "the quantisation config, or its digest")
        require_text_map("parallel", self.parallel, 'coordinates: {"tp": "1/4"}')
        self.quantization_digest()

    def quantization_digest(self) -> str:
        """Return `quantization` if it is a str, or else its digest. Raise ConfigError for a value that is not JSON."""
        if isinstance(self.quantization, str):
            return self.quantization
        try:
            ordered = msgspec.json.encode(self.quantization, order="deterministic")
        except (TypeError, msgspec.MsgspecError) as error:
            hint = "pass plain JSON values, or a str with your own digest"
            raise ConfigError(f"cannot compute a digest of `quantization`: {error}", hint=hint) from error
        return str(blake3(ordered).hexdigest(length=16))

    def identity(self, model: str, revision: str) -> Identity:
        """Return the identity that the hub compares between members, without a layout."""
        return Identity(
            model=model,
            revision=revision,
            dtype=self.dtype,
            quantization=self.quantization_digest(),
            parallel=dict(self.parallel or {}),
            role=self.role,
            post_processing=self.post_processing,
            engine=self.engine,
            device_capability=self.device_capability,
        )


@formerly(wait_s="timeout_s")
def join(
    model: str,
    *,
    connection: ConnectionSettings | str | None = None,
    revision: str = "",
    variant: Variant | None = None,
    max_readers: int = 4,
    max_bytes_per_s: int | str = 0,
    min_bytes_per_s: int | str = 0,
    memory_bytes: int | str | None = None,
    timeout_s: float | None = None,
    needs_hub: bool = False,
) -> Fleet:
    """Join the fleet that exchanges `model`.

    If the given hub does not respond, this logs a warning and continues without the hub. The member joins once the hub
    responds. Until the member has joined, fetches with a `fallback` read storage, and others raise HubUnavailable.

    Args:
        model: the name that all members use for the model.
        connection: hub, token, `listen`, rack, transports and stall deadline, or only the hub's address as a str.
            The default is `PENSTOCK_HUB`, or the hub of this host if that variable is unset. See `ConnectionSettings`.
        revision: exchange only this revision, given as its `w1-` root, a prefix of the root, or your own name. The
            default is the fallback's revision, or else the revision that the fleet has.
        variant: the other properties that must be equal at all members, such as dtype, quantisation and parallel
            coordinates (default: `Variant()`).
        max_readers: number of concurrent readers of this member. Further readers are sent to other members.
        max_bytes_per_s: limit for the total of all readers of this member, such as `"2G"`. 0 means no limit.
        min_bytes_per_s: do not use members below this rate (`"1G"`), and report members as slow. 0 means no minimum.
        memory_bytes: limit of host staging memory for storage reads.
        timeout_s: seconds to wait for a given hub that does not respond (default: 10 s, as for every request).
        needs_hub: whether a hub that does not respond is an error.

    Raises:
        HubUnavailable: no hub responds and `needs_hub` is set, or this host's own hub cannot start.
        ConfigError: an argument is wrong.
        MissingExtra: a package is missing.
    """
    require_type("needs_hub", needs_hub, bool, "True or False")
    require_name("model", model)
    require_seconds("timeout_s", timeout_s)
    connection = resolve_connection(connection)
    variant = Variant() if variant is None else variant
    require_type("variant", variant, Variant, "a penstock.Variant, or None")
    require_type("max_readers", max_readers, int, "a number of readers")
    settings = Settings.read(
        memory_bytes=None if memory_bytes is None else parse_bytes(memory_bytes), stall_s=connection.stall_s
    )
    identity = variant.identity(model, revision)
    member = Member.join(
        # A request to the hub must time out well before the fetch stalls.
        HubClient.connect(connection.hub, connection.token, timeout_s=min(TIMEOUT_S, settings.stall_s / 3)),
        connection,
        max_bytes_per_s=parse_bytes(max_bytes_per_s),
        min_bytes_per_s=parse_bytes(min_bytes_per_s),
        stall_s=settings.stall_s,
        join_s=None if timeout_s is None else max(MIN_TIMEOUT_S, timeout_s),
        needs_hub=needs_hub,
    )
    return Fleet(identity, member, settings, max_readers=max_readers)


def join_or_warn(
    model: str,
    place: str,
    *,
    connection: ConnectionSettings | str | None = None,
    max_bytes_per_s: int | str = 0,
    memory_bytes: int | str | None = None,
    needs_hub: bool = False,
    log: Log = _log,
) -> Fleet | None:
    """Join a fleet. If the hub is not available, warn that `place` is read from storage instead, and return None.

    Only an unavailable hub causes a read from storage. A hub that refuses the caller is an error. The other arguments
    are those of `join`.
    """
    try:
        return join(
            model,
            connection=connection,
            max_bytes_per_s=max_bytes_per_s,
            memory_bytes=memory_bytes,
            needs_hub=needs_hub,
        )
    except HubUnavailable as error:
        log.warning("penstock: reading from storage (%s) instead of fleet %s: %s", display(place), model, error)
        return None
