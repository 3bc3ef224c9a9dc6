"""What an engine calls: `attach` to weights that a keeper of this host holds, without a copy.

In: a model's name. Out: tensors that are the keeper's memory; a lease on it, renewed while any of them lives.
Not here: keeping (`keeper`), mapping (`transport.mapped_region`), the lease's life (`lease`).

    hub: who keeps it here? --> keeper's door: lease, map, table, digests --> map --> compare --> tensors
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from penstock.arguments import require_connection, require_name
from penstock.closing import Closing
from penstock.config import Settings
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
from penstock.hub.client import HubClient
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
"""How long a keeper is waited for that is not there: a hub that moves to another process takes half of it."""
_ASK_S = 0.05


class _SeveralRevisions(ConfigError):
    """Of one model; one of them may just be on its way out."""


_PASSING = (_SeveralRevisions, NotFound, PeerLost, StaleDescriptor, SourceStalled, HubUnavailable, PermissionDenied)
"""A keeper that comes, goes or is not whole yet; anything else will not be otherwise a moment later, nor will what the
hub itself refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachReport(Summarised):
    """What was attached, and in what time."""

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
    """Whether every byte was digested here and compared; False (`verify=False`): the keeper's verification is all."""

    def summary(self) -> str:
        """A few lines for people."""
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())
        checked = "verified here" if self.verified else "not verified here (verify=False), only by the keeper"
        return (
            f"{self.model}: {self.num_tensors} tensors, {self.nbytes / GB:.2f} GB on {self.device} in "
            f"{self.wall_s:.3f} s, no copy: {phases}\n{self.path}; {checked}; revision {self.revision[:19]}"
        )


class Attached(Closing, Mapping[str, torch.Tensor]):
    """Tensors by name that are a keeper's memory. Made by `attach`; a context manager that gives the lease back.

    Attributes:
        report: what was attached.

    Ownership: the memory stays mapped, and the lease is renewed, while this or any tensor of it lives; then both end
        by themselves. After `close`, or where `standing` is `lost`, host memory still stays as long as a tensor lives;
        device memory may be freed by the keeper, and must be used no more.
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
        """Raise unless these are the bytes that were kept, and whoever keeps them lives. Costs microseconds.

        Raises:
            PeerLost: the keeper is gone. StaleDescriptor: it changed the memory, or gave it up.
            IntegrityError: it found that bytes changed in this memory, and said so: `standing` is `damaged`.
        """
        if self._renewal.standing == "damaged":
            raise IntegrityError(self._renewal.why, uri=f"penstock:{self.report.key}", hint="close this, attach again")
        for region in self._regions:
            region.check()

    def attach_into(self, module: torch.nn.Module, *, strict: bool = True) -> None:
        """Point a module's parameters and persistent buffers at the kept memory; nothing is copied.

        A parameter on the same device stays the object that it is; one on the meta device, or on another, is replaced
        by a new one under all of its names.

        Args:
            module: may be on the meta device; what is tied stays tied.
            strict: every tensor must have a target and every target a tensor; False points what both sides have.

        Raises:
            PlanError: names, shapes or dtypes do not fit (all offenders listed); nothing was touched.
        """
        bind_parameters(module, self._tensors, strict=strict)

    def close(self) -> None:
        """Give the lease back: the keeper need not wait for us any more. Idempotent; see Ownership."""
        self._renewal.close()


def attach(
    model: str,
    *,
    hub: str | None = None,
    token: str | None = None,
    device: str | int | torch.device | None = None,
    revision: str | None = None,
    verify: bool = True,
    wait_s: float = WAIT_S,
) -> Attached:
    """Use weights that `penstock keep` holds on this host as they lie there: no byte is moved.

    Args:
        model: the name they are kept under.
        hub: the keeper's; None: this host's own.
        token: of the hub, where it asks for one.
        device: `"cpu"`, `"cuda"`, `"cuda:1"`: only what is kept there; None: wherever it is.
        revision: only this one, or as much of its beginning as tells it from others; None: the one that is kept.
        verify: digest every chunk as it is mapped, and compare it with the keeper's digests and the revision. On a
            device this takes 25 ms for 60 GB; on the host it reads all of the memory, see docs/keeper.md. False: trust
            the keeper, which compared every chunk when it came and compares one a beat since.
        wait_s: how long to wait for a keeper that is not there, or not whole yet. A model that rests in another tier
            is waited for as long as it is on its way back.

    Returns:
        Tensors by name. They must not be written to: on the host a write is seen by this process only (and takes memory
        of its own), on a device by every engine.

    Raises:
        NotFound: nobody on this host keeps it, after `wait_s`.
        ConfigError: what is kept cannot be mapped here (another device, another container), or several revisions are.
        IntegrityError: the bytes that are mapped here are not those of the digests, and the keeper's are; or the
            digests are not of the revision. Where the keeper's own bytes changed, it loads the model again: waited for.
        HubUnavailable: there is no hub at `hub`. PermissionDenied: it does not take `token` for this model.
    """
    require_name("model", model)
    require_connection(hub, token, "", None, None)
    wanted = None if device is None else resolve_device(device)
    phases = Phases(_name="find")
    deadline, stall_s, url = time.monotonic() + wait_s, Settings.read().stall_s, ""
    while True:
        left = max(0.2, deadline - time.monotonic())
        try:
            url = (hub or find_hub() or "").rstrip("/")
            if not url:
                raise NotFound(f"nobody keeps {model!r}: no hub runs on this host", hint=_HINT)
            with HubClient.connect(url, token=token, timeout_s=left) as client:
                search = _Search(client, model, revision, wanted)
                return search.attach(phases, verify)
        except SourceBusy:
            deadline = max(deadline, time.monotonic() + stall_s)  # it is on its way back, at the pace of its tier
        except _PASSING as error:
            is_refused = isinstance(error, PermissionDenied) and error.uri == url
            if is_refused or time.monotonic() >= deadline:
                raise
        time.sleep(_ASK_S)


_HINT = "start `penstock keep URI`, or load the weights: penstock.load, fleet.fetch"


class _Search:
    """One look for a keeper."""

    def __init__(self, hub: HubClient, model: str, revision: str | None, device: torch.device | None) -> None:
        self._hub, self._model, self._revision, self._device = hub, model, revision, device
        self._member, self._stall_s = hub.member, Settings.read().stall_s

    def attach(self, phases: Phases, verify: bool) -> Attached:
        """Attach to the first keeper that will do. Raises the last one's reason where none does."""
        phases.enter("find")
        found = self._keepers()
        self._hub.hello(
            Hello(member=self._member, host=host_id(), doors=("unix:///none",), name="attaching")
        )  # only known: it holds nothing, and reads from nobody
        last: PenstockError | None = None
        try:
            for member, held in found:
                try:
                    return self._from(member, held, phases, verify)
                except (*_PASSING, SourceBusy, ConfigError) as error:
                    last = error
        finally:
            with contextlib.suppress(PenstockError):  # it is forgotten soon
                self._hub.leave(self._member)
        assert last is not None
        raise last

    def _keepers(self) -> list[tuple[str, HoldingState]]:
        """Members of this host that keep the model, whole, on the kind of device wanted."""
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
            raise NotFound(f"nobody on this host keeps {self._model!r} as asked{others}", hint=_HINT)
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
            raise NotFound(f"member {member[:8]} keeps {self._model!r} no more", hint=_HINT)
        peer = self._peer(reply.upstreams[0], held.key)
        try:
            peer.lease(attach=True)
            layout, where, log = from_message(peer.table()), peer.map(), peer.log(0, 0.0)
            if log.state != "whole" or log.generation != where.generation:
                raise StaleDescriptor("the keeper changes this memory", uri=f"penstock:{member}")
            phases.enter("map")
            leaves = leaves_in(layout, log)
            regions = map_regions(where, _device_here(held, self._device))
            rows, tensors = tensors_in(layout, where, regions)
            phases.enter("verify")
            wrong = differing_chunks(held, layout, rows, leaves) if verify else None
            for region in regions:
                region.check()
            if wrong is not None and len(wrong):
                with contextlib.suppress(NotFound):  # a keeper of an earlier version cannot be asked
                    peer.recheck(int(wrong[0]))
                message = f"chunk {int(wrong[0])} of {self._model!r} differs from its digest as it is mapped here"
                hint = "the keeper's own bytes are right: suspect this host's memory or the mapping"
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
    """A keeper's GPU as numbered in this process; None for the host. ConfigError: not there, or not `wanted`."""
    if held.device == "cpu":
        return None
    for number in range(torch.cuda.device_count()):
        if device_id(torch.device("cuda", number)) == held.device_id:
            if wanted in (None, torch.device("cuda", number)):
                return number
            raise ConfigError(f"it is kept on cuda:{number}, not on {wanted}", hint="keep it there too, or fetch it")
    hint = "look at CUDA_VISIBLE_DEVICES of both"
    raise ConfigError(f"it is kept on GPU {held.device_id}, which this process does not see", hint=hint)
