"""Waiting times: pauses, polling intervals and how long one request waits at the other side.

These are not options for users. Deadlines that a user may set (`stall_s`, `timeout_s`) are arguments of the verbs. A
test passes a `Timing` with shorter times to the object that it tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The waiting times of the journeys, in seconds."""

    # -- sync: a subscriber that receives.

    version_grace_s: float = 1.0
    """How long an update retries while no member has its version. A receiver that has just finished it reports to the
    hub much sooner."""
    version_pause_s: float = 0.1
    """Pause between two attempts to find a version. It is short compared with a training step, and long compared with
    the request to the hub that each attempt costs."""
    member_list_s: float = 0.5
    """Maximum age of the member list from which an update chooses its planner, and a planner its sources."""
    retry_pause_s: float = 0.05
    """Pause before an update is tried again without a lost source. The member list changes within one heartbeat, so a
    back-off would gain nothing."""
    news_wait_s: float = 1.0
    """How long one request for a newer version waits at the planner."""
    no_planner_pause_s: float = 0.1
    """Pause between two attempts to find a planner that answers."""
    next_update_pause_s: float = 1.0
    """Pause of `for report in subscriber` after a failed update. A lost source is replaced within some heartbeats."""
    map_wait_s: float = 1.0
    """How long one request for a version map waits at the source until the version begins there."""
    map_pause_s: float = 0.02
    """Pause before a request for a version map is repeated. A source waits before it answers, and a restarted hub does
    not."""
    digest_wait_s: float = 0.5
    """How long one request for digests or packed rows waits at the source. A run that has ended stops within this
    time."""
    progress_interval_s: float = 0.5
    """Interval of progress reports to the planner. It is well below the smallest stall deadline, and cheap for a rank 0
    with hundreds of receivers."""
    decision_wait_s: float = 1.0
    """How long one request for the fleet's decision waits at rank 0 of the publishers."""
    decision_pause_s: float = 0.1
    """Pause between two requests for the fleet's decision."""

    # -- sync: the ranks of a trainer that publishes.

    group_pause_s: float = 0.2
    """Pause between two looks at the members while a rank claims the name or joins rank 0. Hundreds of ranks start
    together, so it is spread by a quarter."""
    group_list_s: float = 1.0
    """Maximum age of the member list from which a publish takes the subscribers that it waits for."""
    record_pause_s: float = 0.05
    """Pause before a decision is sent to the hub again. The fleet waits for the record."""
    probe_interval_s: float = 1.0
    """How long a subscriber is silent before rank 0 checks whether its process lives. A dead process must not delay
    the trainer until the stall deadline."""
    members_pause_s: float = 0.05
    """Pause between two looks for ranks or subscribers that the caller waits for."""
    exchange_first_pause_s: float = 0.0005
    """First pause before a rank asks again for its part of the boundary exchange; each pause doubles. All ranks publish
    within milliseconds of each other: with 20 ms, a rank that was early began to quantise late in most versions."""
    exchange_pause_s: float = 0.02
    """Longest pause before a rank asks again for its part of the boundary exchange."""
    exchange_probe_s: float = 1.0
    """Interval at which rank 0 checks whether a rank of the boundary exchange lives. Each check asks the hub."""

    # -- sync: the members of a sync.

    restarted_hub_pause_s: float = 0.1
    """Pause between two looks at a hub that was just restarted. It knows all members after about two heartbeats."""
    alive_s: float = 2.0
    """Deadline of an alive check. A server that answers later may be a stopped process: only a refused connection
    proves that the process is gone."""

    # -- cache: models that stay in memory, and the processes that attach to them.

    cache_drain_s: float = 30.0
    """How long a cache that leaves waits for engines and readers. A killed engine counts until its lease expires, after
    15 s."""
    recall_wait_s: float = 4.0
    """How long a request for a lease waits for a model to come back, before the reader is told to ask again."""
    tier_pause_s: float = 0.02
    """Pause before a model that is being moved is freed."""
    lease_renew_s: float = 2.0
    """Interval of renewals of a lease: a fraction of the 15 s that it lasts. An engine learns of draining this late at
    most."""
    lease_end_s: float = 0.5
    """How long closing waits for the release of a lease. A lease that was not released expires."""
    cache_pause_s: float = 0.05
    """Pause between two requests to a cache. It is short compared with the start of an engine, and long compared with a
    request to the hub."""

    # -- fetch: a member that reads from others and from storage.

    fetch_turn_s: float = 0.05
    """Longest pause between two rounds of assignment. News from an upstream or the end of its pause end it."""
    hub_pause_s: float = 0.1
    """Shortest pause between two requests for upstreams, also of a member that has nothing to read."""
    hub_retry_s: float = 0.5
    """Pause before the hub is asked again after a request that failed."""
    hub_word_s: float = 1.0
    """The hub's word on other readers' progress is valid for twice the polling interval, plus this for the answer."""
    gather_s: float = 0.25
    """Longest wait for as many chunks as one read of an upstream takes, while storage is read. Each read, with its
    digests and reports, costs some milliseconds of Python, which the threads that read storage wait for. A link that is
    slower than storage takes few chunks at once, so nothing waits there."""
    failed_pause_s: float = 2.0
    """Pause before an upstream that failed is tried again, if the hub still names it. It doubles after each failure."""
    silent_pause_s: float = 30.0
    """The same for an upstream that gave nothing within its deadline, where there is storage to read instead. It is as
    long as the hub counts the complaint (`hub.complaints.COMPLAINT_TTL_S`)."""
    full_pause_s: float = 0.5
    """Pause before a parent without a free reader's place is tried again: places become free as readers finish. Other
    holders are tried again after this at the earliest, once the hub answers: if spares caused a request each, a fleet
    that starts cold would ask the hub all the time."""
    log_wait_s: float = 1.0
    """How long a request for a log waits for news at the upstream. Each request also renews the lease."""
    log_gather_s: float = 0.002
    """Shortest time between two requests for a log. Chunks verified in between come in one answer and cause one
    wake-up."""
    log_pause_s: float = 0.02
    """Longest pause of requests for a log while more chunks are known than one read takes."""
    spare_pause_s: float = 0.25
    """Delay before a later upstream is connected to, and pause between requests for its log: most fetches never need
    it. Of two trees only parents are connected to before one is needed: a member has two children in a tree, whose own
    children would take all of its readers' places."""
    fetch_end_s: float = 0.5
    """How long closing waits for threads that only send requests. They touch no memory, so they may end later."""


DEFAULT = Timing()
"""The times outside of tests."""
