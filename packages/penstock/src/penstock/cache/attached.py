"""The API for engines: `attach` maps weights of a cache on this host, without a copy.

The finalizer of the last mapped tensor releases the lease on the cache's memory.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch

from penstock.arguments import formerly, require_name, require_type
from penstock.cache.lease import LeaseOwner, LeaseRenewal, LeaseState
from penstock.config import ConnectionSettings, Settings
from penstock.errors import (
    ConfigError,
    DestinationError,
    FormatError,
    HubUnavailable,
    IntegrityError,
    NotFound,
    PeerLost,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceBusy,
    SourceError,
    SourceStalled,
    StaleDescriptor,
)
from penstock.holding.placement import PlacedChunks, decode_column, decode_digests, device_id, locate_rows
from penstock.holding.verified import VerifiedChunks
from penstock.holding.weight_layout import WeightLayout, from_message
from penstock.hub.client import HubClient, resolve_connection
from penstock.hub.local_hub import find_hub
from penstock.hub.messages import Hello, HoldingMap, HoldingState, LogReply, UpstreamsRequest
from penstock.lifecycle import Closeable
from penstock.loader.session import resolve_device
from penstock.loader.target_tensors import Place, places_of
from penstock.loader.tensor import as_tensors
from penstock.memory.local_shards import is_sharded
from penstock.memory.targets import require_initialised, sources_differ
from penstock.net.unix_sockets import host_id
from penstock.peer.client import PeerClient
from penstock.phases import Phases
from penstock.report import TransferStats, bytes_text, phases_text
from penstock.telemetry.journey import Journey
from penstock.timing import Timing
from penstock.transport.mapped_region import MappedRegion, map_region
from penstock.transport.protocol import decode
from penstock.types import I64, U64
from penstock.waits import Threads

TIMING = Timing()


class _SeveralRevisions(ConfigError):
    """Several revisions of one model are cached. The error is temporary if a revision is being dropped."""


_PASSING = (_SeveralRevisions, NotFound, PeerLost, StaleDescriptor, SourceStalled, HubUnavailable, PermissionDenied)
"""Errors after which `attach` retries, because a cache may be starting, stopping or loading."""

NOT_USABLE: tuple[type[PenstockError], ...] = (
    ConfigError,
    DestinationError,
    FormatError,
    IntegrityError,
    PeerLost,
    PlanError,
    SourceError,
)
"""Errors after which an engine can still load the checkpoint: the cached weights are missing, corrupt or different, or
this process cannot map them."""


class AttachReport(TransferStats, frozen=True, kw_only=True):
    """The report of one `attach`. The phases are `find`, `lease`, `map` and `verify`, whose sum is `wall_s`."""

    model: str
    key: str
    num_tensors: int
    device: str
    path: str
    """The transport and the cache's member id, such as `shm, mapped: MEMBER`."""
    verified: bool
    """Whether this process compared every byte with its digest. With `verify=False`, only the cache has compared
    them."""

    def summary(self) -> str:
        """Return a readable summary of a few lines."""
        checked = "verified here" if self.verified else "not verified here (verify=False), only by the weight cache"
        return (
            f"{self.model}: {self.num_tensors} tensors, {bytes_text(self.nbytes)} on {self.device} in "
            f"{self.wall_s:.3f} s, no copy: {phases_text(self.phases)}\n"
            f"{self.path}; {checked}; revision {self.revision[:19]}"
        )


class Attached(Closeable, Mapping[str, torch.Tensor]):
    """Tensors by name in a cache's memory, created by `attach`. The context manager releases the lease on exit.

    The lease is renewed while this object or any of its tensors exists. After `close`, or if `lease_state` is `lost`,
    only host memory stays valid, because the cache may free device memory.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        regions: Sequence[MappedRegion],
        renewal: LeaseRenewal,
        report: AttachReport,
    ) -> None:
        self._tensors = tensors
        self._regions = tuple(regions)
        self._renewal = renewal
        self.report = report

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def lease_state(self) -> LeaseState:
        """Return the state of the lease, which is at most a few seconds old.

        On `draining` or `damaged`, stop using the memory and close this object. On `damaged`, attach again, because the
        cache reloads the model into different memory.
        """
        return self._renewal.state

    def check(self) -> None:
        """Raise an error unless the cache is alive and the memory is unchanged. The check takes microseconds.

        Raises:
            PeerLost: the cache's process exited.
            StaleDescriptor: the cache changed or freed the memory.
            IntegrityError: the cache found corrupt bytes in this memory, and `lease_state` is `damaged`.
        """
        if self._renewal.state is LeaseState.DAMAGED:
            hint = "close this object and attach again"
            raise IntegrityError(self._renewal.why, uri=f"penstock:{self.report.key}", hint=hint)
        for region in self._regions:
            region.check()

    def attach_into(self, module: torch.nn.Module, *, strict: bool = True) -> None:
        """Bind a module's parameters and persistent buffers to the cached memory without copying.

        A parameter on another device or on the meta device is replaced under all of its names. Tied parameters stay
        tied.

        Args:
            module: the module, which may be on the meta device.
            strict: whether all names must match. If not, bind only the names that the module and the cache share.

        Raises:
            PlanError: names, shapes or dtypes do not match. The module is unchanged.
        """
        pairs = match_parameters(module, self._tensors, strict=strict)
        # Change the module only after every check, because an error must leave the module unchanged.
        places = places_of(module)
        for target, tensor in pairs:
            _rebind(target, tensor, places[id(target)])

    def close(self) -> None:
        """Release the lease, so that the cache need not wait for this process. Idempotent. See `Attached`."""
        self._renewal.close()


@formerly(wait_s="timeout_s")
def attach(
    model: str,
    *,
    connection: ConnectionSettings | str | None = None,
    device: str | int | torch.device | None = None,
    revision: str | None = None,
    verify: bool = True,
    timeout_s: float = 1.0,
) -> Attached:
    """Map weights that `penstock cache` holds on this host. No byte is copied.

    Args:
        model: the name under which the weights are cached.
        connection: the cache's hub and the hub's token. A str is the hub's address. The default hub is `PENSTOCK_HUB`
            or this host's hub.
        device: `"cpu"`, `"cuda"` or `"cuda:1"` to attach only to weights on that device. None means any device.
        revision: a revision or a unique prefix of a revision. The default is the only cached revision.
        verify: compare every mapped chunk with its digest. On a device the comparison takes 25 ms for 60 GB. On the
            host the comparison reads the whole memory (docs/serve/weight-cache.md). If `verify` is False, trust the
            cache, which verified every chunk on arrival.
        timeout_s: seconds to wait for a cache that is absent or still loading. The wait continues while the cache
            brings the model back from a lower tier.

    Returns:
        Tensors by name. Do not write to the tensors. A write on a device is visible in every engine. A write on the
        host is visible only in this process and uses extra memory.

    Raises:
        NotFound: no cache on this host holds the model after `timeout_s`.
        ConfigError: several revisions are cached, or the weights are on another device, or the cache runs in another
            container and its device memory has no file descriptors.
        IntegrityError: the mapped bytes or the digests are wrong. If the cache's own bytes are corrupt, the cache
            reloads the model and `attach` waits.
        HubUnavailable: no hub responds.
        PermissionDenied: the hub refuses the token for this model.
    """
    require_name("model", model)
    require_type("timeout_s", timeout_s, (int, float), "seconds, such as 30.0")
    wanted_device = None if device is None else resolve_device(device)
    settings = resolve_connection(connection)
    stall_s = Settings.read(stall_s=settings.stall_s).stall_s
    with Journey("attach", model) as journey, Phases("find", journey="attach", model=model) as phases:
        deadline = time.monotonic() + timeout_s
        url = ""
        while True:
            try:
                # Find the hub at each attempt, because another process can take over the role of this host's hub.
                url = (settings.hub or find_hub() or "").rstrip("/")
                if not url:
                    raise NotFound(f"no weight cache has {model!r}: no hub runs on this host", hint=_HINT)
                # Even the last attempt needs time for a request. With `timeout_s=0` there is only one attempt.
                request_s = max(0.2, deadline - time.monotonic())
                with HubClient.connect(url, settings.token, timeout_s=request_s) as client:
                    attached = _Search(client, model, revision or "", wanted_device, stall_s).attach(phases, verify)
                break
            except SourceBusy:
                deadline = max(deadline, time.monotonic() + stall_s)
            except _PASSING as error:
                # A refusal by the hub is permanent. A cache also refuses expired grants, so retry after its refusal.
                is_refused = isinstance(error, PermissionDenied) and error.uri == url
                if is_refused or time.monotonic() >= deadline:
                    raise
            time.sleep(TIMING.cache_pause_s)
        journey.report = attached.report
        return attached


_HINT = "start `penstock cache URI`, or load the weights with penstock.load or fleet.fetch"


class _Search(msgspec.Struct, frozen=True):
    """An attempt to find a cache and attach to its weights."""

    hub: HubClient
    model: str
    revision: str
    device: torch.device | None
    stall_s: float

    def attach(self, phases: Phases, verify: bool) -> Attached:
        phases.enter("find")
        caches = self._caches()
        # The hub issues grants only to members. The address is a placeholder, because this process serves nothing.
        self.hub.hello(Hello(member=self.hub.member, host=host_id(), doors=("unix:///none",), name="attaching"))
        last: PenstockError | None = None
        try:
            for member, holding in caches:
                try:
                    return self._from(member, holding, phases, verify)
                except (*_PASSING, SourceBusy, ConfigError) as error:
                    last = error
        finally:
            with contextlib.suppress(PenstockError):
                self.hub.leave(self.hub.member)
        assert last is not None
        raise last

    def _caches(self) -> list[tuple[str, HoldingState]]:
        # List unsuitable weights in the error, because they explain why no cache was found.
        unsuitable, caches, on_other_gpu = [], [], []
        num_elsewhere = 0
        here = host_id()
        for member in self.hub.status(self.model).members:
            for holding in member.holdings:
                if not holding.is_of(self.revision):
                    continue
                if member.host != here:
                    num_elsewhere += holding.kept
                    continue
                is_complete = holding.kept and (holding.state == "whole" or bool(holding.tier))
                kind = holding.device.partition(":")[0]
                if is_complete and (self.device is None or self.device.type == kind):
                    if self.device is None or device_id(self.device) == holding.device_id:
                        caches.append((member.member, holding))
                        continue
                    on_other_gpu.append(holding)
                unsuitable.append(f"{'kept' if holding.kept else 'not kept'}, {holding.state}, on {holding.device}")
        if not caches:
            if on_other_gpu:
                _gpu_index(on_other_gpu[0], self.device)
            listed = f" (here: {'; '.join(unsuitable[:4])})" if unsuitable else ""
            if num_elsewhere:
                listed += f"; weight caches on other hosts, or with another PENSTOCK_RUNTIME_DIR: {num_elsewhere}"
            raise NotFound(f"no weight cache on this host has {self.model!r} as requested{listed}", hint=_HINT)
        revisions = sorted({holding.revision for _, holding in caches})
        if len(revisions) > 1:
            short = ", ".join(revision[:19] for revision in revisions)
            message = f"several revisions of {self.model!r} are kept: {short}"
            raise _SeveralRevisions(message, hint="pass revision=")
        return caches

    def _from(self, member: str, holding: HoldingState, phases: Phases, verify: bool) -> Attached:
        phases.enter("lease")
        # Register at the hub as a reader without chunks. `source` restricts the reply to this cache.
        empty = msgspec.structs.replace(holding, num_chunks=0, have=(), claims=(), state="filling", parent="")
        reply = self.hub.upstreams(UpstreamsRequest(member=self.hub.member, holding=empty, source=member))
        if not reply.upstreams:
            raise NotFound(f"member {member[:8]} no longer holds {self.model!r}", hint=_HINT)
        peer = PeerClient(
            reply.upstreams[0], member=self.hub.member, key=holding.key, same_host=True, stall_s=self.stall_s
        )
        try:
            peer.lease(attach=True)
            layout, where, log = from_message(peer.table()), peer.map(), peer.log(0, 0.0)
            # The cache may have started to change the memory between the two requests.
            if log.state != "whole" or log.generation != where.generation:
                message = "the weight cache is changing this memory, so attach again"
                raise StaleDescriptor(message, uri=f"penstock:{member}")
            phases.enter("map")
            leaves = _leaves_in(layout, log)
            regions = _map_regions(where, _gpu_index(holding, self.device))
            rows, tensors = _tensors_in(layout, where, regions)
            phases.enter("verify")
            wrong = _differing_chunks(holding, layout, rows, leaves) if verify else np.zeros(0, np.int64)
            # Bytes that the cache changed during the digest must count neither as verified nor as wrong.
            for region in regions:
                region.check()
            if len(wrong):
                # `recheck` raises an error if the cache's bytes are wrong. Caches of earlier releases lack `recheck`.
                with contextlib.suppress(NotFound):
                    peer.recheck(int(wrong[0]))
                message = (
                    f"chunk {int(wrong[0])} of {self.model!r} differs from its digest in the mapping of this process"
                )
                hint = "the weight cache's own bytes are right, so test this host's memory and report the mapping"
                raise IntegrityError(message, uri=f"penstock:{holding.key}", hint=hint)
        except BaseException:
            peer.close()
            raise
        # Freeing the last tensor also frees the lease's owner, whose finalizer releases the lease.
        token = LeaseOwner()
        renewal = LeaseRenewal(peer, log.serial, log.generation, TIMING)
        renewal.start()
        weakref.finalize(token, renewal.close)
        for region in regions:
            region.owner.hold = token
        transport = "nothing to map" if not regions else "shm" if regions[0].device == "cpu" else "cuda_ipc"
        seconds = phases.stop()
        report = AttachReport(
            model=self.model,
            key=holding.key,
            revision=holding.revision,
            num_tensors=len(tensors),
            nbytes=layout.nbytes,
            verified_bytes=layout.nbytes if verify else 0,
            device=regions[0].device if regions else holding.device,
            path=f"{transport}, mapped: {member[:8]}",
            wall_s=sum(seconds.values()),
            phases=seconds,
            verified=verify,
        )
        return Attached(tensors, regions, renewal, report)


def _gpu_index(holding: HoldingState, wanted: torch.device | None) -> int | None:
    if holding.device == "cpu":
        return None
    # Compare GPU ids, because a GPU's index depends on CUDA_VISIBLE_DEVICES.
    for number in range(torch.cuda.device_count()):
        if device_id(torch.device("cuda", number)) == holding.device_id:
            if wanted in (None, torch.device("cuda", number)):
                return number
            message = f"the model is kept on cuda:{number} and not on {wanted}"
            raise ConfigError(message, hint=f"cache the model on {wanted} too, or call fetch()")
    hint = "compare CUDA_VISIBLE_DEVICES in the weight cache and in this process"
    raise ConfigError(f"the model is kept on GPU {holding.device_id}, which is not visible to this process", hint=hint)


NEAREST = ("shm", "cuda_ipc")
MAX_THREADS = 16
"""Maximum number of digest threads. At 10 GB/s each, these threads saturate a host's memory bandwidth."""


def _leaves_in(layout: WeightLayout, log: LogReply) -> U64:
    chunks = decode_column(log.chunks, "<u4")
    digests = decode_digests(log.leaves)
    count = layout.chunks.num_chunks
    if len(chunks) != count or not np.array_equal(np.sort(chunks), np.arange(count)):
        raise FormatError(f"the weight cache's log lists {len(chunks)} chunks, not {count}")
    leaves = np.zeros(layout.chunks.num_leaves, np.uint64)
    if len(leaves) != len(digests):
        raise FormatError(f"the weight cache's log has {len(digests)} digests for {len(leaves)} leaves")
    leaves[layout.chunks.leaves_of(chunks)] = digests
    return leaves


def _map_regions(where: HoldingMap, device: int | None) -> list[MappedRegion]:
    regions = []
    for offered in where.regions:
        name = next((name for name in NEAREST if name in offered), None)
        if name is None:
            raise ConfigError(f"the weight cache offers only {', '.join(offered)}, which cannot be mapped")
        regions.append(map_region(decode(offered[name]), device=device))
    return regions


def _tensors_in(
    layout: WeightLayout, where: HoldingMap, regions: Sequence[MappedRegion]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    region_of, offset_of = locate_rows(layout, where, [region.nbytes for region in regions])
    table = layout.table
    tensors: dict[int, torch.Tensor] = {}
    rows = [torch.empty(0, dtype=torch.uint8)] * len(table)
    for number, region in enumerate(regions):
        whole = _bytes_of(region)
        mine = np.flatnonzero((region_of == number) & (table.nbytes > 0)).tolist()
        offsets = offset_of[mine].tolist()
        dtypes, shapes = [table.dtypes[row] for row in mine], [table.shapes[row] for row in mine]
        tensors |= zip(mine, as_tensors(whole, dtypes, shapes, offsets), strict=True)
        for row, offset in zip(mine, offsets, strict=True):
            rows[row] = whole[offset : offset + int(table.nbytes[row])]
    none = torch.empty(0, dtype=torch.uint8, device=regions[0].device if regions else "cpu")
    for row in range(len(table)):
        if row not in tensors:
            tensors[row] = as_tensors(none, [table.dtypes[row]], [table.shapes[row]], [0])[0]
            rows[row] = none
    return rows, {name: tensors[row] for row, name in enumerate(table.names)}


def _bytes_of(region: MappedRegion) -> torch.Tensor:
    if region.device == "cpu":
        return torch.frombuffer(region.owner, dtype=torch.uint8)[region.offset : region.offset + region.nbytes]
    # Wait for kernels that use the memory, because unmapping does not wait for them.
    weakref.finalize(region.owner, _settle, os.getpid(), region.device).atexit = False
    return torch.as_tensor(region.owner, device=region.device)


def _settle(pid: int, device: str) -> None:
    # A forked child cannot use its parent's device.
    if pid == os.getpid():
        torch.cuda.synchronize(device)


def _differing_chunks(holding: HoldingState, layout: WeightLayout, rows: Sequence[torch.Tensor], leaves: U64) -> I64:
    # A cache could invent digests for any bytes, so check that the digests match the revision.
    VerifiedChunks(layout, leaves).check_revision(holding.identity.key(), holding.identity.revision, holding.revision)
    mapped = PlacedChunks(layout, rows)
    chunks = np.arange(layout.chunks.num_chunks)
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), len(chunks))
    if mapped.device.type != "cpu" or num_threads < 2:
        digests = mapped.digest(chunks)
    else:
        # Give each thread several small parts, so that a thread on a busy core does not delay the whole digest.
        parts = np.array_split(chunks, min(len(chunks), 4 * num_threads))
        with Threads(num_threads, "penstock-digest", waits_for_calls=True) as pool:
            digests = np.concatenate(list(pool.map(mapped.digest, parts)))
    return layout.chunks.differing(chunks, digests, leaves)


def match_parameters(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], *, strict: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each parameter and buffer of a module with its cached tensor. Tied targets use the first matching tensor.

    Raise PlanError if names, shapes, dtypes or the bytes of tied tensors do not match.
    """
    state = {
        name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)
    }
    bound: dict[tuple[int, int, int], tuple[str, torch.Tensor]] = {}
    faults = []
    for name, tensor in tensors.items():
        target = state.get(name)
        if target is None:
            faults += [f"{name}: the target has no such tensor"] * strict
            continue
        require_initialised(name, target)
        if is_sharded(target):
            hint = "attach before the module is sharded, or load each rank's part with load_into"
            raise PlanError("a DTensor cannot be bound to whole tensors", tensor=name, hint=hint)
        if target.dtype != tensor.dtype or target.shape != tensor.shape:
            ours, theirs = f"{tensor.dtype} {list(tensor.shape)}", f"{target.dtype} {list(target.shape)}"
            faults.append(f"{name}: {ours} does not fit {theirs}")
        first, other = bound.setdefault(_memory_of(target), (name, tensor))
        if other is not tensor and not _are_equal(other, tensor):
            raise sources_differ(first, name)
    if strict:
        unbound = [name for name, target in state.items() if _memory_of(target) not in bound and target.numel()]
        faults += [f"{name}: the weight cache has no such tensor" for name in unbound]
    if faults:
        more = f" (and {len(faults) - 10} more)" if len(faults) > 10 else ""
        message = f"{len(faults)} tensors do not fit: {'; '.join(faults[:10])}{more}"
        raise PlanError(message, hint="attach the right model, or pass strict=False to bind only the tensors in both")
    targets = {id(target): target for target in state.values()}.values()
    pairs = [(target, bound[place][1]) for target in targets if (place := _memory_of(target)) in bound]
    # Tied targets may differ in dtype and shape, so view the bytes with each target's dtype and shape.
    return [
        (target, tensor)
        if (tensor.dtype, tensor.shape) == (target.dtype, target.shape)
        else (target, tensor.reshape(-1).view(target.dtype).view(target.shape))
        for target, tensor in pairs
    ]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.nbytes != other.nbytes or one.device != other.device:
        return False
    if one.data_ptr() == other.data_ptr():
        return True
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _memory_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    # A tensor subclass may have no address, or the address of another tensor.
    if not tensor.numel() or type(tensor.data) is not torch.Tensor:
        return id(tensor), 0, 0
    if tensor.is_meta:
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.nbytes
    return tensor.data_ptr(), 0, tensor.nbytes


def _rebind(target: torch.Tensor, tensor: torch.Tensor, places: list[Place]) -> None:
    # Optimizers and the engine keep references to the target, so keep the object if both tensors are on one device.
    if target.device == tensor.device:
        target.data = tensor
        return
    new: torch.Tensor = tensor
    if isinstance(target, torch.nn.Parameter):
        new = torch.nn.Parameter(tensor, requires_grad=target.requires_grad)
    for members, name in places:
        members[name] = new
