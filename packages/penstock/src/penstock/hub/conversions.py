"""Conversions that report to the hub: the record of each in the store, and the limits of what they may take.

In: a conversion's state, as its coordinator reports it. Out: the conversions of the fleet, with their ages.
Not here: sending reports (`job_reporter`), how often a caller may report (`directory`), showing them (`page`).
"""

from __future__ import annotations

import msgspec

from penstock.errors import PlanError, SourceBusy
from penstock.hub.job_state import JobState
from penstock.hub.messages import JobStatus
from penstock.hub.store import Store
from penstock.net.shares import Shares

JOB_TTL_S = 3600.0
"""After its last report a conversion is shown for as long as the page's charts go back."""
MAX_JOB_BYTES = 256 << 10
"""The state of one. Reason: with 256 workers it is about 60 KB, with the errors of as many lost ones some 200 KB; all
conversions take 64 MB of the hub at most."""


class JobEntry(msgspec.Struct, frozen=True, array_like=True):
    """The store's entry of a conversion."""

    state: JobState
    since: float
    seen: float
    caller: str = ""
    """`Caller.name` of its reports."""


_ENTRY = msgspec.msgpack.Decoder(JobEntry)


def record_job(
    store: Store, job: str, state: JobState, caller: str, now: float, *, ttl_s: float, max_jobs: int
) -> None:
    """Record the state of a conversion, in place of its earlier one.

    Args:
        store: of the hub.
        job: its id.
        state: what it reports.
        caller: `Caller.name` of the process that reports it.
        now: the hub's clock.
        ttl_s: a conversion silent for this long may be forgotten for another one.
        max_jobs: conversions that are shown.

    Raises:
        SourceBusy: too many conversions are running, and no other caller has more of them than this one.
        PlanError: the state is too large.
    """
    name = f"job/{job}"
    entry = store.read(name)
    if entry is None:
        _make_room(store, job, caller, now, ttl_s, max_jobs)
    since = now if entry is None else _ENTRY.decode(entry.value).since
    raw = msgspec.msgpack.encode(JobEntry(state, since, now, caller))
    if len(raw) > MAX_JOB_BYTES:
        raise PlanError(f"the state of a conversion takes {len(raw)} bytes, more than {MAX_JOB_BYTES}")
    store.write(name, raw, ttl_s=JOB_TTL_S)


def _make_room(store: Store, job: str, caller: str, now: float, ttl_s: float, max_jobs: int) -> None:
    """Forget a conversion if there are `max_jobs`: one that ended or fell silent, else one of the greediest caller.

    Raises:
        SourceBusy: all run, and no other caller has more of them than this one.
    """
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
        hint = "those that run go on; this one is not shown"
        raise SourceBusy("as many conversions are running as this hub shows", hint=hint)
    for name in victims:
        store.write(f"job/{name}", None)


def jobs_of(store: Store, model: str | None, now: float) -> tuple[JobStatus, ...]:
    """Return the conversions that reported within `JOB_TTL_S`, of one model or all, the youngest first."""
    found = [
        JobStatus(job=job, age_s=max(0.0, now - entry.since), silent_s=max(0.0, now - entry.seen), state=entry.state)
        for job, entry in _entries(store).items()
        if model in (None, entry.state.name)
    ]
    return tuple(sorted(found, key=lambda job: (job.age_s, job.job)))


def _entries(store: Store) -> dict[str, JobEntry]:
    """Return the entries of all conversions, by their ids."""
    return {job: _ENTRY.decode(entry.value) for job, entry in store.scan("job/").items()}
