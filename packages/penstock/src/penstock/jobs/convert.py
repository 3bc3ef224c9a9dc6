"""`convert`: any weight set to any other, out of core, resumable, published whole.

In: URIs and operations. Out: a checkpoint where there was none, and a `ConvertReport`.
Not here: the plan (`request`, `job`), the workers (`coordinator`), the journal and the sidecar files (`result`).

    Conversion.plan: sources opened, job planned
    Conversion.make: OutputSet, Journal (resumed?) --> Coordinator runs the tasks
                     --> publish: sources unchanged? manifest, index, small files, rename or upload
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.arguments import require_type, wrong
from penstock.config import parse_bytes
from penstock.engine.trace import Trace, open_trace, save_spans
from penstock.errors import (
    ConfigError,
    DestinationError,
    IntegrityError,
    PenstockError,
    SourceChanged,
    SourceTruncated,
)
from penstock.hub.job_state import JobObserver
from penstock.jobs.coordinator import Coordinator
from penstock.jobs.job import SHARD_BYTES, ConversionJob, bytes_read
from penstock.jobs.messages import EXECUTORS, JobSpec, listen
from penstock.jobs.operations.spec import COPIES, Operations, is_copy
from penstock.jobs.report import ConvertReport, Predicted, WorkerTrace, how_verified, outcome_of, predict, rows_of
from penstock.jobs.request import ConvertRequest, plan_request, uris_of
from penstock.jobs.result import (
    ONE_FILE,
    SCHEME,
    Journal,
    MemoryDestination,
    Notes,
    check_repeated,
    check_unchanged,
    config_of,
    fill,
    forget_what_did_not_last,
    manifest_of,
    output_of,
    published,
    sidecar_files,
    small_files,
    stamp,
    true_of,
)
from penstock.jobs.watch import JobWatch
from penstock.jobs.workers.in_process import ThreadLauncher
from penstock.jobs.workers.launch import Launcher, LocalLauncher, devices_of, gpus, has_driver
from penstock.loader.progress import Progress, ProgressOption
from penstock.storage import is_remote, text_of
from penstock.storage.locate import left_out
from penstock.storage.output import OutputRegion, OutputSet, publish_remote, require_free_remote
from penstock.storage.place import STAMP, DestinationClaim, OutputPlace, require_apart
from penstock.storage.small_files import NO_SMALL_FILES, find_small_files
from penstock.storage.weight_set import Uris
from penstock.storage.write import typed
from penstock.telemetry.journey import Journey
from penstock.types import GIB, MIB
from penstock.waits import Threads

if TYPE_CHECKING:
    from penstock.plan.cluster import Rates

THREAD_BYTES = 1024 * MIB
"""Conversions that read and write at most this much in all are small: one thread makes them in the time in which
processes start. Source: two cores, 600 MB from BF16 to Q8_0, benchmarks/results/cpu2_202611/gguf.md."""
COPY_THREAD_BYTES = 16 * GIB
"""The same for operations that change no value: reads, digests and writes let go of the interpreter's lock. Source: two
cores, benchmarks/results/cpu2_202611/convert.md, "Copies beside cp". Larger ones were not tried."""
_NO_ARITHMETIC = COPIES | {"reshard"}
_THREAD_OPERATIONS = _NO_ARITHMETIC | {"store", "dequantise", "gguf", "average", "linear"}
"""Operations that may run on several torch threads in the caller's process: each element is computed by itself, or with
its block's maximum. A dot product (`slerp`) and a product of matrices (`lora-merge`) add in another order on another
number of threads, which gives other bits; functions of users may hang or end the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings by which a conversion runs: its workers, their memory, and the machines they run on.

    `convert` takes one as `workers=`; an int there is the number of workers, and None stands for the defaults.

    Attributes:
        num_workers: workers, which take `devices` in turn; None: one for each device.
        memory_bytes: host memory of each worker, as a number or a text like `"2G"`; None: 512 MiB. A task that does not
            fit is made smaller, or in parts, or refused; also on a GPU, which has its tasks in its own memory.
        task_bytes: bytes in and out of one task; tasks are smaller where they would not fit in a worker's memory. None:
            64 MiB, and up to 128 MiB where the sources have more than 8 GiB together.
        storage_options: options for the object stores of sources and destination, by obstore's names; they win over
            the environment, and are left out of the repr.
        trace: a file for one Chrome trace of all workers; None: no trace is written.
        scratch: directory in which files grow that go to an object store; None: the system's temporary directory.
        ray: address of a Ray cluster to start the workers on, where source, destination and `scratch` are the same.
        launcher: starts the workers and ends them; None: processes of this host, or Ray's actors.
        rates: rates of this machine, to predict the duration by; None: those that are known of its GPUs.
        observer: is shown the conversion while it runs: a `HubReporter` reports it to a hub, for `status` and the page.

    Raises:
        ConfigError: a field has the wrong type or no valid value, or `ray` and `launcher` are both given.
    """

    num_workers: int | None = None
    memory_bytes: int | str | None = None
    task_bytes: int | str | None = None
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    trace: str | os.PathLike[str] | None = None
    scratch: str | os.PathLike[str] | None = None
    ray: str | None = None
    launcher: Launcher | None = None
    rates: Rates | None = None
    observer: JobObserver | None = None

    def __post_init__(self) -> None:
        require_type("num_workers", self.num_workers, (int, type(None)), "a number of workers, or None")
        if self.num_workers is not None and self.num_workers < 1:
            raise ConfigError(f"num_workers={self.num_workers}: a conversion needs at least one worker")
        # Parsed here only to be checked: an unreadable size should fail where it is written, not in the conversion.
        for nbytes in (self.memory_bytes, self.task_bytes):
            if nbytes is not None:
                parse_bytes(nbytes)
        options = "options of the store by name, or None"
        require_type("storage_options", self.storage_options, (Mapping, type(None)), options)
        require_type("trace", self.trace, (str, os.PathLike, type(None)), "a file, or None")
        require_type("scratch", self.scratch, (str, os.PathLike, type(None)), "a directory, or None")
        require_type("ray", self.ray, (str, type(None)), "the address of a Ray cluster, or None")
        require_type("launcher", self.launcher, (Launcher, type(None)), "an object with spawn, ended and kill, or None")
        require_type("observer", self.observer, (JobObserver, type(None)), "an object with begin, or None")
        if self.rates is not None:
            # Imported only here: most conversions are given no rates, and need nothing of the simulation.
            from penstock.plan.cluster import Rates

            require_type("rates", self.rates, Rates, "a penstock.plan.cluster.Rates, or None")
        if self.ray is not None and self.launcher is not None:
            raise ConfigError("ray and launcher are both given", hint="leave out ray=, or launcher=")

    @classmethod
    def of(cls, workers: WorkerSettings | int | None) -> WorkerSettings:
        """Return the settings that the argument of `convert` stands for. ConfigError if it is of another type."""
        if isinstance(workers, cls):
            return workers
        if workers is None or (isinstance(workers, int) and not isinstance(workers, bool)):
            return cls(num_workers=workers)
        raise wrong("workers", workers, "a number of workers, a penstock.jobs.WorkerSettings, or None")


def convert(
    sources: Uris,
    destination: str | os.PathLike[str] | MemoryDestination,
    *,
    to: str | None = None,
    operations: Operations = (),
    verify: bool | None = None,
    devices: str | Sequence[str] = "all",
    workers: WorkerSettings | int | None = None,
    shard_bytes: int | str = SHARD_BYTES,
    replace: bool = False,
    progress: ProgressOption = None,
) -> ConvertReport:
    """Convert one or several checkpoints to one.

    Args:
        sources: URIs of the checkpoints to read; as many as the first operation takes.
        destination: a directory that does not exist yet, a prefix of an object store, or a weight cache's `into`.
        to: a format (`cast:BF16`, `fp8-block128`, ...) that the result of the operations is stored in; `gguf`,
            `gguf:Q8_0`, `gguf:F16`, `gguf:BF16` or `gguf:F32`: one GGUF file.
        operations: one after the other, each `{"op": name, ...}` or as `--op` has it (`"slerp:t=0.4"`); one alone
            need not be in a list; none: a copy.
        verify: compare what is read with the leaf digests of each source that has them; True: of all, or fail;
            False: of none.
        devices: `"all"`: every GPU, or one worker a core where there is none; `"cpu"`; or names, one worker each.
        workers: the number of workers; None: one for each device. Or `WorkerSettings`, for their memory, the options
            for object stores, a trace, a Ray cluster, a launcher of your own.
        shard_bytes: largest size of an output file, at least 1; a larger tensor has a file of its own.
        replace: a directory with a weight set at the destination stays until the new one is complete, which takes its
            place at once; then it is removed. Not for object stores, which cannot replace several objects at once.
        progress: see `load`; counts tasks.

    Returns:
        The report. The destination is complete, with index, manifest and the first source's small files.

    Raises:
        ConfigError: something is at the destination, or an argument has no valid value.
        PlanError, BudgetTooSmall: sources do not fit the operation; a task needs more than `memory_bytes`.
        OperationFailed: an operation raised, hung, or returned other tensors than its recipes say.
        IntegrityError, SourceChanged, DiskFull, SourceError, DestinationError: as their names say.

    After all of these the destination is untouched, and the same call resumes; one into memory starts again.
    """
    began = time.monotonic()
    settings = WorkerSettings.of(workers)
    if not isinstance(destination, MemoryDestination):
        destination = text_of(destination)
    into = destination.uri if isinstance(destination, MemoryDestination) else destination
    _require_text([*uris_of(sources), into, os.fspath(settings.scratch or "")])
    if replace:
        _check_replaceable(destination)
    _check_apart(uris_of(sources), destination, replace=replace)
    with Journey("convert", uri=into) as journey:
        # Names that are no device are reported now; GPUs are only counted once there is a process to count them in.
        devices_of(devices, settings.num_workers, list)
        stages = open_trace(settings.trace)
        # One stack for everything: sources, staging files and workers end together, after the result is published.
        with ExitStack() as stack:
            shown = stack.enter_context(Progress(progress, into, unit="tasks"))
            conversion = Conversion(
                destination,
                settings,
                devices,
                replace=replace,
                stack=stack,
                stages=stages,
                shown=shown,
                journey=journey,
            )
            conversion.plan(sources, to, operations, verify=verify, shard_bytes=shard_bytes)
            conversion.make()
            end = stack.pop_all()
        # Before the workers end: whatever goes wrong there, the result is published, and this is the last state.
        conversion.watch.done(conversion.revision, len(conversion.journal.kept))
        # Closed outside of the `with`, as a stage of its own: ending workers is part of the time that the report has.
        with stages.stage("close"):
            end.close()
        if settings.trace is not None:
            save_spans(settings.trace, {"job": stages.take(), **rows_of(conversion.traces, EXECUTORS)}, stages.origin)
        report = conversion.report(began)
        # Workers that were lost were replaced.
        journey.num_retries = max(0, len(report.workers) - report.num_workers)
        journey.received = lambda: {
            ("storage", "workers"): report.fetched_bytes,
            ("cache", "workers"): report.held_bytes,
        }
        journey.outcome = outcome_of(report)
        return report


class Conversion:
    """One conversion: `plan`, then `make`, then `report`.

    Args:
        destination: The directory, prefix or memory to write to.
        settings, devices: How the workers run.
        replace: Whether the result may replace a directory.
        stack: Closes the sources, the staging files and the workers.
        stages, shown, journey: The trace, the progress and the record of this call.

    Attributes:
        request: The opened sources and the job.
        journal: The tasks that are done.
        watch: The states for an observer.
        coordinator: The coordinator of the workers. None if an earlier call had published this very result.
        revision: The revision of the published result. Empty before.
    """

    request: ConvertRequest
    journal: Journal
    watch: JobWatch
    _launcher: Launcher
    _out: OutputSet
    _job_spec: JobSpec
    """The job for workers, with the directory that they write to."""
    _place: OutputPlace | None
    """The destination, if it is a local directory."""

    def __init__(
        self,
        destination: str | MemoryDestination,
        settings: WorkerSettings,
        devices: str | Sequence[str],
        *,
        replace: bool,
        stack: ExitStack,
        stages: Trace,
        shown: Progress,
        journey: Journey,
    ) -> None:
        self._destination = destination
        self._settings = settings
        self._devices = devices
        self._replace = replace
        self._stack = stack
        self._stages = stages
        self._shown = shown
        self._journey = journey
        # The small files of the source whose configuration the result has, if it is published as files.
        self._small_files = NO_SMALL_FILES
        self._config: bytes | None = None
        self._predicted: Predicted = None, "nothing was left to do"
        self.coordinator: Coordinator | None = None
        self.revision = ""

    @property
    def into(self) -> str:
        """Return the URI of the destination."""
        return self._destination if isinstance(self._destination, str) else self._destination.uri

    @property
    def traces(self) -> Sequence[WorkerTrace]:
        """Return the spans of every worker."""
        return () if self.coordinator is None else self.coordinator.traces

    def plan(
        self,
        sources: Uris,
        to: str | None,
        operations: Operations,
        *,
        verify: bool | None,
        shard_bytes: int | str,
    ) -> None:
        """Open the sources, plan the job, and choose where its workers run. Arguments and errors as of `convert`."""
        settings, stack = self._settings, self._stack
        in_memory = isinstance(self._destination, MemoryDestination)
        only_copies = to is None and is_copy(operations)
        may_use_threads = not in_memory and _may_use_threads(settings, self._devices, only_copies=only_copies)
        # Before the plan: workers import torch and start their driver, which takes seconds, while it is made.
        launcher = None if may_use_threads else _launcher(settings, self._devices, stack)
        with self._stages.stage("plan"):
            request = plan_request(
                sources,
                to,
                operations,
                stack,
                verify=verify,
                task_bytes=settings.task_bytes,
                shard_bytes=ONE_FILE if in_memory else shard_bytes,
                memory_bytes=settings.memory_bytes,
                storage_options=settings.storage_options,
            )
            # Again for the files: an index can name some of another directory, and links lead anywhere.
            files = [source.uri for weights in request.opened for source in weights.sources]
            _check_apart(files, self._destination, replace=self._replace)
            request.job.check_budget(request.job_spec.memory_bytes, "one task")
        if launcher is None and _fits_a_thread(request):
            launcher = stack.enter_context(ThreadLauncher())
            self._settings, self._devices = dataclasses.replace(settings, num_workers=1), "cpu"
        self._launcher = _launcher(settings, self._devices, stack) if launcher is None else launcher
        self.request = request
        self.watch = JobWatch(settings.observer, request.job, request.job_spec.sources, self.into)

    def make(self) -> None:
        """Run the tasks that no earlier call finished, and publish the result. Errors as of `convert`."""
        try:
            if isinstance(self._destination, MemoryDestination):
                self.revision = fill(self._destination, self.request.job, self._fill)
                return
            self._stage(self._destination)
            if not self._is_published():
                self._run()
                self._shown.state("publishing")
                with self._stages.stage("publish"):
                    self.publish()
        except BaseException as error:
            self.watch.failed(error)
            raise

    def _fill(self, out: OutputRegion, notes: Notes) -> None:
        """Run every task into memory: no sidecar files are written, nothing is resumed."""
        self._out, self.journal = out, notes
        # Workers map the same memory by its path, as they would open the files of a directory.
        self._job_spec = msgspec.structs.replace(self.request.job_spec, directory=str(out.directory), in_memory=True)
        self._run()
        for weights in self.request.opened:
            check_unchanged(weights)

    def _stage(self, into: str) -> None:
        """Open the staging files and the journal of earlier calls. The stack removes what no later call can use."""
        if into.startswith(SCHEME):
            raise ConfigError(
                "a weight cache is not a directory",
                uri=into,
                hint="pass WeightCache.into(MODEL), or use `penstock convert`",
            )
        request, stack = self.request, self._stack
        job, settings, options = request.job, request.settings, request.job_spec.storage_options
        # Before anything is written: a broken config.json must not cost hours of conversion.
        beside = find_small_files(
            request.small_place(job.small_from),
            [file.name for file in request.opened[job.small_from].manifest.files],
            settings=settings,
            storage_options=options,
        )
        self._small_files = true_of(beside, job.operation)
        self._config = config_of(self._small_files, job.operation, settings, options)
        self._place = None if is_remote(into) else OutputPlace.at(into)
        staged_path = _staging_path(job, self._place, self._settings.scratch)
        stack.push(partial(_name_destination, staged_path, into))
        # The journal first: its lock keeps a second process of this very job away from the files.
        self.journal = Journal.open(staged_path.with_name(f"{staged_path.name}.journal"), job.key)
        stack.callback(self.journal.close)
        self._out = output_of(job, request.opened, staged_path)
        stack.callback(self._out.close)
        # Pushed last, so that it runs first, while the journal's lock is still held.
        stack.push(partial(_leave, self.journal, self._out))
        self._job_spec = msgspec.structs.replace(request.job_spec, directory=str(staged_path))

    def _is_published(self) -> bool:
        """Return whether an earlier call has published this very result; else open its files and correct the journal.

        Until the stack ends no other writer may begin at this place.
        """
        job, journal, into, out = self.request.job, self.journal, self.into, self._out
        settings, options = self.request.settings, self._job_spec.storage_options
        if revision := published(job, into, settings, options):
            # The report then counts every task as done by an earlier call.
            journal.kept = frozenset(range(len(job.tasks)))
            journal.remove()
            out.remove()
            self.revision = revision
            return True
        if self._place is None:
            require_free_remote(into, settings=settings, storage_options=options)
            # The system's directory for temporary files is other users' too.
            self._stack.enter_context(DestinationClaim.open(out.directory, out.directory, mode=0o700))
        else:
            self._place.require_free(replace=self._replace)
            self._stack.enter_context(DestinationClaim.open(self._place.path, out.directory))
        out.make()
        # A file of an earlier call may be gone, or short: missing bytes read as zeros.
        if journal.done:
            out.allocate()
        out.open()
        forget_what_did_not_last(job, journal, out)
        return False

    def _run(self) -> None:
        """Run every task that no earlier call finished. Workers start while disk space is allocated.

        Raises:
            ConfigError: workers on other hosts, and a destination in this host's memory. See `Coordinator.run`.
        """
        job, stages = self.request.job, self._stages
        if self._job_spec.in_memory and self._launcher.listen is not None:
            message = "workers on other hosts cannot write to memory of this host"
            raise ConfigError(message, uri=self.into, hint="leave out ray=, or convert to a directory")
        # All files, since the prediction has no rate for a store, wherever one of them is.
        uris = [*(source.uri for weights in self.request.opened for source in weights.sources), self.into]
        is_over = threading.Event()
        # Allocating hundreds of gigabytes and importing torch each take seconds: they run side by side.
        with Threads(1, "penstock-room", waits_for_calls=True) as pool, ExitStack() as ends:
            # Set before the pool is left, which waits for its thread: an error here must not wait for the allocation.
            ends.callback(is_over.set)
            room = pool.submit(_make_room, self._out, stages, is_over)
            self._shown.state("starting workers", len(self.journal.done), len(job.tasks))
            with stages.stage("workers"):
                # A local launcher counts GPUs in a process of its own, so that this one needs no driver.
                counted = self._launcher.gpus if isinstance(self._launcher, LocalLauncher) else gpus
                where = devices_of(self._devices, self._settings.num_workers, counted)
                coordinator = self._start_workers(where)
            here = where if self._launcher.listen is None else ()
            self._predicted = predict(job, self.journal.kept, uris, here, self._settings.rates)
            # No task before there is room for it: a disk that is too small fails here, and not hours later.
            room.result()
        # While it runs, of the workers alone; at its end, of the report.
        self._journey.received = lambda: {
            ("storage", "workers"): sum(stats.fetched_bytes for stats in list(coordinator.stats))
        }
        with stages.stage("run"):
            coordinator.run()
        self.watch.publishing(coordinator)
        check_repeated(job, self.journal, self._out, coordinator.repeated)

    def _start_workers(self, where: Sequence[str]) -> Coordinator:
        # A random name: two jobs of one process must not meet at one address.
        listener, address = listen(self._launcher.listen, secrets.token_hex(8))
        coordinator = Coordinator(
            self.request.job,
            msgspec.structs.replace(self._job_spec, trace=self._stages.enabled),
            self.journal,
            self._launcher,
            where,
            listener=listener,
            address=address,
            on_progress=self._shown,
            on_turn=lambda: self.watch.turn(coordinator),
        )
        self._stack.enter_context(coordinator)
        self.coordinator = coordinator
        coordinator.begin()
        return coordinator

    def publish(self) -> None:
        """Publish the complete result, if no source changed meanwhile."""
        request, out = self.request, self._out
        job, settings, options = request.job, request.settings, self._job_spec.storage_options
        for weights in request.opened:
            check_unchanged(weights)
        manifest = manifest_of(job, self.journal, out)
        small = sidecar_files(
            job, manifest, small_files(self._small_files, self._config, job.operation, settings, options)
        )
        small |= {STAMP: stamp(job, manifest.revision, [*small, *out.index()])}
        if self._place is None:
            publish_remote(out, self.into, small, settings=settings, storage_options=options)
        else:
            out.publish(self._place.path, small, replace=self._replace)
        # Last: a crash before this line leaves a journal whose job the next call finds published, by its stamp.
        self.journal.remove()
        self.revision = manifest.revision

    def report(self, began: float) -> ConvertReport:
        """Return the report of a conversion that began at this monotonic time."""
        request, resumed, coordinator = self.request, self.journal.kept, self.coordinator
        job, (predicted_s, predicted_by) = request.job, self._predicted
        stats = () if coordinator is None else tuple(coordinator.stats)
        # This process reads too, where sources have a cache: headers, and leaves to compute missing digests.
        came_here = bytes_read(request.opened)
        fetched_bytes = came_here[0] + sum(worker.fetched_bytes for worker in stats)
        asked_bytes = came_here[1] + sum(worker.asked_bytes for worker in stats)
        ended = time.monotonic()
        # No worker may ever have been ready: then all of the time is the start's.
        started = ended if coordinator is None else min(coordinator.began, ended)
        others = [weights for i, weights in enumerate(request.opened) if i != job.small_from]
        why_left_out = dict(self._small_files.left_out) | {
            path: "it does not belong to the weight set"
            for weights in others
            for path in left_out(weights.uri, [file.name for file in weights.manifest.files])
        }
        read_bytes = job.read_bytes[[task for task in range(len(job.tasks)) if task not in resumed]].sum(axis=0)
        return ConvertReport(
            uri=self.into,
            revision=self.revision,
            operation=job.operation.name,
            num_tensors=len(job.files.table),
            nbytes=int(job.files.table.nbytes.sum()),
            read_bytes=int(read_bytes.sum()),
            verified_bytes=int(read_bytes[np.array(job.held_to) > 0].sum()),
            fetched_bytes=fetched_bytes,
            # Below zero where a cache fetched whole chunks of which only parts were requested.
            held_bytes=max(0, asked_bytes - fetched_bytes),
            num_tasks=len(job.tasks),
            num_resumed=len(resumed),
            num_stolen=0 if coordinator is None else coordinator.placement.num_stolen,
            num_twice=0 if coordinator is None else coordinator.placement.num_twice,
            num_workers=0 if coordinator is None else coordinator.num_workers,
            wall_s=ended - began,
            start_s=started - began,
            moving_s=0.0 if coordinator is None else coordinator.moving_s,
            predicted_s=predicted_s,
            predicted_by=predicted_by,
            busy_s={name: sum(worker.busy_s.get(name, 0.0) for worker in stats) for name in EXECUTORS},
            workers=stats,
            peak_bytes=max((worker.peak_bytes for worker in stats), default=0),
            verified=all(job.held_to),
            left_out=tuple(why_left_out),
            why_left_out=why_left_out,
            why=how_verified(request.opened, verify=self._job_spec.verify),
        )


def _require_text(names: Iterable[str]) -> None:
    """Raise ConfigError for a name whose bytes are not UTF-8: workers get names in messages."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            hint = "rename it, or give a link to it that has another name"
            raise ConfigError(f"a conversion needs names in UTF-8, and {name[:200]!r} is none", hint=hint) from error


def _check_replaceable(destination: str | MemoryDestination) -> None:
    """Raise ConfigError unless the destination is a local directory."""
    if isinstance(destination, MemoryDestination) or is_remote(destination):
        uri = destination if isinstance(destination, str) else destination.uri
        message = "only a local directory is replaced: nothing else can change all of its files at once"
        raise ConfigError(message, uri=uri, hint="write to a new place, then remove the old one")


def _check_apart(sources: Iterable[str], destination: str | MemoryDestination, *, replace: bool) -> None:
    """Raise ConfigError if a source is the destination, or in it."""
    if isinstance(destination, MemoryDestination):
        return
    if is_remote(destination):
        place = destination.rstrip("/")
        if source := next((one for one in sources if f"{one.rstrip('/')}/".startswith(f"{place}/")), None):
            message = f"the destination {'is' if source.rstrip('/') == place else 'contains'} the source {source}"
            raise ConfigError(message, uri=destination, hint="write to another prefix")
        return
    # An interrupted run could not resume: its sources would be gone once the result has their place.
    require_apart(sources, OutputPlace.at(destination).path, replace=replace)


def _may_use_threads(settings: WorkerSettings, devices: str | Sequence[str], *, only_copies: bool) -> bool:
    """Return whether the worker of a small conversion may be a thread: it runs on the CPU, where torch is loaded."""
    if settings.launcher is not None or settings.ray is not None or settings.num_workers not in {None, 1}:
        return False
    named = [devices] if isinstance(devices, str) else list(devices)
    # No device is needed, and several processes would wait for each other's writes to a file.
    if only_copies:
        return named in (["cpu"], ["all"])
    torch = sys.modules.get("torch")
    # Without torch a thread would import it as long as a process does. The default dtype is one of all threads.
    if torch is None or torch.get_default_dtype() is not torch.float32:
        return False
    return named == ["cpu"] or (named == ["all"] and not has_driver())


def _fits_a_thread(request: ConvertRequest) -> bool:
    """Return whether a conversion is small, and its result does not depend on the number of torch's threads."""
    names = {spec["op"] for spec in request.job_spec.operation}
    limit = COPY_THREAD_BYTES if names <= _NO_ARITHMETIC else THREAD_BYTES
    return names <= _THREAD_OPERATIONS and int(request.job.tasks.cost.sum()) <= limit


def _launcher(settings: WorkerSettings, devices: str | Sequence[str], stack: ExitStack) -> Launcher:
    """Return the caller's launcher, or one that ends with the stack."""
    if settings.launcher is not None:
        return settings.launcher
    if settings.ray is None:
        launcher = stack.enter_context(LocalLauncher(devices, settings.num_workers))
        launcher.begin()
        return launcher
    from penstock.jobs.workers.launch import RayLauncher

    cluster = RayLauncher(settings.ray)
    stack.callback(cluster.close)
    return cluster


def _make_room(out: OutputSet, stages: Trace, is_over: threading.Event) -> None:
    """Allocate the output's disk space until it is all there, or the run is over."""
    with stages.stage("room"):
        out.allocate(is_over.is_set)


def _staging_path(job: ConversionJob, place: OutputPlace | None, scratch: str | os.PathLike[str] | None) -> Path:
    """Return the staging directory: next to the destination, so that a rename publishes it; or in `scratch`."""
    if place is None:
        return Path(tempfile.gettempdir() if scratch is None else text_of(scratch)) / f"penstock-{job.key[:12]}"
    with typed(place.path):
        place.path.parent.mkdir(parents=True, exist_ok=True)
    return place.staging(job.key[:12])


def _name_destination(
    staged: Path, into: str, kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> None:
    """Name the destination in an error about the staging files, whose names no user has chosen."""
    # The journal is beside the staged directory, and its name begins with the directory's.
    if isinstance(error, DestinationError) and (error.uri or "").startswith(str(staged)):
        where = f"these are the files of {into} until it is complete"
        error.hint = "; ".join(part for part in (error.hint, where) if part)


def _leave(
    journal: Journal, out: OutputSet, kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> None:
    """Remove staged files that no later call can resume from: no task is done, or the sources have to change first."""
    if kind is None:
        return
    if not journal.done or issubclass(kind, SourceChanged | SourceTruncated | IntegrityError):
        out.remove()
        journal.remove()
    else:
        kept = f"{len(journal.done)} finished tasks are kept in {out.directory}: the same call goes on with them"
        if isinstance(error, PenstockError):
            error.hint = "; ".join(part for part in (error.hint, kept) if part)
        elif isinstance(error, KeyboardInterrupt):
            error.add_note(kept)
