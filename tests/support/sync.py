"""Processes that are ranks of a sync. A seed and a version number determine the weights that they publish.

A `SyncTask` describes a rank. The rank runs one command per line of input and sends an event with the result.

    rank = SyncWorker(SyncTask(side="publisher", rank=0, world_size=2));  rank.send("publish 1")
    rank.wait_for("publish 1 done");  rank.process.kill()
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.fleet import Worker, digests, send_event, set_constants

from penstock.errors import PenstockError

if TYPE_CHECKING:
    import torch

    from penstock.sync.publish.publisher import Publisher
    from penstock.sync.receive.subscriber import Subscriber
    from penstock.sync.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTask:
    """Task of a rank. Each tensor `layers.I.weight` is [rows, columns], and the ranks of a side split `dim`."""

    side: str
    name: str = "policy"
    rank: int = 0
    world_size: int = 1
    hub: str | None = None
    connection: dict[str, Any] = field(default_factory=dict)
    """Further fields of `ConnectionSettings`."""
    mode: str = ""
    """Publish or update mode. If empty, use the default of the side."""
    num_layers: int = 6
    rows: int = 64
    columns: int = 96
    dim: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    rename: str = ""
    """Prefix for each tensor name, so that the other side does not know the names."""
    frozen: int = 0
    """Number of first layers that are equal in every version."""
    tag: str = ""
    """Format tag that a subscriber requests. `options` of a publisher lists the offered formats."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `publisher` or `subscriber`."""
    environ: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    wait_s: float = 60.0
    """Timeout of the command `wait V`."""
    terms: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `publish` for `together V`."""
    base: str = ""
    """Base of the published adapter. If empty, the versions are whole models. The command `base B` changes it."""
    refuses: tuple[int, ...] = ()
    """Versions that the subscriber's check refuses. If empty, the subscriber has no check."""
    holds_buffer: bool = False
    """Make the first read of a packed buffer send the event `holding` and never end."""
    pause_s: float = 0.0
    """Extra seconds for each digest of strips, at sources and receivers. This makes a slow rank."""


class SyncWorker(Worker):
    """A process that is a rank of a sync.

    Commands: `publish V`, `together V`, `decision`, `update [V]`, `wait V`, `stage [V]`, `commit`, `subscribers N`,
    `ranks`, `spoil` (change a byte of the weights), `digests`, and `base B` for adapters.
    """

    module = "tests.support.sync"

    def send(self, line: str) -> None:
        """Send a command, and drop earlier results of the same command."""
        self.events.pop(f"{line} done", None)
        super().send(line)

    def result(self, line: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait for the result of a command. A failed command has `error` and `message`."""
        return self.wait_for(f"{line} done", timeout_s=timeout_s)

    def call(self, line: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Send a command and wait for its result."""
        self.send(line)
        return self.result(line, timeout_s=timeout_s)


def whole(task: SyncTask, version: int) -> dict[str, torch.Tensor]:
    """Return the complete weights of a version."""
    import torch

    found = {}
    for layer in range(task.num_layers):
        stamp = 0 if layer < task.frozen and version >= 0 else version + 1
        chance = torch.Generator().manual_seed(1_000_003 * stamp + layer)
        values = torch.randn(task.rows, task.columns, generator=chance)
        found[f"{task.rename}layers.{layer}.weight"] = values.to(getattr(torch, task.dtype))
    return found


def taken(task: SyncTask, version: int) -> dict[str, torch.Tensor]:
    """Return the complete weights that a subscriber receives for a version, in the format of its tag."""
    from penstock.transform.formats import format_of, outputs
    from penstock.transform.quantize import dtype_of, quantise
    from penstock.types import Box

    found = whole(task, version)
    if not task.tag:
        return found
    form = format_of(task.tag)
    made: dict[str, torch.Tensor] = {}
    for name, one in found.items():
        parts = outputs(form, name, dtype_of(one), tuple(one.shape), Box.full(one.shape))
        made |= {part.name: value for part, value in zip(parts, quantise(form, one), strict=True)}
    return made


def part_of(task: SyncTask, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return views of the parts that belong to this rank."""
    return {name: one.chunk(task.world_size, task.dim)[task.rank] for name, one in tensors.items()}


def expected_digest(task: SyncTask, version: int) -> str:
    """Return the digest of the tensors of a subscriber that has this version."""
    return digests({name: one.contiguous() for name, one in part_of(task, taken(task, version)).items()})


def _shards(task: SyncTask, tensors: dict[str, torch.Tensor]) -> dict[str, Shard]:
    import penstock as ps

    found = {}
    for name, one in part_of(task, tensors).items():
        size = tensors[name].shape[task.dim]
        first = task.rank * -(-size // task.world_size)
        offset = tuple(first if dim == task.dim else 0 for dim in range(one.ndim))
        found[name] = ps.Shard(
            tensor=one.to(task.device, copy=True), global_shape=tuple(tensors[name].shape), offset=offset
        )
    return found


def _slow_digests(pause_s: float) -> None:
    """Add a pause to every digest of strips in this process."""
    from penstock.holding import regions

    digest = regions.VersionRegions.digests

    def slow(self: regions.VersionRegions, *args: Any, **kwargs: Any) -> Any:
        time.sleep(pause_s)
        return digest(self, *args, **kwargs)

    vars(regions)["VersionRegions"].digests = slow


def _block_packed_reads() -> None:
    """Block every read of a packed buffer at its start in this process."""
    from penstock.sync.receive import sources

    def never(*args: Any) -> Any:
        send_event("holding")
        threading.Event().wait()
        yield

    vars(sources)["_posted"] = never


def _work(task: SyncTask) -> None:
    import torch

    import penstock as ps

    torch.set_num_threads(1)
    set_constants(task.constants)
    if task.pause_s:
        _slow_digests(task.pause_s)
    if task.holds_buffer:
        _block_packed_reads()
    begin = -1 if task.side == "publisher" else -2
    shards = _shards(task, taken(task, begin))
    connection = ps.ConnectionSettings(hub=task.hub, **task.connection)
    common: dict[str, Any] = {
        "connection": connection,
        "rank": (task.rank, task.world_size),
        **task.options,
    }
    # Fields of the settings, which are classes that a task, as JSON, does not have.
    buffers = {name: common.pop(name) for name in ("arena", "memory_bytes", "pack_bytes", "serve") if name in common}
    kind = ps.sync.PublisherSettings if task.side == "publisher" else ps.sync.SubscriberSettings
    common["settings"] = kind(**buffers)
    if task.mode:
        common["mode"] = task.mode
    if task.tag:
        common["transforms"] = task.tag
    if task.refuses:
        common["hooks"] = ps.Hooks(check=lambda version, staged: "it is refused" if version in task.refuses else "")
    base = _Base(task.base)
    if task.side == "publisher":
        common.setdefault("mode", "live")
        with ps.publisher(task.name, shards, **common) as publisher:
            send_event("joined", member=publisher.member.id, latest=publisher.latest)
            _run_commands(base, lambda word, number: _publish(task, publisher, shards, base, word, number))
    elif task.base:
        from penstock_hf.adapter import adapter_subscriber

        with adapter_subscriber(task.name, base=lambda: base.identity, target=shards, **common) as received:
            send_event("joined", member=received.subscriber.member.id)
            _run_commands(base, lambda word, number: _update(task, received.subscriber, shards, word, number))
    else:
        with ps.subscriber(task.name, shards, **common) as subscriber:
            send_event("joined", member=subscriber.member.id)
            _run_commands(base, lambda word, number: _update(task, subscriber, shards, word, number))
    send_event("left")


@dataclass(slots=True)
class _Base:
    """Identity of the base of this rank's adapter."""

    identity: str


def _run_commands(base: _Base, answer: Any) -> None:
    """Run the command of each line of input until the input ends."""
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        try:
            if word == "base":
                base.identity, found = number, {}
            else:
                found = answer(word, int(number) if number else None)
        except PenstockError as error:
            found = {"error": type(error).__name__, "message": str(error), "mutated": error.mutated}
        send_event(f"{line.strip()} done", **found)


def _publish(
    task: SyncTask, publisher: Publisher, shards: dict[str, Shard], base: _Base, word: str, number: int | None
) -> dict[str, Any]:
    if word == "subscribers":
        publisher.wait_subscribers(number or 0)
        return {}
    if word == "ranks":
        publisher.wait_ranks()
        return {"latest": publisher.latest}
    if word == "spoil":
        next(iter(shards.values())).tensor.view(-1)[0] += 1
        return {}
    if word == "decision":
        report = publisher.wait_decision()
    else:
        assert word in ("publish", "together") and number is not None
        for name, tensor in part_of(task, whole(task, number)).items():
            shards[name].tensor.copy_(tensor)
        terms = {"commit": "all", **task.terms} if word == "together" else {}
        if task.base:
            from penstock_hf.adapter import adapter_metadata

            terms["metadata"] = adapter_metadata(base.identity, {"peft_type": "LORA", "r": 8})
        report = publisher.publish(number, **terms)
    outcome = {
        "outcome": report.outcome,
        "seconds": report.wall_s,
        "committed": report.committed,
        "late": report.late,
        "failed": dict(report.failed),
    }
    sizes = {
        "transformed": report.transformed_bytes,
        "seams": report.boundary_bytes,
        "exchanged": report.exchanged_bytes,
    }
    return outcome | sizes


def _update(
    task: SyncTask, subscriber: Subscriber, shards: dict[str, Shard], word: str, number: int | None
) -> dict[str, Any]:
    if word == "wait":
        return {"version": subscriber.wait(number or 0, timeout_s=task.wait_s)}
    if word == "stage":
        return {"version": subscriber.stage(number)} | _state(subscriber, shards)
    if word == "spoil":
        next(iter(shards.values())).tensor.view(-1)[0] += 1
        return {}
    if word == "digests":
        return _state(subscriber, shards)
    report = subscriber.commit() if word == "commit" else subscriber.update(number)
    outcome = {
        "nbytes": report.nbytes,
        "delta": report.delta,
        "sources": dict(report.sources),
        "path": report.path,
        "why": report.why,
        "packed_bytes": report.packed_bytes,
        "attempts": report.attempts,
        "pause_s": report.pause_s,
        "wall_s": report.wall_s,
    }
    return outcome | _state(subscriber, shards)


def _state(subscriber: Subscriber, shards: dict[str, Shard]) -> dict[str, Any]:
    digest = digests({name: shard.tensor for name, shard in shards.items()})
    return {
        "version": subscriber.version,
        "is_dirty": subscriber.is_dirty,
        "digests": digest,
        "prepared": subscriber.prepared,
        "metadata": dict(subscriber.metadata),
    }


def run_worker(values: dict[str, Any]) -> int:
    """Run a rank in this process and return its exit code."""
    threading.current_thread().name = f"{values['side']}-{values.get('rank', 0)}"
    try:
        _work(SyncTask(**values))
    except PenstockError as error:
        send_event("failed", error=type(error).__name__, message=str(error), mutated=error.mutated)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(run_worker(json.loads(sys.argv[1])))
