"""Creation of a subscriber: its arguments are checked before a hub is contacted.

In: a live model or tensors, a name, a hub or none, options. Out: a `Subscriber` that is listed at the hub.
Not here: what a subscriber does (`subscriber`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch

from penstock.arguments import require_name, wrong
from penstock.config import ConnectionSettings, parse_bytes
from penstock.errors import BudgetTooSmall, ConfigError
from penstock.hub.client import resolve_connection
from penstock.sync.membership import Membership, joined, rank_of
from penstock.sync.receive.hooks import Hooks
from penstock.sync.receive.staged import UpdateOptions
from penstock.sync.receive.subscriber import Subscriber
from penstock.sync.receive.target import Target
from penstock.sync.receive.transfer import LEAST_BYTES
from penstock.sync.recording.layout import Load
from penstock.sync.report import UpdateMode
from penstock.sync.settings import SubscriberSettings
from penstock.sync.shards import to_arenas
from penstock.timing import DEFAULT
from penstock.transform.formats import format_of


def subscriber(
    name: str,
    target: Target,
    *,
    connection: ConnectionSettings | str | None = None,
    mode: UpdateMode = "staged",
    load: Load | None = None,
    strict: bool = True,
    transforms: str | Sequence[str] | None = None,
    rank: tuple[int, int] | None = None,
    hooks: Hooks | None = None,
    settings: SubscriberSettings | None = None,
) -> Subscriber:
    """Receive the versions published under a name into a live model; the publisher may be started later.

    Args:
        name: of the sync.
        target: a module, whose own loader is recorded once; or tensors, DTensors or `Shard`s by the checkpoint's names,
            each in its own layout; or a function that returns these for the published tensors, which it is passed on
            the meta device before the first update (`lambda published: {name: torch.empty_like(...), ...}`); or an
            empty dict, to which the first update adds new tensors on the CPU, all of them or none.
        connection: hub, token, address and transports; see `publisher`.
        mode: `staged`: versions arrive in a staging copy as large as the target, which only the flip touches. `direct`:
            they arrive in the target itself while the engine is paused; no further memory is needed.
        load: takes pairs (name, tensor) and fills the module; None: its `load_weights`, else its state dict's names.
        strict: every parameter of a module, or every tensor of a dict, must be filled by published tensors. False: the
            others keep their values.
        transforms: the tags under which tensors are received where they are offered (`fp8-block128`); None: the one
            that the module has codes and scales for, else the plain tensors.
        rank: this rank of the engine and the number of them, as `(0, 8)`, only shown in `penstock status`; None: of
            torch.distributed where it is initialised, else `(0, 1)`.
        hooks: the engine's callbacks around a commit.
        settings: the limit of its buffers, an arena for the target, and whether it serves other receivers
            (`sync.SubscriberSettings`).

    Raises:
        HubUnavailable: there is no hub. ConfigError: an argument is wrong. MissingExtra: a package for it is missing.
        BudgetTooSmall: `settings.memory_bytes` is too little for direct mode. In staged mode the first update raises
            this.
    """
    require_name("name", name)
    connection = resolve_connection(connection)
    if not isinstance(target, torch.nn.Module | Mapping) and not callable(target):
        raise wrong("target", target, "a torch.nn.Module, a dict of tensors or Shards by name, or a function")
    settings = SubscriberSettings.of(settings)
    if settings.arena and not isinstance(target, torch.nn.Module | Mapping):
        raise ConfigError("the tensors of a function are not moved into an arena", hint="place them in one there")
    if mode not in ("staged", "direct"):
        raise ConfigError(f"a subscriber of {name!r} has mode {mode!r}", hint="give mode staged or direct")
    engine_rank, world_size = rank_of(rank)
    # An unknown tag fails here, and not at the first update, which may be an hour later.
    for tag in (transforms,) if isinstance(transforms, str) else transforms or ():
        format_of(tag)
    budget = None if settings.memory_bytes is None else parse_bytes(settings.memory_bytes)
    if mode == "direct" and budget is not None and budget < LEAST_BYTES:
        raise BudgetTooSmall(f"direct mode cannot work with memory_bytes={budget}", minimum_bytes=LEAST_BYTES)
    has_check = hooks is not None and hooks.check is not None
    if has_check and mode == "direct":
        raise ConfigError("Hooks.check needs a staging copy, which direct mode does not have", hint="use mode='staged'")
    options = UpdateOptions(
        staged=mode == "staged",
        load=load,
        strict=strict,
        transforms=transforms,
        serve=settings.serve,
        memory_bytes=budget,
        has_check=has_check,
        accept=None if hooks is None else hooks.before_read,
    )
    if settings.arena and isinstance(target, torch.nn.Module | Mapping):
        to_arenas(target, is_remappable=mode == "staged")
    with contextlib.ExitStack() as stack:
        member, stall_s = joined(stack, connection)
        this_rank = Subscriber(
            name,
            target,
            Membership(member, name, stall_s),
            options,
            rank=engine_rank,
            world_size=world_size,
            hooks=hooks or Hooks(),
            timing=DEFAULT,
        ).open()
        # From here on `close` leaves.
        stack.pop_all()
    return this_rank
