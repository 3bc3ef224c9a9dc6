"""What is asked of a conversion: sources that are opened, words completed by what lies beside them, the job they give.

In: URIs, words, bounds. Out: an `Asked`.
Not here: the plan (`job`), where the result grows (`convert`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec

from penstock.config import Settings, parse_bytes
from penstock.errors import IntegrityError
from penstock.jobs.complete import completed
from penstock.jobs.job import Job, plan_job
from penstock.jobs.messages import Words
from penstock.jobs.words import Word, operation_of
from penstock.storage import text_of
from penstock.storage.manifest import Uris, WeightSet, open_weights
from penstock.types import MIB

WORKER_MEMORY_BYTES = 512 * MIB
"""Host memory of one worker's tasks unless the user says otherwise: four tasks of 64 MiB, and room to spare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be made, and of what."""

    settings: Settings
    opened: Sequence[WeightSet]
    job: Job
    words: Words
    """The job for workers, but for where they write."""


def ask(
    sources: Uris,
    to: str | None,
    operations: Sequence[Word],
    task_bytes: int | str,
    shard_bytes: int | str,
    storage_options: Mapping[str, str] | None,
    verify: bool | None,
    stack: ExitStack,
) -> Asked:
    """Open the sources until the stack ends, complete the words by them, plan the job: arguments of `convert`."""
    settings, options = Settings.read(), dict(storage_options or {})
    opened = [
        stack.enter_context(open_weights(uri, settings=settings, storage_options=options)) for uri in _uris(sources)
    ]
    if verify and (why := next((one.why_unverified for one in opened if one.why_unverified), None)):
        raise IntegrityError(f"verify=True, but {why}", hint="write one with `penstock manifest URI`")
    words = [*operations, *([{"op": "store", "format": to}] if to is not None else [])]
    words = completed(words, opened, settings, options)
    job = plan_job(
        operation_of(words),
        [one.manifest for one in opened],
        task_bytes=parse_bytes(task_bytes),
        shard_bytes=parse_bytes(shard_bytes),
        verify=verify is not False,
        words=words,
    )
    told = Words(
        sources=tuple(_uris(sources)),
        operation=tuple(dict(word) for word in words),
        key=job.key,
        directory="",
        task_bytes=parse_bytes(task_bytes),
        shard_bytes=parse_bytes(shard_bytes),
        leaf_bytes=job.leaf_bytes,
        memory_bytes=WORKER_MEMORY_BYTES,
        stall_s=settings.stall_s,
        storage_options=options,
        verify=verify is not False,
    )
    return Asked(settings=settings, opened=opened, job=job, words=told)


def within(asked: Asked, memory_bytes: int | str | None) -> Asked:
    """The same within a worker's budget."""
    budget = WORKER_MEMORY_BYTES if memory_bytes is None else parse_bytes(memory_bytes)
    asked.job.check_budget(budget, "one task")
    return replace(asked, words=msgspec.structs.replace(asked.words, memory_bytes=budget))


def _uris(sources: Uris) -> list[str]:
    several = sources if isinstance(sources, Sequence) and not isinstance(sources, str | bytes) else [sources]
    return [text_of(one) for one in several]
