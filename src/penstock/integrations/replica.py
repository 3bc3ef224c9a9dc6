"""An engine's replica as a member of a fleet: it fetches its checkpoint from members, then serves or releases it.

In: options of an engine's loader; the checkpoint's URIs. Out: named tensors, which the engine copies.
Not here: loading them into the engine (`vllm`); weights that outlive the engine (`penstock keep`).

What is exchanged is the checkpoint, not an engine's parameters after its post-processing: the engine runs its own
loading code on bytes whose digests were compared, so a replica is what a load from storage makes, and exchanges with
replicas of other versions, parallel sizes and engines, with keepers and `penstock pull`. The price is one copy of the
checkpoint in host memory for as long as the replica serves (`"serve": false`: until it is loaded).
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import ConnectionSettings, parse_bytes
from penstock.errors import ConfigError, HubUnavailable

if TYPE_CHECKING:
    import torch

    from penstock.fetch.join import Fleet

_LOOK_S = 0.2
"""Pause between looks for the drain file: short beside a pod's grace period, nothing beside an engine's work."""
DRAIN_S = 30.0
"""Longest wait for readers at the end. Source: Kubernetes' default terminationGracePeriodSeconds."""
OPTIONS = ("fleet", "hub", "listen", "token_file", "serve", "max_bytes_per_s", "drain_file")
"""Keys of an engine's extra configuration that `FleetOptions.read` takes."""
_TEXTS = ("fleet", "hub", "listen", "token_file", "drain_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of a fleet in an engine's `model_loader_extra_config`."""

    fleet: str
    """The name its members agree on."""
    hub: str | None = None
    listen: str | None = None
    """`host:port` where other hosts reach this replica."""
    token_file: str | None = None
    """A file whose first token is sent to the hub."""
    serve: bool = True
    """Keep the checkpoint in memory and serve it until the process ends."""
    max_bytes_per_s: int = 0
    drain_file: str | None = None
    """When this path appears, stop serving, wait for readers, and create `DRAIN_FILE.done`: for a preStop hook."""

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> FleetOptions | None:
        """Return the options of a fleet in an engine's extra configuration; None: it has none.

        Raises:
            ConfigError: a value is of the wrong type, or the fleet's name is missing.
        """
        options = {name: extra[name] for name in OPTIONS if extra.get(name) is not None}
        if not options:
            return None
        if "fleet" not in options:
            raise ConfigError(
                f"model_loader_extra_config has {sorted(options)} but no name of a fleet", hint='give "fleet": "NAME"'
            )
        for name in _TEXTS:
            if not isinstance(options.get(name, "-"), str) or not options.get(name, "-"):
                raise ConfigError(f"model_loader_extra_config {name!r} must be a text, not {options[name]!r}")
        if not isinstance(options.get("serve", True), bool):
            raise ConfigError(f"model_loader_extra_config 'serve' must be true or false, not {options['serve']!r}")
        if "max_bytes_per_s" in options:
            options["max_bytes_per_s"] = parse_bytes(options["max_bytes_per_s"])
        return cls(**options)

    def token(self) -> str | None:
        """Return the first token of the file; None without one. ConfigError: it cannot be read, or has none."""
        from penstock.hub.auth import first_token

        return first_token(self.token_file)


def join(
    options: FleetOptions, uris: str | Sequence[str], *, log: logging.Logger, rank: int = 0, **arguments: Any
) -> Fleet | None:
    """Join the fleet; if no hub answers, log a warning that names both paths, and return None.

    Args:
        options: the fleet's name and connection.
        uris: the weights that are read instead, for the warning.
        log: the engine's logger, which its operator reads.
        rank: rank of this process among those of one engine on this host; only rank 0 takes the port of `listen`.
        arguments: further ones of `penstock.join`.

    Raises:
        ConfigError, MissingExtra: see `penstock.join`.
    """
    from penstock import api

    # One port cannot be bound by every rank of the host: the others take any free one.
    listen = options.listen
    if listen is not None and rank:
        listen = f"{listen.rpartition(':')[0]}:0"
    try:
        return api.join(
            options.fleet,
            connection=ConnectionSettings(hub=options.hub, token=options.token(), listen=listen),
            max_bytes_per_s=options.max_bytes_per_s,
            **arguments,
        )
    # A replica that is slow to start is better than none: only a hub that is away leads to storage, and it is logged.
    except HubUnavailable as error:
        place = uris if isinstance(uris, str) else f"{len(uris)} files, {uris[0]} first"
        log.warning("penstock: reading from storage, %s, instead of fleet %s: %s", place, options.fleet, error)
        return None


def tensors(
    fleet: Fleet,
    uris: str | Sequence[str],
    options: FleetOptions,
    *,
    log: logging.Logger,
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
        log.info("penstock: %s", report.summary())
        yield from weights.items()
        # Only now: an engine that fails while it loads must not stay in the fleet.
        stays = options.serve and serves
    finally:
        if not stays:
            fleet.leave()
    if stays:
        _serve(fleet, options, log)


def _serve(fleet: Fleet, options: FleetOptions, log: logging.Logger) -> None:
    """Stay a source until the process ends or its drain file appears."""
    atexit.register(fleet.leave, 0.0)
    if options.drain_file is not None:
        drain_file = Path(options.drain_file)
        # Both may be left over from an earlier life of this container.
        for stale in (drain_file, _done_file(drain_file)):
            stale.unlink(missing_ok=True)
        arguments = (fleet, drain_file, log)
        threading.Thread(target=_drain, args=arguments, name="penstock-drain", daemon=True).start()


def _drain(fleet: Fleet, drain_file: Path, log: logging.Logger) -> None:
    """Wait for the drain file, leave the fleet, and create the file that says so."""
    pause = threading.Event()
    while not drain_file.exists():
        pause.wait(_LOOK_S)
    log.info("penstock: %s is there: leaving %s", drain_file, fleet.identity.model)
    fleet.leave(DRAIN_S)
    _done_file(drain_file).touch()


def _done_file(drain_file: Path) -> Path:
    return drain_file.with_name(f"{drain_file.name}.done")
