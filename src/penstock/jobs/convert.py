"""`convert`: any weight set to any other, out of core, resumable, published whole.

In: URIs and words. Out: a checkpoint where there was none, and a `ConvertReport`.
Not here: the plan (`job`), the workers (`run`), what operations do.

    open sources --> plan_job --> OutputSet + Journal (resumed?) --> Coordinator --> leaves, manifest --> publish
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.config import Settings, parse_bytes
from penstock.digest.leaf import LEAF_BYTES, leaf_digests, num_leaves, revision
from penstock.errors import ConfigError
from penstock.jobs.job import SHARD_BYTES, Job, plan_job
from penstock.jobs.journal import Journal
from penstock.jobs.messages import Words
from penstock.jobs.run import Coordinator, Crew, LocalCrew, WorkerStats
from penstock.jobs.words import Word, operation_of
from penstock.plan.tasks import TASK_BYTES
from penstock.storage import is_remote, list_uris, local_path, read_small
from penstock.storage.files import FileSource
from penstock.storage.manifest import WeightSet, encode, open_weights
from penstock.storage.output import OutputSet, require_free
from penstock.storage.place import SIDECAR
from penstock.storage.upload import publish_remote
from penstock.types import GB, MIB, U64, FileEntry, Manifest, TensorTable

WORKER_MEMORY_BYTES = 512 * MIB
"""Host memory of one worker's tasks unless the user says otherwise: four tasks of 64 MiB, and room to spare."""

_SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_MAX_SMALL_BYTES = 64 * MIB
"""Longest configuration or tokenizer that is copied along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion did."""

    uri: str
    """Where the result is."""
    revision: str
    operation: str
    num_tensors: int
    nbytes: int
    """Of the result's tensors."""
    read_bytes: int
    """Of the tasks done in this run, as planned."""
    num_tasks: int
    num_resumed: int
    """Tasks that an earlier run had done."""
    num_stolen: int
    num_twice: int
    wall_s: float
    busy_s: Mapping[str, float]
    """Per executor, summed over workers; beside `wall_s` and the number of workers it is the utilisation."""
    workers: tuple[WorkerStats, ...]
    peak_bytes: int
    """Most host memory that any worker's tasks held at once."""
    verified: bool = True
    """The manifest's digests are of the bytes as they were made."""

    @property
    def gb_per_s(self) -> float:
        """Bytes read a second."""
        return self.read_bytes / GB / self.wall_s if self.wall_s else 0.0


Progress = Callable[[int, int], None]
"""Called with tasks done and tasks in all."""


def convert(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    *,
    to: str | None = None,
    operations: Sequence[Word] = (),
    devices: str | Sequence[str] = "all",
    workers: int | None = None,
    memory_bytes: int | str | None = None,
    task_bytes: int | str = TASK_BYTES,
    shard_bytes: int | str = SHARD_BYTES,
    storage_options: Mapping[str, str] | None = None,
    spool: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    crew: Crew | None = None,
    address: str | None = None,
    on_progress: Progress | None = None,
) -> ConvertReport:
    """Convert one or several checkpoints to one.

    Args:
        sources: what is read; as many as the first operation takes.
        destination: a directory that is not there yet, or a prefix of an object store.
        to: a format (`cast:BF16`, `fp8-block128`, ...) that what the operations give is stored in.
        operations: one after the other, each `{"op": name, ...}`; none: a copy.
        devices: `"all"`: every GPU, or one worker a core where there is none; `"cpu"`; or names, one worker each.
        workers: how many, taking `devices` in turn; None: one for each.
        memory_bytes: host memory of each worker's tasks.
        task_bytes: see `plan.tasks.cut`.
        shard_bytes: files of at most so many bytes.
        storage_options: see `load`; of sources and destination.
        spool: where files grow that go to an object store; None: the system's temporary directory.
        trace: a directory for one Chrome trace a worker.
        crew, address: who starts workers, and where they connect; None: processes of this host.
        on_progress: see `Progress`.

    Returns:
        What was done. The destination is whole, with index, manifest and the first source's small files.

    Raises:
        ConfigError: something is at the destination, or words that mean nothing.
        PlanError, BudgetTooSmall: sources do not fit the operation; a task needs more than `memory_bytes`.
        OperationFailed: an operation raised, hung, or gave what it had not said.
        SourceChanged, DiskFull, SourceError, DestinationError: as their names say.
        After all of these the destination is untouched, and the same call goes on where this one ended.
    """
    began = time.monotonic()
    settings = Settings.read()
    uris = [os.fspath(sources)] if isinstance(sources, str | os.PathLike) else [os.fspath(one) for one in sources]
    into = os.fspath(destination)
    words = [*operations, *([{"op": "to", "format": to}] if to is not None else [])]
    operation = operation_of(words)
    if not is_remote(into):
        require_free(Path(local_path(into)))
    with ExitStack() as stack:
        opened = [
            stack.enter_context(open_weights(uri, settings=settings, storage_options=storage_options)) for uri in uris
        ]
        job = plan_job(
            operation,
            [one.manifest for one in opened],
            task_bytes=parse_bytes(task_bytes),
            shard_bytes=parse_bytes(shard_bytes),
        )
        budget = WORKER_MEMORY_BYTES if memory_bytes is None else parse_bytes(memory_bytes)
        job.check_budget(budget, "one task")
        growing = _growing(into, job.key, spool)
        out = OutputSet(growing, job.files.table, job.files.body_nbytes, {"format": "pt"})
        stack.callback(out.close)
        out.create()
        out.open()
        journal = Journal(growing.with_name(f"{growing.name}.journal"), job.key)
        stack.callback(journal.close)
        _forget_what_did_not_last(job, journal, out)
        num_resumed = len(journal.done)
        said = Words(
            sources=tuple(uris),
            operation=tuple(dict(word) for word in words),
            key=job.key,
            directory=str(growing),
            task_bytes=parse_bytes(task_bytes),
            shard_bytes=parse_bytes(shard_bytes),
            leaf_bytes=LEAF_BYTES,
            memory_bytes=budget,
            stall_s=settings.stall_s,
            storage_options=dict(storage_options or {}),
            trace="" if trace is None else os.fspath(trace),
        )
        total = len(job.tasks)
        coordinator = Coordinator(
            job,
            said,
            journal,
            LocalCrew() if crew is None else crew,
            _devices(devices, workers),
            stall_s=settings.stall_s,
            address=address,
            on_task=None if on_progress is None else (lambda left: on_progress(total - left, total)),
        )
        with coordinator:
            coordinator.run()
        for one in opened:
            _check_unchanged(one)
        manifest = _manifest(job, journal, out)
        small = _small_files(uris[0], operation.config, settings, storage_options) | {SIDECAR: encode(manifest)}
        if is_remote(into):
            publish_remote(out, into, small, settings=settings, storage_options=storage_options)
        else:
            out.publish(Path(local_path(into)), small)
        journal.path.unlink(missing_ok=True)
        placement = coordinator.placement
        ran = np.setdiff1d(np.arange(total), np.fromiter(journal.kept, np.int64, len(journal.kept)))
        return ConvertReport(
            uri=into,
            revision=manifest.revision,
            operation=operation.name,
            num_tensors=len(job.files.table),
            nbytes=int(job.files.table.nbytes.sum()),
            read_bytes=int(job.tasks.in_bytes[ran].sum()),
            num_tasks=total,
            num_resumed=num_resumed,
            num_stolen=placement.num_stolen,
            num_twice=placement.num_twice,
            wall_s=time.monotonic() - began,
            busy_s=_summed(coordinator.stats),
            workers=tuple(coordinator.stats),
            peak_bytes=max((one.peak_bytes for one in coordinator.stats), default=0),
        )


def _growing(into: str, key: str, spool: str | os.PathLike[str] | None) -> Path:
    """Where the files grow: beside the destination, so that a rename publishes them."""
    if not is_remote(into):
        final = Path(local_path(into)).absolute()
        final.parent.mkdir(parents=True, exist_ok=True)
        return final.with_name(f".{final.name}.penstock-{key[:12]}")
    return Path(tempfile.gettempdir() if spool is None else spool) / f"penstock-{key[:12]}"


def _devices(devices: str | Sequence[str], workers: int | None) -> list[str]:
    """One device for each worker."""
    if workers is not None and workers < 1:
        raise ConfigError(f"{workers} workers")
    named = [devices] if isinstance(devices, str) else list(devices)
    if named == ["all"]:
        import torch

        named = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    if named == ["cpu"] and workers is None:
        workers = len(os.sched_getaffinity(0))
    return [named[i % len(named)] for i in range(workers or len(named))]


def _forget_what_did_not_last(job: Job, journal: Journal, out: OutputSet) -> None:
    """Read back what earlier runs wrote, and forget tasks whose bytes are not those of their digests."""
    lost: dict[int, None] = {}
    for task, digests in journal.done.items():
        if not 0 <= task < len(job.tasks) or not np.array_equal(_digests_of(job, task, out), digests):
            lost[task] = None
    if lost:
        journal.forget(lost)
    journal.kept = frozenset(journal.done)


def _digests_of(job: Job, task: int, out: OutputSet) -> U64:
    found = []
    for one in job.written(task):
        at = int(job.files.table.offset[one.row])
        for start, stop in one.pieces(job.leaf_bytes):
            found.append(_digest(out, int(job.files.table.file_index[one.row]), at + start, stop - start))
    return np.array(found, np.uint64)


def _digest(out: OutputSet, file: int, offset: int, nbytes: int) -> int:
    data, digest = memoryview(bytearray(nbytes)), np.empty(1, np.uint64)
    out.read(file, offset, data)
    leaf_digests(data, nbytes, digest)
    return int(digest[0])


def _manifest(job: Job, journal: Journal, out: OutputSet) -> Manifest:
    """The output's, from what tasks said; leaves that no one task wrote whole are read back."""
    table, leaf_bytes = job.files.table, job.leaf_bytes
    counts = num_leaves(table.nbytes, leaf_bytes)
    first = np.concatenate([[0], np.cumsum(counts)])
    leaves, is_known = np.zeros(int(first[-1]), np.uint64), np.zeros(int(first[-1]), bool)
    for task in range(len(job.tasks)):
        digests = iter(journal.done[task].tolist())
        for one in job.written(task):
            for start, stop in one.pieces(leaf_bytes):
                digest = next(digests)
                whole = min((start // leaf_bytes + 1) * leaf_bytes, int(table.nbytes[one.row]))
                if start % leaf_bytes == 0 and stop == whole:
                    at = int(first[one.row]) + start // leaf_bytes
                    leaves[at], is_known[at] = digest, True
    for at in np.flatnonzero(~is_known).tolist():
        row = int(np.searchsorted(first, at, side="right")) - 1
        start = (at - int(first[row])) * leaf_bytes
        nbytes = min(leaf_bytes, int(table.nbytes[row]) - start)
        leaves[at] = _digest(out, int(table.file_index[row]), int(table.offset[row]) + start, nbytes)
    entries = zip(out.names, out.file_nbytes, strict=True)
    placed = TensorTable(
        names=table.names,
        dtypes=table.dtypes,
        shapes=table.shapes,
        file_index=table.file_index,
        offset=table.offset + np.array(out.data_offset, np.int64)[table.file_index],
        nbytes=table.nbytes,
    )
    return Manifest(
        files=tuple(FileEntry(name=name, nbytes=nbytes, metadata={"format": "pt"}) for name, nbytes in entries),
        tensors=placed,
        leaf_bytes=leaf_bytes,
        leaves=leaves,
        revision=revision(placed, leaf_bytes, leaves),
    )


def _check_unchanged(weights: WeightSet) -> None:
    """SourceChanged if a local file is another than when the job began: what workers opened later is it, too."""
    for source in weights.sources:
        if isinstance(source, FileSource):
            source.check_unchanged()


def _small_files(
    uri: str,
    config: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    settings: Settings,
    storage_options: Mapping[str, str] | None,
) -> dict[str, bytes]:
    """Configuration and tokenizer of a source, with the configuration as the operation changes it."""
    found: dict[str, bytes] = {}
    for one in list_uris(uri, settings=settings, storage_options=storage_options):
        name = one.rpartition("/")[2]
        if not name.endswith(_SMALL_SUFFIXES) or name.endswith(".safetensors.index.json"):
            continue
        raw = read_small(one, settings=settings, storage_options=storage_options)
        if raw is None or len(raw) > _MAX_SMALL_BYTES:
            continue
        if name == "config.json":
            raw = msgspec.json.format(msgspec.json.encode(config(msgspec.json.decode(raw))), indent=2)
        found[name] = raw
    return found


def _summed(stats: Sequence[WorkerStats]) -> dict[str, float]:
    busy: dict[str, float] = {}
    for one in stats:
        for name, seconds in one.busy_s.items():
            busy[name] = busy.get(name, 0.0) + seconds
    return busy
