"""Create a subscriber. The arguments are checked before a hub is contacted."""

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
    """Receive published versions into a live model. The publisher may start later.

    Args:
        name: name of the sync.
        target: a module, whose loader is recorded once, or tensors, DTensors or `Shard`s by the checkpoint's names,
            each with its own layout. To an empty dict, the first update adds tensors on the CPU. The target may also
            be a function that receives the published tensors on the meta device before the first update and returns
            tensors by name (`lambda published: {name: torch.empty_like(...), ...}`).
        connection: hub, token, address and transports. See `publisher`.
        mode: with `staged`, versions arrive in a staging copy as large as the target, and only the flip writes to the
            target. With `direct`, versions arrive in the target itself while the engine is paused, without a copy.
        load: function that receives pairs (name, tensor) and fills the module. If None, `load_weights` of the module
            is used, or else the names in the module's state dict.
        strict: if True, published tensors must fill every parameter of a module or every tensor of a dict. If False,
            unfilled tensors keep their values.
        transforms: tags of the formats to receive if they are offered (`fp8-block128`). If None, receive the format for
            which the module has codes and scales, or else unquantised tensors.
        rank: rank and number of ranks of the engine, such as `(0, 8)`, which only `penstock status` shows. None means
            the values of torch.distributed if it is initialised, and otherwise `(0, 1)`.
        hooks: the engine's callbacks around a commit.
        settings: limit for the buffers, an arena for the target, and whether the subscriber serves other receivers
            (`sync.SubscriberSettings`).

    Raises:
        HubUnavailable: there is no hub.
        ConfigError: an argument is invalid.
        MissingExtra: a package that an argument needs is not installed.
        BudgetTooSmall: `settings.memory_bytes` is too small. In staged mode, the first update raises this error.
    """
    require_name("name", name)
    connection = resolve_connection(connection)
    if not isinstance(target, torch.nn.Module | Mapping) and not callable(target):
        raise wrong("target", target, "a torch.nn.Module, a dict of tensors or Shards by name, or a function")
    settings = SubscriberSettings.of(settings)
    if settings.arena and not isinstance(target, torch.nn.Module | Mapping):
        raise ConfigError("tensors from a function cannot be moved to an arena", hint="create the tensors in an arena")
    if mode not in ("staged", "direct"):
        raise ConfigError(f"mode {mode!r} of the subscriber to {name!r} is unknown", hint="pass 'staged' or 'direct'")
    engine_rank, world_size = rank_of(rank)
    # Reject an unknown tag here and not in the first update, which may be an hour later.
    for tag in (transforms,) if isinstance(transforms, str) else transforms or ():
        format_of(tag)
    budget = None if settings.memory_bytes is None else parse_bytes(settings.memory_bytes)
    if mode == "direct" and budget is not None and budget < LEAST_BYTES:
        raise BudgetTooSmall(f"memory_bytes={budget} is too small for direct mode", minimum_bytes=LEAST_BYTES)
    hooks = hooks or Hooks()
    if hooks.check is not None and mode == "direct":
        raise ConfigError("Hooks.check needs a staging copy, which direct mode does not have", hint="use mode='staged'")
    options = UpdateOptions(
        staged=mode == "staged",
        load=load,
        strict=strict,
        transforms=transforms,
        serve=settings.serve,
        memory_bytes=budget,
        hooks=hooks,
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
            timing=DEFAULT,
        ).open()
        stack.pop_all()  # from here on, closing the subscriber leaves the sync
    return this_rank
