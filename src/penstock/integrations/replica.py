"""An engine's replica as a member of a fleet: it takes its checkpoint from members, then serves it or lets it go.

In: options of an engine's loader; where storage has the checkpoint. Out: named tensors, which the engine copies.
Not here: what the engine makes of them (`vllm`); weights that outlive the engine (`penstock keep`).

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
"""How long a leaver waits for its readers. Source: Kubernetes' default terminationGracePeriodSeconds."""
_WORDS = ("fleet", "hub", "listen", "token_file", "drain_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What `model_loader_extra_config` says of a fleet."""

    fleet: str
    """The name its members agree on."""
    hub: str | None = None
    listen: str | None = None
    """`host:port` where other hosts reach this replica."""
    token_file: str | None = None
    """A file whose first token is shown to the hub."""
    serve: bool = True
    """Keep the checkpoint in memory and serve it until the process ends."""
    max_bytes_per_s: int = 0
    drain_file: str | None = None
    """When this path appears, stop serving, wait for readers, and make `DRAIN_FILE.done`: for a preStop hook."""

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> FleetOptions | None:
        """Return the options among an engine's extra configuration; None: it names no fleet.

        Raises:
            ConfigError: a value of the wrong type, or options of a fleet without its name.
        """
        given = {name: extra[name] for name in OPTIONS if extra.get(name) is not None}
        if not given:
            return None
        if "fleet" not in given:
            raise ConfigError(
                f"{sorted(given)} say how to be in a fleet, but not in which", hint='give "fleet": "NAME"'
            )
        for name in _WORDS:
            if not isinstance(given.get(name, "-"), str) or not given.get(name, "-"):
                raise ConfigError(f"model_loader_extra_config {name!r} must be a text, not {given[name]!r}")
        if not isinstance(given.get("serve", True), bool):
            raise ConfigError(f"model_loader_extra_config 'serve' must be true or false, not {given['serve']!r}")
        if "max_bytes_per_s" in given:
            given["max_bytes_per_s"] = parse_bytes(given["max_bytes_per_s"])
        return cls(**given)

    def token(self) -> str | None:
        """Return the first token of the file; None without one. ConfigError: it cannot be read, or has none."""
        from penstock.hub.auth import first_token

        return first_token(self.token_file)


OPTIONS = ("fleet", "hub", "listen", "token_file", "serve", "max_bytes_per_s", "drain_file")
"""Keys of an engine's extra configuration that `FleetOptions.read` takes."""


def join(
    options: FleetOptions, uris: str | Sequence[str], *, log: logging.Logger, rank: int = 0, **arguments: Any
) -> Fleet | None:
    """Join the fleet; None, with a warning that names both paths, where its hub is away.

    Args:
        options: which fleet.
        uris: what is read instead, for the warning.
        log: the engine's, so that its operator sees the line.
        rank: of this process among those of one engine on this host; only rank 0 takes the port of `listen`.
        arguments: further ones of `penstock.join`.

    Raises:
        ConfigError, MissingExtra: see `penstock.join`.
    """
    from penstock import api

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
    except HubUnavailable as error:
        place = uris if isinstance(uris, str) else f"{len(uris)} files, {uris[0]} first"
        log.warning("penstock: not from fleet %s but from storage, %s: %s", options.fleet, place, error)
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
    """The checkpoint's tensors, from members and from storage what none of them has; a line in the log says which.

    Args:
        fleet: joined for this; ended by this.
        uris: the fallback, whose headers say what the checkpoint is.
        options: whether to serve afterwards.
        log: where the report goes.
        device: where the tensors go before the engine copies them.
        storage_options: see `penstock.load`.
        serves: False: not this process, whatever the options say.

    Raises:
        PenstockError: see `penstock.Fleet.fetch`.

    Ownership: tensors are to be copied, not changed: others read them while they are yielded.
    """
    weights: dict[str, torch.Tensor] = {}
    stays = False
    try:
        report = fleet.fetch(weights, fallback=uris, device=device, storage_options=storage_options)
        log.info("penstock: %s", report.summary())
        yield from weights.items()
        stays = options.serve and serves
    finally:
        if not stays:
            fleet.leave()
    if stays:
        _serve(fleet, options, log)


def _serve(fleet: Fleet, options: FleetOptions, log: logging.Logger) -> None:
    """Stay a source until the process ends or drains."""
    atexit.register(fleet.leave, 0.0)
    if options.drain_file is not None:
        told = Path(options.drain_file)
        for stale in (told, _answer(told)):  # of an earlier life of this container
            stale.unlink(missing_ok=True)
        arguments = (fleet, told, log)
        threading.Thread(target=_drain_when_told, args=arguments, name="penstock-drain", daemon=True).start()


def _drain_when_told(fleet: Fleet, told: Path, log: logging.Logger) -> None:
    pause = threading.Event()
    while not told.exists():
        pause.wait(_LOOK_S)
    log.info("penstock: %s is there: leaving %s", told, fleet.identity.model)
    fleet.leave(DRAIN_S)
    _answer(told).touch()


def _answer(told: Path) -> Path:
    return told.with_name(f"{told.name}.done")
