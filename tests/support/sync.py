"""Ranks of a sync as processes of their own: publishers and subscribers of weights that a seed and a version say.

In: a `SyncTask` a rank. Out: what each says of every publish and update, and whether the bits are the version's.
Not here: what is asserted of them (tests), the process itself (`testing.fleet.Worker`).

    rank = SyncWorker(SyncTask(side="publisher", rank=0, world_size=2));  rank.tell("publish 1")
    rank.say_until("publish 1 done");  rank.process.kill()
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.fleet import Worker, digests, say, set_constants

from penstock.errors import PenstockError

if TYPE_CHECKING:
    import torch

    from penstock.sync.publish.publisher import Publisher
    from penstock.sync.receive.subscriber import Subscriber
    from penstock.sync.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTask:
    """The task of a rank. Its tensors, `layers.I.weight`, are [rows, columns]; `dim` is cut among its side's ranks."""

    side: str
    name: str = "policy"
    rank: int = 0
    world_size: int = 1
    hub: str | None = None
    connection: dict[str, Any] = field(default_factory=dict)
    """Further fields of `ConnectionSettings`."""
    mode: str = ""
    """Empty: the side's default."""
    num_layers: int = 6
    rows: int = 64
    columns: int = 96
    dim: int = 0
    dtype: str = "bfloat16"
    device: str = "cpu"
    rename: str = ""
    """Put before each name: what the other side does not know."""
    frozen: int = 0
    """The first layers, that are the same in every version."""
    tag: str = ""
    """Under which a subscriber takes the tensors; `options` has what its publishers offer."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `publisher` or `subscriber`."""
    environ: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    wait_s: float = 60.0
    """How long `wait V` waits."""
    terms: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `publish` for `together V`."""
    base: str = ""
    """Of the adapter that the versions are; empty: they are no adapter. `base B` changes it."""
    refuses: tuple[int, ...] = ()
    """Versions that the subscriber's check refuses; not empty: it has a check."""
    holds_buffer: bool = False
    """The first read of a source's buffer into which it packed short runs begins, says `holding`, and never ends."""
    pause_s: float = 0.0
    """Time that each digesting of strips takes on top, at a source and a receiver: a slow rank."""


class SyncWorker(Worker):
    """A rank's process. Lines of input: `publish V`, `together V`, `decision`, `update [V]`, `wait V`, `stage [V]`,
    `commit`, `subscribers N`, `spoil` (change a byte of its weights, unannounced), `digests`; of adapters `base B`."""

    room = "tests.support.sync"

    def send(self, line: str) -> None:
        """Send it a line; its earlier answers to the same line are forgotten."""
        self.said.pop(f"{line} done", None)
        self.tell(line)

    def result(self, line: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Return what it says of a line: with `error` and `message` where that failed."""
        return self.say_until(f"{line} done", timeout_s=timeout_s)

    def ask(self, line: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Both."""
        self.send(line)
        return self.result(line, timeout_s=timeout_s)


def whole(task: SyncTask, version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version, all of them."""
    import torch

    found = {}
    for layer in range(task.num_layers):
        stamp = 0 if layer < task.frozen and version >= 0 else version + 1
        chance = torch.Generator().manual_seed(1_000_003 * stamp + layer)
        values = torch.randn(task.rows, task.columns, generator=chance)
        found[f"{task.rename}layers.{layer}.weight"] = values.to(getattr(torch, task.dtype))
    return found


def taken(task: SyncTask, version: int) -> dict[str, torch.Tensor]:
    """Return what a subscriber takes of a version, all of it: under its tag."""
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
    """Return what this rank has of them: views."""
    return {name: one.chunk(task.world_size, task.dim)[task.rank] for name, one in tensors.items()}


def truth(task: SyncTask, version: int) -> str:
    """Return the digest of what a subscriber has once it has a version."""
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


def _slow(pause_s: float) -> None:
    """Have every digesting of strips take this long, on top, in this process."""
    from penstock.sync import local_version

    digest = local_version.VersionRegions.digests

    def slow(self: local_version.VersionRegions, *args: Any, **kwargs: Any) -> Any:
        time.sleep(pause_s)
        return digest(self, *args, **kwargs)

    vars(local_version)["VersionRegions"].digests = slow


def _hold() -> None:
    """Have every read of a source's buffer stop at its start, in this process."""
    from penstock.sync.receive import sources

    def never(*args: Any) -> Any:
        say("holding")
        threading.Event().wait()
        yield

    vars(sources)["_posted"] = never


def _work(task: SyncTask) -> None:
    import torch

    import penstock as ps

    torch.set_num_threads(1)
    set_constants(task.constants)
    if task.pause_s:
        _slow(task.pause_s)
    if task.holds_buffer:
        _hold()
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
            say("joined", member=publisher.member.id, latest=publisher.latest)
            _obey(base, lambda word, number: _publish(task, publisher, shards, base, word, number))
    elif task.base:
        from penstock_hf.adapter import adapter_subscriber

        with adapter_subscriber(task.name, base=lambda: base.identity, target=shards, **common) as received:
            say("joined", member=received.subscriber.member.id)
            _obey(base, lambda word, number: _update(task, received.subscriber, shards, word, number))
    else:
        with ps.subscriber(task.name, shards, **common) as subscriber:
            say("joined", member=subscriber.member.id)
            _obey(base, lambda word, number: _update(task, subscriber, shards, word, number))
    say("left")


@dataclass(slots=True)
class _Base:
    """The base of this rank's adapter."""

    identity: str


def _obey(base: _Base, answer: Any) -> None:
    """Do what each line of input says, one after the other, until they end."""
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        try:
            if word == "base":
                base.identity, found = number, {}
            else:
                found = answer(word, int(number) if number else None)
        except PenstockError as error:
            found = {"error": type(error).__name__, "message": str(error), "mutated": error.mutated}
        say(f"{line.strip()} done", **found)


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


def work(values: dict[str, Any]) -> int:
    """Return a rank's process, as far as it goes; its exit code."""
    threading.current_thread().name = f"{values['side']}-{values.get('rank', 0)}"
    try:
        _work(SyncTask(**values))
    except PenstockError as error:
        say("failed", error=type(error).__name__, message=str(error), mutated=error.mutated)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(work(json.loads(sys.argv[1])))
