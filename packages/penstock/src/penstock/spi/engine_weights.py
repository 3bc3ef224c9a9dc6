"""An engine's replica: it reads its checkpoint from a weight cache, a fleet or storage, then serves or releases it.

In: options of an engine's loader; the checkpoint's URIs. Out: named tensors, which the engine copies.
Not here: loading them into the engine, which its adapter does; weights that outlive the engine (`penstock cache`).

If a hub is configured (`"hub"`, or `PENSTOCK_HUB`), a replica attaches to a weight cache of its host that has exactly
this checkpoint, or else joins the fleet of the model's name and serves there. No further option is needed.
`"fleet": false` and `"weight_cache": false` turn each off.

What is exchanged is the checkpoint, not an engine's parameters after its post-processing: the engine runs its own
loading code on bytes whose digests were compared, so a replica is what a load from storage makes, and exchanges with
replicas of other versions, parallel sizes and engines, with weight caches and `penstock fetch`. The price is one copy
of the checkpoint in host memory for as long as the replica serves (`"serve": false`: until it is loaded).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Settings, parse_bytes
from penstock.errors import ConfigError, HubUnavailable, NotFound
from penstock.logs import Log
from penstock.spi.connection import connection_of
from penstock.storage.locate import model_name
from penstock.waits import start_thread

if TYPE_CHECKING:
    import torch

    from penstock.cache.attached import Attached
    from penstock.fetcher.join import Fleet

_LOOK_S = 0.2
"""Pause between looks for the drain file: short beside a pod's grace period, nothing beside an engine's work."""
DRAIN_S = 30.0
"""Longest wait for readers at the end. Source: Kubernetes' default terminationGracePeriodSeconds."""
OPTIONS = ("fleet", "hub", "listen", "data_port", "token_file", "stall_s", "serve", "max_bytes_per_s", "drain_file")
"""Keys of an engine's extra configuration that `FleetOptions.read` takes."""
_TEXTS = ("fleet", "hub", "listen", "token_file", "drain_file")
_OWN_OPTIONS = ("compile_cache", "device", "distributed", "weight_cache", "memory_bytes", "storage_options", "verify")
LOADER_OPTIONS = (*_OWN_OPTIONS, *OPTIONS)
"""Keys of an engine's extra configuration, for `penstock.stream`, the distributed read, a weight cache and a fleet."""

ADAPTERS = "penstock-adapters-"
"""Beginning of the name of a directory that has the versions of an adapter (`adapter.AdapterDirectory`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of a fleet in an engine's `model_loader_extra_config`."""

    fleet: str
    """The name that its members share."""
    hub: str | None = None
    listen: str | None = None
    """`host:port` where other hosts reach this replica."""
    data_port: int = 0
    """Second port at the host of `listen`, for the bytes that others read; 0: any free one."""
    token_file: str | None = None
    """A file whose first token is sent to the hub."""
    stall_s: float | None = None
    """Seconds without progress after which the hub or a member counts as stalled. None means `PENSTOCK_STALL_S`."""
    serve: bool = True
    """Keep the checkpoint in memory and serve it until the process ends."""
    max_bytes_per_s: int = 0
    drain_file: str | None = None
    """When this path appears, stop serving, wait for readers, and create `DRAIN_FILE.done`: for a preStop hook."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], model: str) -> FleetOptions | None:
        """Return the options of the fleet that a replica joins; None: it joins none.

        Args:
            extra: the engine's extra configuration.
            model: name, directory or URI of the model, whose last part is the fleet's default name.

        Raises:
            ConfigError: a value is of the wrong type, or the fleet has no name and no hub is configured.
        """
        options = {name: extra[name] for name in OPTIONS if extra.get(name) is not None}
        if options.get("fleet") is False:
            return None
        if "fleet" not in options:
            if _hub_is_known(extra) and not extra.get("distributed"):
                options["fleet"] = _name_of(model)
            # Alone, these options are for a weight cache, which a hub finds too.
            elif options.keys() <= {"hub", "token_file", "stall_s"}:
                return None
            else:
                raise ConfigError(
                    f"model_loader_extra_config has {sorted(options)}, but neither a fleet nor a hub",
                    hint='give "fleet": "NAME", or set PENSTOCK_HUB',
                )
        for name in _TEXTS:
            if not isinstance(options.get(name, "-"), str) or not options.get(name, "-"):
                raise ConfigError(f"model_loader_extra_config {name!r} must be a text, not {options[name]!r}")
        port = options.get("data_port", 0)
        if not isinstance(port, int) or isinstance(port, bool):
            raise ConfigError(f"model_loader_extra_config 'data_port' must be a port, not {port!r}")
        if not isinstance(options.get("serve", True), bool):
            raise ConfigError(f"model_loader_extra_config 'serve' must be true or false, not {options['serve']!r}")
        if "max_bytes_per_s" in options:
            options["max_bytes_per_s"] = parse_bytes(options["max_bytes_per_s"])
        return cls(**options)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The rank, device and process group of an engine's process.

    Each is a function, called only when the value is needed: an engine may set it up after it made its loader.
    """

    rank: Callable[[], int]
    """Return the local rank: the number of this process among those of the replica on this host."""
    device: Callable[[], str]
    """Return the device of the engine's parameters."""
    group: Callable[[], Any]
    """Return the process group whose ranks read the same weights, or None if there is one rank."""


def read_options(extra: Any) -> dict[str, Any]:
    """Check an engine's `model_loader_extra_config`.

    Raises:
        ConfigError: it is no mapping, holds an unknown key, or a value of the wrong type.
    """
    if not isinstance(extra, Mapping):
        raise ConfigError(f"model_loader_extra_config must be a mapping, not {type(extra).__name__}")
    unknown = sorted(set(extra) - set(LOADER_OPTIONS))
    if unknown:
        raise ConfigError(f"unknown model_loader_extra_config keys {unknown}", hint=f"known are {list(LOADER_OPTIONS)}")
    options = dict(extra)
    if "memory_bytes" in options:
        options["memory_bytes"] = parse_bytes(options["memory_bytes"])
    for name in ("distributed", "verify"):
        if not isinstance(options.get(name, False), bool):
            raise ConfigError(f"model_loader_extra_config {name!r} must be true or false, not {options[name]!r}")
    if not isinstance(options.get("storage_options", {}), Mapping):
        raise ConfigError("model_loader_extra_config 'storage_options' must be a mapping of strings")
    place = options.get("compile_cache", False)
    if not isinstance(place, bool) and (not isinstance(place, str) or not place):
        raise ConfigError(f"model_loader_extra_config 'compile_cache' must be true, false or a URI, not {place!r}")
    weight_cache = options.get("weight_cache")
    if (
        weight_cache is not None
        and weight_cache is not False
        and (not isinstance(weight_cache, str) or not weight_cache)
    ):
        raise ConfigError(
            f"model_loader_extra_config 'weight_cache' must be a model's name, or false, not {weight_cache!r}"
        )
    # The model's name is not known yet: any will do for a check.
    if FleetOptions.read(options, "model") is not None and options.get("distributed"):
        raise ConfigError("'distributed' and 'fleet' both share the reading", hint="give one of them")
    # A rank that attached would be missing in the exchange of the others.
    if weight_cache and options.get("distributed"):
        raise ConfigError("'distributed' and 'weight_cache' exclude each other", hint="give one of them")
    return options


def checkpoint(
    files: str | list[str],
    wanted: Callable[[str], bool] | None,
    options: Mapping[str, Any],
    place: RankInfo,
    *,
    model: str,
    log: Log,
    progress: bool | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors as they arrive: from the weight cache, else the fleet, else storage; log the report.

    Args:
        files: the checkpoint in storage; its headers describe it wherever the bytes come from.
        wanted: filter of names; None: all.
        options: as `read_options` returns them.
        place: see `RankInfo`.
        model: name, directory or URI of the model as its user gave it, whose last part is the default name of fleet and
            weight cache. Not of a copy or a pinned revision: replicas must agree on it.
        log: logger of the report, and of the reason why a weight cache or fleet is not used.
        progress: see `penstock.stream`.

    Raises:
        PenstockError: see `penstock.stream` and `penstock.Fleet.fetch`. ConfigError: the cache has other weights.

    Ownership: copy the tensors, do not change them: other processes read them.
    """
    import penstock

    attached = (
        _attach(options, files, log) if options.get("weight_cache") else _attach_to_same(options, files, model, log)
    )
    if attached is not None:
        with attached:
            log.info("penstock: %s", attached.report)
            yield from ((name, tensor) for name, tensor in attached.items() if wanted is None or wanted(name))
        return
    in_fleet = FleetOptions.read(options, model)
    if in_fleet is not None:
        rank = place.rank()
        fleet = join(in_fleet, files, log=log, rank=rank, memory_bytes=options.get("memory_bytes"))
        if fleet is not None:
            # Host memory by default: beside the parameters a GPU may have no room for the checkpoint.
            device, stores = options.get("device", "cpu"), options.get("storage_options")
            fetched = tensors(fleet, files, in_fleet, log=log, device=device, storage_options=stores, serves=rank == 0)
            yield from ((name, tensor) for name, tensor in fetched if wanted is None or wanted(name))
            return
    settings = penstock.ReadSettings(
        memory_bytes=options.get("memory_bytes"), storage_options=options.get("storage_options")
    )
    device = options.get("device") or place.device()
    group = place.group() if options.get("distributed") else None
    with penstock.stream(
        files,
        device=device,
        names=wanted,
        verify=options.get("verify"),
        group=group,
        progress=progress,
        settings=settings,
    ) as stream:
        yield from stream
        log.info("penstock: %s", stream.report)


def _attach(options: Mapping[str, Any], files: str | Sequence[str], log: Log) -> Attached | None:
    """Attach to the weight cache's weights in host memory; if it is not there, log a warning and return None.

    Raises:
        ConfigError: what the weight cache has under this name are not the tensors of `files`.
    """
    import penstock
    from penstock.storage.weight_set import open_weights

    name = options["weight_cache"]
    connection = connection_of(options, rank=None)
    try:
        attached = penstock.cache.attach(name, connection=connection, device="cpu", verify=options.get("verify", True))
    # A slow start is better than none. Only a cache that is away leads to the fleet or storage, and it is logged.
    except (NotFound, HubUnavailable) as error:
        log.warning("penstock: not attached to weight cache's %s: %s", name, error)
        return None
    try:
        with open_weights(files, settings=Settings.read(), storage_options=options.get("storage_options")) as weights:
            table = weights.manifest.tensors
            shapes = dict(zip(table.names, map(tuple, table.shapes), strict=True))
        # A weight cache's name is chosen by people: another checkpoint under it must not be loaded in silence.
        if shapes != {tensor: tuple(attached[tensor].shape) for tensor in attached}:
            place = files if isinstance(files, str) else files[0]
            hint = "give the name under which this checkpoint is kept"
            raise ConfigError(
                f"the weight cache's {name!r} has other tensors than the checkpoint", uri=place, hint=hint
            )
    except BaseException:
        attached.close()
        raise
    return attached


def _attach_to_same(options: Mapping[str, Any], files: str | Sequence[str], model: str, log: Log) -> Attached | None:
    """Attach to a weight cache of this host that has this model in the revision of `files`; None: there is none.

    No one named the cache: only equal digests, or the same files, prove that it has the same weights.
    """
    import penstock
    from penstock.net.unix_sockets import host_id
    from penstock.peer.local_weights import revision_of
    from penstock.storage.weight_set import open_weights

    if options.get("weight_cache") is False or options.get("distributed") or not _hub_is_known(options):
        return None
    # Weight caches are members of the fleet, under the names of its models.
    name = options.get("fleet") or _name_of(model)
    connection = connection_of(options, rank=None)
    try:
        members = penstock.hub.status(name, connection=connection).members
        # Before the headers are read, which takes requests to storage.
        if not any(state.kept for member in members if member.host == host_id() for state in member.holdings):
            return None
        with open_weights(files, settings=Settings.read(), storage_options=options.get("storage_options")) as weights:
            revision = revision_of(weights.manifest)
        return penstock.cache.attach(
            name,
            connection=connection,
            device="cpu",
            revision=revision,
            verify=options.get("verify", True),
            timeout_s=0,
        )
    # As in `_attach`. The fleet is next, and its log says where the bytes came from.
    except (NotFound, HubUnavailable) as error:
        log.info("penstock: not attached to a weight cache of %s: %s", name, error)
        return None


def _name_of(model: str) -> str:
    """Return the last part of a model's name, directory or URI."""
    # A directory may be given as `.`, which has no name of its own.
    return model_name(os.path.abspath(model) if os.path.isdir(model) else model)


def _hub_is_known(options: Mapping[str, Any]) -> bool:
    """Return whether the options or the environment name a hub; the hub that a host has by itself does not count."""
    return bool(options.get("hub") or Settings.read().hub)


def join(
    options: FleetOptions,
    uris: str | Sequence[str],
    *,
    log: Log,
    rank: int = 0,
    memory_bytes: int | str | None = None,
) -> Fleet | None:
    """Join the fleet. If its hub does not answer, storage is read, and this process joins once the hub does.

    Args:
        options: The fleet's name and connection.
        uris: The weights that are read instead, for the warning.
        log: The engine's logger, which its operator reads.
        rank: Rank of this process among those of one engine on this host. Only rank 0 takes the given ports.
        memory_bytes: see `penstock.join`.

    Returns:
        The fleet, or None if this host's own hub cannot be hosted. A warning then names both paths.

    Raises:
        ConfigError, MissingExtra: see `penstock.join`.
    """
    from penstock.fetcher.join import join_or_warn

    return join_or_warn(
        options.fleet,
        uris if isinstance(uris, str) else f"{len(uris)} files, {uris[0]} first",
        connection=connection_of(asdict(options), rank),
        max_bytes_per_s=options.max_bytes_per_s,
        memory_bytes=memory_bytes,
        log=log,
    )


def tensors(
    fleet: Fleet,
    uris: str | Sequence[str],
    options: FleetOptions,
    *,
    log: Log,
    device: str = "cpu",
    storage_options: Mapping[str, str] | None = None,
    serves: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's tensors, from members, and from storage what none of them has; log the report.

    Args:
        fleet: joined for this call, which leaves it unless the process serves afterwards.
        uris: the fallback in storage; its headers describe the checkpoint.
        options: `serve` and `drain_file` are used.
        log: logger of the report.
        device: device of the tensors before the engine copies them.
        storage_options: see `penstock.load`.
        serves: False: this process does not serve, whatever the options say.

    Raises:
        PenstockError: see `penstock.Fleet.fetch`.

    Ownership: copy the tensors, do not change them: other members read them while they are yielded.
    """
    weights: dict[str, torch.Tensor] = {}
    stays = False
    try:
        report = fleet.fetch(weights, fallback=uris, device=device, storage_options=storage_options)
        log.info("penstock: %s", report)
        yield from weights.items()
        # Only now: an engine that fails while it loads must not stay in the fleet.
        stays = options.serve and serves
    finally:
        if not stays:
            fleet.leave()
    if stays:
        _serve(fleet, options, log)


_serving: list[Fleet] = []
"""Fleets in which this process is a source: several if it loads a draft model beside its target."""
_drain_files: set[str] = set()
"""Drain files that a thread of this process waits for."""


def _serve(fleet: Fleet, options: FleetOptions, log: Log) -> None:
    """Stay a source until the process ends, its drain file appears, or new weights of this model are loaded."""
    keys = _keys(fleet)
    # An engine that was updated from a disk would otherwise keep one more checkpoint in memory after each update.
    for former in [other for other in _serving if _keys(other) & keys]:
        log.info("penstock: %s: the former weights are no longer served", former.identity.model)
        former.leave(0.0)
        atexit.unregister(former.leave)
        _serving.remove(former)
    _serving.append(fleet)
    atexit.register(fleet.leave, 0.0)
    if options.drain_file is not None and options.drain_file not in _drain_files:
        _drain_files.add(options.drain_file)
        drain_file = Path(options.drain_file)
        # Both may be left over from an earlier life of this container.
        for stale in (drain_file, _done_file(drain_file)):
            stale.unlink(missing_ok=True)
        start_thread(threading.Thread(target=_drain, args=(drain_file, log), name="penstock-drain", daemon=True))


def _keys(fleet: Fleet) -> set[tuple[str, str]]:
    """Return the model and layout of what a fleet's member serves: the same for two revisions of a model."""
    return {(weights.identity.model, weights.identity.layout) for weights in fleet.member.weights}


def _drain(drain_file: Path, log: Log) -> None:
    """Wait for the drain file, leave all fleets, and create the file that says so."""
    pause = threading.Event()
    while not drain_file.exists():
        pause.wait(_LOOK_S)
    deadline = time.monotonic() + DRAIN_S
    for fleet in list(_serving):
        log.info("penstock: %s is there: leaving %s", drain_file, fleet.identity.model)
        fleet.leave(max(0.0, deadline - time.monotonic()))
    _drain_files.discard(str(drain_file))
    _done_file(drain_file).touch()


def _done_file(drain_file: Path) -> Path:
    return drain_file.with_name(f"{drain_file.name}.done")
