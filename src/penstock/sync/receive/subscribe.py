"""`subscriber`: an inference rank joins a sync.

In: a live model or tensors, a name, a hub or none. Out: a `Subscriber`.
Not here: what it does (`subscriber`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch

from penstock.arguments import require_name, require_type
from penstock.config import ConnectionSettings, parse_bytes
from penstock.errors import BudgetTooSmall, ConfigError
from penstock.hub.client import resolve_connection
from penstock.sync.membership import joined
from penstock.sync.receive.subscriber import Hooks, Subscriber
from penstock.sync.receive.target import Target, to_arenas
from penstock.sync.receive.transfer import LEAST_BYTES
from penstock.sync.receive.update import Options
from penstock.sync.recording.layout import Load
from penstock.sync.report import UpdateMode
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
    rank: int = 0,
    world_size: int = 1,
    hooks: Hooks | None = None,
    serve: bool = True,
    arena: bool = False,
    memory_bytes: int | str | None = None,
    stall_s: float | None = None,
) -> Subscriber:
    """Receive what is published under a name into a live model; a publisher need not be there yet.

    Args:
        name: of the sync.
        target: a module, whose own loader is recorded once; or tensors, DTensors or `Shard`s by the checkpoint's names,
            each in its own layout.
        connection, arena, stall_s: see `publisher`.
        mode: `staged`: received beside the target, which is touched by the flip alone; takes its memory again.
            `direct`: received into the target itself while the engine is paused; takes no memory.
        load: takes pairs (name, tensor) and fills the module; None: its `load_weights`, else its state dict's names.
        strict: every parameter of a module must be filled by what is published.
        transforms: the tags that tensors are taken under where they are offered so (`fp8-block128`); None: the one
            that the module has codes and scales for, else tensors as they are.
        rank, world_size: for people.
        hooks: what the engine does around a commit.
        serve: be a source for other receivers between updates; False, where the engine changes weights in place.
        memory_bytes: staged, bound of the memory beside the target; direct, of bytes read and not yet verified.

    Raises:
        HubUnavailable: there is no hub. ConfigError, MissingExtra: an argument, or a package for it.
        BudgetTooSmall: direct mode cannot do with so little; staged says so at the first update.
    """
    require_name("name", name)
    connection = resolve_connection(connection)
    require_type(
        "target", target, (torch.nn.Module, Mapping), "a torch.nn.Module, or a dict of tensors or Shards by name"
    )
    if mode not in ("staged", "direct") or not name or not 0 <= rank < world_size:
        message = f"a subscriber of {name!r}, mode {mode!r}, rank {rank} of {world_size}"
        raise ConfigError(message, hint="it has a name, mode staged or direct, and ranks count from 0")
    for tag in (transforms,) if isinstance(transforms, str) else transforms or ():
        format_of(tag)
    budget = None if memory_bytes is None else parse_bytes(memory_bytes)
    if mode == "direct" and budget is not None and budget < LEAST_BYTES:
        raise BudgetTooSmall(f"{budget} bytes under way", minimum_bytes=LEAST_BYTES)
    options = Options(
        staged=mode == "staged", load=load, strict=strict, transforms=transforms, serve=serve, memory_bytes=budget
    )
    if arena:
        to_arenas(target)
    with contextlib.ExitStack() as stack:
        member, wait_s = joined(stack, connection, stall_s)
        hooks = hooks or Hooks()
        made = Subscriber(name, target, member, options, rank=rank, world_size=world_size, hooks=hooks, stall_s=wait_s)
        stack.pop_all()
    return made
