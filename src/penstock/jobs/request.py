"""The request of a conversion: opened sources, operation specs completed from the files next to them, the planned job.

In: URIs, operations, bounds. Out: a `ConvertRequest`.
Not here: the plan (`job`), the staging directory (`convert`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from penstock.arguments import require_type
from penstock.config import Settings, parse_bytes
from penstock.errors import IntegrityError
from penstock.jobs.job import Job, plan_job
from penstock.jobs.messages import JobSpec
from penstock.jobs.operations.spec import Operations, operation_of, operation_specs
from penstock.jobs.request_defaults import completed
from penstock.storage import text_of
from penstock.storage.weight_set import Uris, WeightSet, open_weights
from penstock.types import MIB

WORKER_MEMORY_BYTES = 512 * MIB
"""Host memory of one worker's tasks unless the user says otherwise: four tasks of 64 MiB, and room to spare."""

MIN_TASK_BYTES = MIB // 4
"""A task is not made smaller than this for lack of memory: it reads two leaves of 256 KiB of each source anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """Opened sources, and the job planned for them."""

    settings: Settings
    opened: Sequence[WeightSet]
    job: Job
    job_spec: JobSpec
    """The job for workers, still without the directory that they write to."""


def plan_request(
    sources: Uris,
    to: str | None,
    operations: Operations,
    task_bytes: int | str,
    shard_bytes: int | str,
    storage_options: Mapping[str, str] | None,
    verify: bool | None,
    stack: ExitStack,
    memory_bytes: int | str | None = None,
) -> ConvertRequest:
    """Open the sources until the stack ends, complete the specs from them, plan the job. Arguments as of `convert`.

    Tasks are smaller than requested if they would not fit in a worker's `memory_bytes` otherwise.
    """
    settings, options = Settings.read(), dict(storage_options or {})
    opened = [
        stack.enter_context(open_weights(uri, settings=settings, storage_options=options)) for uri in _uris(sources)
    ]
    if verify and (why := next((weights.why_unverified for weights in opened if weights.why_unverified), None)):
        raise IntegrityError(f"verify=True, but {why}", hint="write one with `penstock manifest URI`")
    require_type("to", to, (str, type(None)), 'a format: "cast:BF16", "fp8-block128"')
    specs = [*operation_specs(operations), *([{"op": "store", "format": to}] if to is not None else [])]
    specs = completed(specs, opened, settings, options)
    budget = WORKER_MEMORY_BYTES if memory_bytes is None else parse_bytes(memory_bytes)
    wanted = parse_bytes(task_bytes)

    def planned(task_bytes: int) -> Job:
        return plan_job(
            operation_of(specs),
            [weights.manifest for weights in opened],
            task_bytes=task_bytes,
            shard_bytes=parse_bytes(shard_bytes),
            verify=verify is not False,
            operation_specs=specs,
        )

    job = planned(wanted)
    while (least := job.least_bytes.max(initial=0)) > budget and wanted > MIN_TASK_BYTES:
        # Tasks are read out to the ends of leaves, so one that aims at the budget is above it.
        smaller = max(MIN_TASK_BYTES, min(wanted, budget) // 2)
        if (cut_smaller := planned(smaller)).least_bytes.max(initial=0) >= least:
            break  # the largest task is one that its operation cannot cut: smaller tasks do not help
        job, wanted = cut_smaller, smaller
    job_spec = JobSpec(
        sources=tuple(_uris(sources)),
        operation=tuple(dict(spec) for spec in specs),
        key=job.key,
        directory="",
        task_bytes=wanted,
        shard_bytes=parse_bytes(shard_bytes),
        leaf_bytes=job.leaf_bytes,
        memory_bytes=budget,
        stall_s=settings.stall_s,
        storage_options=options,
        verify=verify is not False,
    )
    return ConvertRequest(settings=settings, opened=opened, job=job, job_spec=job_spec)


def _uris(sources: Uris) -> list[str]:
    several = sources if isinstance(sources, Sequence) and not isinstance(sources, str | bytes) else [sources]
    return [text_of(uri) for uri in several]
