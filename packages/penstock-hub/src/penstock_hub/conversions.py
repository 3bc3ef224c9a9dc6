"""Conversions that report to the hub: their records in the store, and the limits on their number and size."""

from __future__ import annotations

import msgspec

from penstock.errors import PlanError, SourceBusy
from penstock.hub.job_state import JobState
from penstock.hub.messages import JobStatus
from penstock.net.shares import Shares
from penstock_hub.store import Store

JOB_TTL_S = 3600.0
"""Seconds after its last report for which a conversion is shown. The page's charts cover the same time."""
MAX_JOB_BYTES = 256 << 10
"""Maximum bytes of a conversion's state. A state with 256 workers takes about 60 KB, and about 200 KB with as many
errors."""


class JobEntry(msgspec.Struct, frozen=True, array_like=True):
    """The store's entry for a conversion."""

    state: JobState
    since: float
    seen: float
    caller: str = ""
    """`Caller.name` of the process that reports the conversion."""


_ENTRY = msgspec.msgpack.Decoder(JobEntry)


def record_job(
    store: Store, job: str, state: JobState, caller: str, now: float, *, ttl_s: float, max_jobs: int
) -> None:
    """Record the state of a conversion in place of its earlier state.

    Args:
        caller: `Caller.name` of the process that reports the conversion.
        ttl_s: a conversion that has not reported for this long may be dropped.
        max_jobs: maximum number of stored conversions.

    Raises:
        SourceBusy: too many conversions are running, and no other caller has more conversions.
        PlanError: the state is too large.
    """
    name = f"job/{job}"
    entry = store.read(name)
    if entry is None:
        _make_room(store, job, caller, now, ttl_s, max_jobs)
    since = now if entry is None else _ENTRY.decode(entry.value).since
    raw = msgspec.msgpack.encode(JobEntry(state, since, now, caller))
    if len(raw) > MAX_JOB_BYTES:
        raise PlanError(f"the state of a conversion takes {len(raw)} bytes, but the limit is {MAX_JOB_BYTES}")
    store.write(name, raw, ttl_s=JOB_TTL_S)


def _make_room(store: Store, job: str, caller: str, now: float, ttl_s: float, max_jobs: int) -> None:
    """If `max_jobs` conversions exist, drop a finished or silent conversion, or one from the caller with the most."""
    jobs = _entries(store)
    if len(jobs) < max_jobs:
        return
    by_age = sorted(jobs, key=lambda name: jobs[name].seen)
    over = [name for name in by_age if jobs[name].state.is_over or now - jobs[name].seen > ttl_s]
    if over:
        store.write(f"job/{over[0]}", None)
        return
    shares = Shares[str](len(jobs))
    for name in by_age:
        shares.enter(name, jobs[name].caller)
    victims = shares.enter(job, caller, displaces_own=False)
    if victims is None:
        hint = "this conversion continues, but the hub does not show it"
        raise SourceBusy(f"this hub already stores its maximum of {max_jobs} conversions", hint=hint)
    for name in victims:
        store.write(f"job/{name}", None)


def jobs_of(store: Store, model: str | None, now: float) -> tuple[JobStatus, ...]:
    """Return the conversions that reported within `JOB_TTL_S`, for one model or all, the latest first."""
    found = [
        JobStatus(job=job, age_s=max(0.0, now - entry.since), silent_s=max(0.0, now - entry.seen), state=entry.state)
        for job, entry in _entries(store).items()
        if model in (None, entry.state.name)
    ]
    return tuple(sorted(found, key=lambda job: (job.age_s, job.job)))


def _entries(store: Store) -> dict[str, JobEntry]:
    return {job: _ENTRY.decode(entry.value) for job, entry in store.scan("job/").items()}
