"""Runs a function on several ranks of a torch.distributed group, each in its own process, within a deadline.

A rank may fail, die or hang without blocking the caller. Ranks that still run at the deadline are killed and reported.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from penstock.errors import PenstockError

IMPORTS = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "penstock",
    "penstock.sync.publish.publisher",
    "pytest",
)
"""Modules that all ranks share. None of them accesses a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one rank."""

    ended: Literal["returned", "raised", "died", "hung"]
    value: Any = None
    """The return value of the body, or the message if it raised."""
    error: str = ""
    """Class name of the error that it raised."""
    mutated: bool = False
    """`mutated` of a PenstockError."""
    seconds: float = 0.0
    """Seconds in the body, without joining the group."""


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 60.0,
    environ: dict[str, str] | None = None,
) -> list[Outcome]:
    """Run `body(rank, world_size, *args)` on `world_size` ranks. With NCCL, rank r uses device r.

    Args:
        timeout_s: total time limit. A rank that still runs then is killed and `hung`.
        environ: variables set in each rank before Penstock is imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTS))
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as directory:
        ranks: list[tuple[Any, Connection]] = []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            given = (body, rank, world_size, args, backend, f"{directory}/store", environ or {}, there)
            process = context.Process(target=_rank, args=given, daemon=True)
            process.start()
            there.close()
            ranks.append((process, here))
        outcomes = _collect([pipe for _, pipe in ranks], deadline)
        for process, pipe in ranks:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            pipe.close()
    return outcomes


def _collect(pipes: list[Connection], deadline: float) -> list[Outcome]:
    found: dict[Connection, Outcome] = {}
    while len(found) < len(pipes):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        for pipe in wait([pipe for pipe in pipes if pipe not in found], timeout=left):
            assert isinstance(pipe, Connection)
            try:
                found[pipe] = pipe.recv()
            except EOFError:
                found[pipe] = Outcome(ended="died")
    return [found.get(pipe, Outcome(ended="hung")) for pipe in pipes]


def _rank(
    body: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    backend: str,
    store: str,
    environ: dict[str, str],
    pipe: Connection,
) -> None:
    os.environ.update(environ)
    import torch
    import torch.distributed as dist

    options: dict[str, Any] = {}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, **options)
    dist.barrier()
    start = time.monotonic()
    try:
        value = body(rank, world_size, *args)
        outcome = Outcome(ended="returned", value=value, seconds=time.monotonic() - start)
    except BaseException as error:
        mutated = isinstance(error, PenstockError) and error.mutated
        outcome = Outcome(
            ended="raised",
            value=str(error),
            error=type(error).__name__,
            mutated=mutated,
            seconds=time.monotonic() - start,
        )
        pipe.send(outcome)
        os._exit(1)  # a group whose peer failed may hang when it is taken down
        raise
    with contextlib.suppress(BrokenPipeError):
        pipe.send(outcome)
    os._exit(0)
