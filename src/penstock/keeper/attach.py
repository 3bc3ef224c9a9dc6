"""The API for engines: `attach` to weights that a keeper of this host holds, without a copy.

In: a model's name. Out: tensors over the keeper's memory; a lease on it, renewed while any of them lives.
Not here: keeping (`keeper`), mapping (`transport.mapped_region`), renewing the lease (`lease`).

    hub: keepers on this host --> keeper's server: lease, map, table, digests --> map --> compare --> tensors
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from penstock.arguments import require_name
from penstock.closing import Closing
from penstock.config import ConnectionSettings, Settings
from penstock.errors import (
    ConfigError,
    HubUnavailable,
    IntegrityError,
    NotFound,
    PeerLost,
    PenstockError,
    PermissionDenied,
    SourceBusy,
    SourceStalled,
    StaleDescriptor,
)
from penstock.hub.client import HubClient, resolve_connection
from penstock.hub.local_hub import find_hub
from penstock.hub.messages import Hello, HoldingState, Upstream, UpstreamsRequest
from penstock.keeper.bind_parameters import bind_parameters
from penstock.keeper.lease import LeaseOwner, LeaseRenewal, LeaseState
from penstock.keeper.mapped_weights import differing_chunks, leaves_in, map_regions, tensors_in
from penstock.loader.report import Phases
from penstock.loader.session import resolve_device
from penstock.peer.client import PeerClient
from penstock.peer.local_weights import device_id
from penstock.peer.member import host_id
from penstock.peer.weight_layout import from_message
from penstock.report import Summarised
from penstock.transport.mapped_region import Region
from penstock.types import GB

WAIT_S = 1.0
"""Time to wait for a keeper that is not there: a hub that moves to another process takes half of it."""
_ASK_S = 0.05


class _SeveralRevisions(ConfigError):
    """An error for several kept revisions of one model; temporary if one of them is just being dropped."""


_PASSING = (_SeveralRevisions, NotFound, PeerLost, StaleDescriptor, SourceStalled, HubUnavailable, PermissionDenied)
"""Errors worth a retry: a keeper starts, stops or still loads. Other errors, and refusals by the hub, are permanent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachReport(Summarised):
    """The report of one attach: the tensors, the path, and seconds by phase."""

    model: str
    key: str
    revision: str
    """`w1-`: the root of the keeper's digests."""
    num_tensors: int
    nbytes: int
    device: str
    path: str
    """`shm, mapped: MEMBER`: no byte was moved."""
    wall_s: float
    phases: Mapping[str, float]
    """Seconds of `find`, `lease`, `map`, `verify`; they sum to `wall_s`."""
    verified: bool
    """True if every byte was digested here and compared; False (`verify=False`): only the keeper verified it."""

    def summary(self) -> str:
        """A few lines for people."""
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())
        checked = "verified here" if self.verified else "not verified here (verify=False), only by the keeper"
        return (
            f"{self.model}: {self.num_tensors} tensors, {self.nbytes / GB:.2f} GB on {self.device} in "
            f"{self.wall_s:.3f} s, no copy: {phases}\n{self.path}; {checked}; revision {self.revision[:19]}"
        )


class Attached(Closing, Mapping[str, torch.Tensor]):
    """Tensors by name over a keeper's memory. Made by `attach`; a context manager that releases the lease.

    Attributes:
        report: report of the attach.

    Ownership: the memory stays mapped, and the lease is renewed, while this object or any of its tensors lives. After
        `close`, or if `standing` is `lost`, host memory still stays mapped while a tensor lives; device memory may be
        freed by the keeper and must not be used any more.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], regions: Sequence[Region], renewal: LeaseRenewal, report: AttachReport
    ) -> None:
        self._tensors, self._regions, self._renewal, self.report = tensors, tuple(regions), renewal, report

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def standing(self) -> LeaseState:
        """State of the lease, a few seconds old at most; see `LeaseRenewal`.

        `draining`: the keeper is shutting down or dropping the model; the engine should detach. `damaged`: the keeper
        found that bytes of this memory changed. Stop using it, close this object and attach again: the keeper loads
        the model into other memory in the meantime.
        """
        return self._renewal.standing

    def check(self) -> None:
        """Raise an error unless the keeper lives and the memory is unchanged. Costs microseconds.

        Raises:
            PeerLost: the keeper ended. StaleDescriptor: it changed or freed the memory.
            IntegrityError: it found that bytes changed in this memory: `standing` is `damaged`.
        """
        if self._renewal.standing == "damaged":
            hint = "close this object and attach again"
            raise IntegrityError(self._renewal.why, uri=f"penstock:{self.report.key}", hint=hint)
        for region in self._regions:
            region.check()

    def attach_into(self, module: torch.nn.Module, *, strict: bool = True) -> None:
        """Bind a module's parameters and persistent buffers to the kept memory; nothing is copied.

        A parameter on the same device stays the same object; one on the meta device or on another device is replaced
        by a new one under all of its names.

        Args:
            module: may be on the meta device; tied parameters stay tied.
            strict: require a target for every tensor and a tensor for every target; False: bind what both sides have.

        Raises:
            PlanError: names, shapes or dtypes do not fit (the message lists them); the module is unchanged.
        """
        bind_parameters(module, self._tensors, strict=strict)

    def close(self) -> None:
        """Release the lease, so that the keeper need not wait for this process. Idempotent; see Ownership."""
        self._renewal.close()


def attach(
    model: str,
    *,
    connection: ConnectionSettings | str | None = None,
    device: str | int | torch.device | None = None,
    revision: str | None = None,
    verify: bool = True,
    wait_s: float = WAIT_S,
) -> Attached:
    """Map weights that `penstock keep` holds on this host; no byte is moved.

    Args:
        model: the name under which they are kept.
        connection: the keeper's hub and the token for it; a str is the hub's address; None: `PENSTOCK_HUB`, else the
            hub of this host. See `ConnectionSettings`.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`: only weights kept there; None: on any device.
        revision: only this revision, or a unique prefix of it; None: the one that is kept.
        verify: digest every mapped chunk and compare it with the keeper's digests and the revision. On a device this
            takes 25 ms for 60 GB; on the host it reads all of the memory, see docs/keeper.md. False: trust the keeper,
            which verified every chunk on arrival and checks one again with each heartbeat.
        wait_s: seconds to wait for a keeper that is not running or still loads. A model in another tier is waited for
            as long as the keeper is bringing it back.

    Returns:
        Tensors by name. They must not be written to: on the host a write is visible in this process only (and takes
        memory of its own), on a device in every engine.

    Raises:
        NotFound: no keeper on this host has the model after `wait_s`.
        ConfigError: the weights cannot be mapped here (another device, another container), or there are several
            revisions.
        IntegrityError: the bytes mapped here differ from the digests while the keeper's do not; or the digests are not
            of the revision. If the keeper's own bytes changed, it loads the model again, and this call waits for it.
        HubUnavailable: no hub answers. PermissionDenied: the hub refuses the token for this model.
    """
    require_name("model", model)
    connection = resolve_connection(connection)
    wanted = None if device is None else resolve_device(device)
    phases = Phases(_name="find")
    deadline, stall_s, url = time.monotonic() + wait_s, Settings.read().stall_s, ""
    while True:
        left = max(0.2, deadline - time.monotonic())
        try:
            url = (connection.hub or find_hub() or "").rstrip("/")
            if not url:
                raise NotFound(f"no keeper has {model!r}: no hub runs on this host", hint=_HINT)
            with HubClient.connect(url, connection.token, timeout_s=left) as client:
                search = _Search(client, model, revision, wanted)
                return search.attach(phases, verify)
        except SourceBusy:
            # The keeper is bringing the model back from another tier; that takes as long as the tier needs.
            deadline = max(deadline, time.monotonic() + stall_s)
        except _PASSING as error:
            is_refused = isinstance(error, PermissionDenied) and error.uri == url
            if is_refused or time.monotonic() >= deadline:
                raise
        time.sleep(_ASK_S)


_HINT = "start `penstock keep URI`, or load the weights: penstock.load, fleet.fetch"


class _Search:
    """One attempt to find a keeper and attach to it."""

    def __init__(self, hub: HubClient, model: str, revision: str | None, device: torch.device | None) -> None:
        self._hub, self._model, self._revision, self._device = hub, model, revision, device
        self._member, self._stall_s = hub.member, Settings.read().stall_s

    def attach(self, phases: Phases, verify: bool) -> Attached:
        """Attach to the first suitable keeper. Raises the last keeper's error if none is suitable."""
        phases.enter("find")
        found = self._keepers()
        self._hub.hello(
            Hello(member=self._member, host=host_id(), doors=("unix:///none",), name="attaching")
        )  # registered only to get a grant: this process serves nothing
        last: PenstockError | None = None
        try:
            for member, held in found:
                try:
                    return self._from(member, held, phases, verify)
                except (*_PASSING, SourceBusy, ConfigError) as error:
                    last = error
        finally:
            with contextlib.suppress(PenstockError):  # without an answer the hub forgets this member after its TTL
                self._hub.leave(self._member)
        assert last is not None
        raise last

    def _keepers(self) -> list[tuple[str, HoldingState]]:
        """Return members of this host that keep the complete model on the wanted kind of device."""
        seen = []
        here, kept = host_id(), []
        for member in self._hub.status(self._model).members:
            for held in member.holdings:
                if member.host != here or not held.is_of(self._revision or ""):
                    continue
                kind = held.device.partition(":")[0]
                is_there = self._device is None or self._device.type == kind
                if held.kept and (held.state == "whole" or held.tier) and is_there:
                    kept.append((member.member, held))
                what = "kept" if held.kept else "not kept"
                seen.append(f"{what}, {held.state}, on {held.device}")
        if not kept:
            others = f" (here: {'; '.join(seen[:4])})" if seen else ""
            raise NotFound(f"no keeper on this host has {self._model!r} as requested{others}", hint=_HINT)
        revisions = sorted({held.revision for _, held in kept})
        if len(revisions) > 1:
            short = ", ".join(one[:19] for one in revisions)
            raise _SeveralRevisions(f"several revisions of {self._model!r} are kept: {short}", hint="give revision=")
        return kept

    def _from(self, member: str, held: HoldingState, phases: Phases, verify: bool) -> Attached:
        phases.enter("lease")
        asked = msgspec.structs.replace(held, num_chunks=0, have=(), claims=(), state="filling", parent="")
        reply = self._hub.upstreams(UpstreamsRequest(member=self._member, holding=asked, source=member))
        if not reply.upstreams:
            raise NotFound(f"member {member[:8]} does not keep {self._model!r} any more", hint=_HINT)
        peer = self._peer(reply.upstreams[0], held.key)
        try:
            peer.lease(attach=True)
            layout, where, log = from_message(peer.table()), peer.map(), peer.log(0, 0.0)
            if log.state != "whole" or log.generation != where.generation:
                raise StaleDescriptor("the keeper is changing this memory: attach again", uri=f"penstock:{member}")
            phases.enter("map")
            leaves = leaves_in(layout, log)
            regions = map_regions(where, _device_here(held, self._device))
            rows, tensors = tensors_in(layout, where, regions)
            phases.enter("verify")
            wrong = differing_chunks(held, layout, rows, leaves) if verify else None
            for region in regions:
                region.check()
            if wrong is not None and len(wrong):
                with contextlib.suppress(NotFound):  # a keeper of an earlier version has no such request
                    peer.recheck(int(wrong[0]))
                message = f"chunk {int(wrong[0])} of {self._model!r} differs from its digest as it is mapped here"
                hint = "the keeper's own bytes are right: test this host's memory, and report the mapping"
                raise IntegrityError(message, uri=f"penstock:{held.key}", hint=hint)
        except BaseException:
            peer.close()
            raise
        hold = LeaseOwner()
        renewal = LeaseRenewal(peer, log.serial, log.generation)
        weakref.finalize(hold, renewal.close)
        for region in regions:
            region.owner.hold = hold
        transport = "nothing to map" if not regions else "shm" if regions[0].device == "cpu" else "cuda_ipc"
        seconds = phases.stop()
        report = AttachReport(
            model=self._model,
            key=held.key,
            revision=held.revision,
            num_tensors=len(tensors),
            nbytes=layout.nbytes,
            device=regions[0].device if regions else held.device,
            path=f"{transport}, mapped: {member[:8]}",
            wall_s=sum(seconds.values()),
            phases=seconds,
            verified=verify,
        )
        return Attached(tensors, regions, renewal, report)

    def _peer(self, upstream: Upstream, key: str) -> PeerClient:
        return PeerClient(upstream, member=self._member, key=key, same_host=True, stall_s=self._stall_s)


def _device_here(held: HoldingState, wanted: torch.device | None) -> int | None:
    """Return this process's number of a keeper's GPU; None for the host. Raises ConfigError if not usable here."""
    if held.device == "cpu":
        return None
    for number in range(torch.cuda.device_count()):
        if device_id(torch.device("cuda", number)) == held.device_id:
            if wanted in (None, torch.device("cuda", number)):
                return number
            message = f"the model is kept on cuda:{number}, not on {wanted}"
            raise ConfigError(message, hint="keep it there, too, or fetch it")
    hint = "compare CUDA_VISIBLE_DEVICES of the keeper and of this process"
    raise ConfigError(f"the model is kept on GPU {held.device_id}, which this process does not see", hint=hint)
