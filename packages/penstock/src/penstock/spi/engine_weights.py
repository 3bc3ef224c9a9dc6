"""An engine's replica: it reads its checkpoint from a weight cache, a fleet or storage, and then serves or releases it.

With a hub (`"hub"`, or `PENSTOCK_HUB`), a replica attaches to a weight cache on its host that has exactly this
checkpoint. Without a cache, the replica joins the fleet with the model's name. Replicas exchange the checkpoint,
not processed parameters, so replicas with different versions, parallel sizes and engines can share the bytes.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Settings, parse_bytes
from penstock.errors import ConfigError, HubUnavailable, NotFound, PenstockError
from penstock.logs import Log
from penstock.spi.connection import connection_of
from penstock.storage.locate import model_name
from penstock.waits import start_thread

if TYPE_CHECKING:
    import torch

    from penstock.cache.attached import Attached
    from penstock.fetcher.join import Fleet

_LOOK_S = 0.2
"""Seconds between checks for the drain file. This is short compared with a pod's grace period."""
DRAIN_S = 30.0
"""Maximum wait for readers at exit. Source: Kubernetes' default terminationGracePeriodSeconds."""
OPTIONS = ("fleet", "hub", "listen", "data_port", "token_file", "stall_s", "serve", "max_bytes_per_s", "drain_file")
"""Keys in an engine's extra configuration that `FleetOptions.read` reads."""
_TEXTS = ("fleet", "hub", "listen", "token_file", "drain_file")
_OWN_OPTIONS = ("compile_cache", "device", "distributed", "weight_cache", "memory_bytes", "storage_options", "verify")
LOADER_OPTIONS = (*_OWN_OPTIONS, *OPTIONS)
"""Keys in an engine's extra configuration for `penstock.stream`, the distributed read, a weight cache and a fleet."""
ADAPTERS = "penstock-adapters-"
"""Name prefix of a directory with the versions of an adapter (`adapter.AdapterDirectory`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options for a fleet in an engine's `model_loader_extra_config`."""

    fleet: str
    """The name of the fleet."""
    hub: str | None = None
    listen: str | None = None
    """`host:port` at which other hosts reach this replica."""
    data_port: int = 0
    """Second port at the host of `listen`, from which peers read bytes. 0 selects a free port."""
    token_file: str | None = None
    """File whose first token is sent to the hub."""
    stall_s: float | None = None
    """Seconds without progress after which the hub or a member counts as stalled. None means `PENSTOCK_STALL_S`."""
    serve: bool = True
    """Whether to keep the checkpoint in memory and serve it until the process ends."""
    max_bytes_per_s: int = 0
    drain_file: str | None = None
    """When this file appears, stop serving, wait for readers, and create `DRAIN_FILE.done`. A preStop hook uses it."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], model: str) -> FleetOptions | None:
        """Return the options of the fleet that a replica joins, or None if it does not join a fleet.

        Args:
            model: name, directory or URI of the model. The last segment is the default name of the fleet.

        Raises:
            ConfigError: a value has the wrong type, or the fleet has no name and no hub is configured.
        """
        options = {name: extra[name] for name in OPTIONS if extra.get(name) is not None}
        if options.get("fleet") is False:
            return None
        if "fleet" not in options:
            if _hub_is_known(extra) and not extra.get("distributed"):
                options["fleet"] = _name_of(model)
            # If there are no other options, these options configure only the weight cache, which also requires a hub.
            elif options.keys() <= {"hub", "token_file", "stall_s"}:
                return None
            else:
                raise ConfigError(
                    f"model_loader_extra_config has {sorted(options)}, but no fleet and no hub",
                    hint='add "fleet": "NAME", or set PENSTOCK_HUB',
                )
        for name in _TEXTS:
            _require(options, name, _is_text, "a text")
        _require(options, "data_port", lambda port: isinstance(port, int) and not isinstance(port, bool), "a port")
        _require(options, "serve", lambda serve: isinstance(serve, bool), "true or false")
        if "max_bytes_per_s" in options:
            options["max_bytes_per_s"] = parse_bytes(options["max_bytes_per_s"])
        return cls(**options)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The rank, device and process group of an engine's process.

    Each field is a function, because an engine may know the value only after it created its loader.
    """

    rank: Callable[[], int]
    """Returns the local rank of this process in the replica on this host."""
    device: Callable[[], str]
    """Returns the device of the engine's parameters."""
    group: Callable[[], Any]
    """Returns the process group of the ranks that read the same weights, or None for a single rank."""


def read_options(extra: Any) -> dict[str, Any]:
    """Check an engine's `model_loader_extra_config`. Raise ConfigError for an unknown key or an invalid value."""
    if not isinstance(extra, Mapping):
        raise ConfigError(f"model_loader_extra_config must be a mapping, not {type(extra).__name__}")
    unknown = sorted(set(extra) - set(LOADER_OPTIONS))
    if unknown:
        hint = f"use keys from {list(LOADER_OPTIONS)}"
        raise ConfigError(f"unknown model_loader_extra_config keys {unknown}", hint=hint)
    options = dict(extra)
    if "memory_bytes" in options:
        options["memory_bytes"] = parse_bytes(options["memory_bytes"])
    for name in ("distributed", "verify"):
        _require(options, name, lambda value: isinstance(value, bool), "true or false")
    if not isinstance(options.get("storage_options", {}), Mapping):
        raise ConfigError("model_loader_extra_config 'storage_options' must be a mapping of strings")
    _require(options, "compile_cache", lambda at: isinstance(at, bool) or _is_text(at), "true, false or a URI")
    if options.get("weight_cache") is not None and options["weight_cache"] is not False:
        _require(options, "weight_cache", _is_text, "a model's name or false")
    # The model's name is not known yet, but any name works for this check.
    if FleetOptions.read(options, "model") is not None and options.get("distributed"):
        raise ConfigError("'distributed' and 'fleet' are mutually exclusive", hint="set only one of them")
    # A rank that attached to a cache would not take part in the exchange among the ranks.
    if options.get("weight_cache") and options.get("distributed"):
        raise ConfigError("'distributed' and 'weight_cache' are mutually exclusive", hint="set only one of them")
    return options


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _require(options: Mapping[str, Any], name: str, is_valid: Callable[[Any], bool], expected: str) -> None:
    if name in options and not is_valid(options[name]):
        raise ConfigError(f"model_loader_extra_config {name!r} must be {expected}, not {options[name]!r}")


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
    """Yield a checkpoint's tensors as they arrive from the weight cache, the fleet or storage. Log the report.

    Copy the tensors and do not change them, because other processes read them.

    Args:
        files: the checkpoint in storage. The headers of these files describe the checkpoint for every source.
        wanted: filter for names. None means all.
        options: the result of `read_options`.
        place: see `RankInfo`.
        model: name, directory or URI of the model as the user wrote it, not a copy or a pinned revision. The last
            segment is the default name of the fleet and the weight cache, which must be equal for all replicas.
        log: logger for the report, and for the reason why a weight cache or fleet is not used.
        progress: see `penstock.stream`.

    Raises:
        PenstockError: see `penstock.stream` and `penstock.Fleet.fetch`.
        ConfigError: the weight cache has different weights.
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
            # Use host memory by default, because the checkpoint may not fit on a GPU next to the parameters.
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


def prepare_checkpoint(options: Mapping[str, Any], device: Callable[[], str]) -> None:
    """Import the reader and pin its staging in a thread, while the engine creates its model.

    Nothing is prepared if another reader than `penstock.stream` may be used. Errors are left to the load.
    """
    if options.get("distributed") or options.get("weight_cache") or options.get("fleet") or _hub_is_known(options):
        return
    # As for a load, the device may be a number, which is not prepared.
    place = str(options.get("device") or device())
    if place.startswith("cuda"):
        thread = threading.Thread(target=_prepare, args=(place, options.get("memory_bytes")), name="penstock-prepare")
        start_thread(thread, is_needed=False)


def _prepare(device: str, memory_bytes: int | None) -> None:
    import penstock.loader.load  # noqa: F401 - the load needs the module soon
    from penstock.loader.session import prepare_staging, resolve_device

    with suppress(PenstockError):
        prepare_staging(resolve_device(device), memory_bytes, keep_s=_PREPARED_S)


_PREPARED_S = 30.0
"""Seconds for which prepared staging waits for the load. vLLM creates a model in a few seconds."""


def _attach(options: Mapping[str, Any], files: str | Sequence[str], log: Log) -> Attached | None:
    import penstock
    from penstock.storage.weight_set import open_weights

    name = options["weight_cache"]
    connection = connection_of(options, rank=None)
    try:
        attached = penstock.cache.attach(name, connection=connection, device="cpu", verify=options.get("verify", True))
    # Fall back to the fleet or storage only if the cache does not exist or the hub does not respond.
    except (NotFound, HubUnavailable) as error:
        log.warning("penstock: not attached to %s in the weight cache: %s", name, error)
        return None
    try:
        with open_weights(files, settings=Settings.read(), storage_options=options.get("storage_options")) as weights:
            table = weights.manifest.tensors
            shapes = dict(zip(table.names, map(tuple, table.shapes), strict=True))
        # Users choose the names in a weight cache, so a name may belong to a different checkpoint.
        if shapes != {tensor: tuple(attached[tensor].shape) for tensor in attached}:
            place = files if isinstance(files, str) else files[0]
            hint = "set `weight_cache` to the name of this checkpoint in the weight cache"
            raise ConfigError(
                f"{name!r} in the weight cache has different tensors from the checkpoint", uri=place, hint=hint
            )
    except BaseException:
        attached.close()
        raise
    return attached


def _attach_to_same(options: Mapping[str, Any], files: str | Sequence[str], model: str, log: Log) -> Attached | None:
    """Attach to a weight cache on this host that has this model in the revision of `files`, or return None.

    The user did not name the cache, so only equal digests or equal files prove that it has the same weights.
    """
    if options.get("weight_cache") is False or options.get("distributed") or not _hub_is_known(options):
        return None
    # These imports take 40 ms, which an engine without a hub does not need.
    import penstock
    from penstock.holding.weight_layout import revision_of
    from penstock.net.unix_sockets import host_id
    from penstock.storage.weight_set import open_weights

    # Weight caches are members of the fleet under the names of their models.
    name = options.get("fleet") or _name_of(model)
    connection = connection_of(options, rank=None)
    try:
        members = penstock.hub.status(name, connection=connection).members
        # Check for a cache before reading the headers, because reading them costs requests to storage.
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
    # Log no warning, because the fleet is tried next and logs the source of the bytes.
    except (NotFound, HubUnavailable) as error:
        log.info("penstock: not attached to a weight cache of %s: %s", name, error)
        return None


def _name_of(model: str) -> str:
    # The user may write a directory as `.`, which does not end with a name.
    return model_name(os.path.abspath(model) if os.path.isdir(model) else model)


def _hub_is_known(options: Mapping[str, Any]) -> bool:
    """Return whether the options or the environment name a hub. The default hub of the host does not count."""
    return bool(options.get("hub") or Settings.read().hub)


def join(
    options: FleetOptions, uris: str | Sequence[str], *, log: Log, rank: int = 0, memory_bytes: int | str | None = None
) -> Fleet | None:
    """Join the fleet. If the hub does not respond, read storage, and join as soon as the hub responds.

    `uris` names the weights in storage in the warning. Only rank 0 of an engine on this host uses the configured ports.
    Returns None, after a warning, if the hub of this host cannot start.
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
    """Yield the checkpoint's tensors from members, and from storage if no member has them. Log the report.

    Copy the tensors and do not change them, because other members read them while they are yielded. The process leaves
    the fleet at the end unless it serves, which requires both `options.serve` and `serves`.
    """
    weights: dict[str, torch.Tensor] = {}
    stays = False
    try:
        report = fleet.fetch(weights, fallback=uris, device=device, storage_options=storage_options)
        log.info("penstock: %s", report)
        yield from weights.items()
        # Set `stays` last, because an engine that fails while it loads must not stay in the fleet.
        stays = options.serve and serves
    finally:
        if not stays:
            fleet.leave()
    if stays:
        _serve(fleet, options, log)


_serving: list[Fleet] = []
"""Fleets in which this process is a source. A draft model has a separate fleet."""
_drain_files: set[str] = set()
"""Drain files for which a thread of this process is waiting."""


def _serve(fleet: Fleet, options: FleetOptions, log: Log) -> None:
    keys = _keys(fleet)
    # Leave earlier fleets, because an engine that is updated from disk would keep one more checkpoint per update.
    for former in [other for other in _serving if _keys(other) & keys]:
        log.info("penstock: %s: the earlier weights are no longer served", former.identity.model)
        former.leave(0.0)
        atexit.unregister(former.leave)
        _serving.remove(former)
    _serving.append(fleet)
    atexit.register(fleet.leave, 0.0)
    if options.drain_file is not None and options.drain_file not in _drain_files:
        _drain_files.add(options.drain_file)
        drain_file = Path(options.drain_file)
        # The drain file and the done file may be left over from a previous run of this container.
        for stale in (drain_file, _done_file(drain_file)):
            stale.unlink(missing_ok=True)
        start_thread(threading.Thread(target=_drain, args=(drain_file, log), name="penstock-drain", daemon=True))


def _keys(fleet: Fleet) -> set[tuple[str, str]]:
    return {(weights.identity.model, weights.identity.layout) for weights in fleet.member.weights}


def _drain(drain_file: Path, log: Log) -> None:
    pause = threading.Event()
    while not drain_file.exists():
        pause.wait(_LOOK_S)
    deadline = time.monotonic() + DRAIN_S
    for fleet in list(_serving):
        log.info("penstock: %s exists, so this process leaves %s", drain_file, fleet.identity.model)
        fleet.leave(max(0.0, deadline - time.monotonic()))
    _drain_files.discard(str(drain_file))
    _done_file(drain_file).touch()


def _done_file(drain_file: Path) -> Path:
    return drain_file.with_name(f"{drain_file.name}.done")
