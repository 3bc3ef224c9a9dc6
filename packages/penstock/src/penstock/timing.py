"""Waiting times: pauses, polling intervals and how long one request waits at the other side.

These are no options for users. Deadlines that a user may set (`stall_s`, `timeout_s`) are arguments of the verbs. Tests
pass a `Timing` with shorter times to the objects that they test.
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
    the request to the hub that each attempt makes."""
    member_list_s: float = 0.5
    """Maximum age of the member list from which an update chooses its planner, and a planner its sources."""
    retry_pause_s: float = 0.05
    """Pause before an update is repeated without the source that it lost. The member list changes within one heartbeat,
    so a back-off would not help."""
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
    """Pause between two requests for the members while a rank claims the name or joins rank 0. A quarter of it is
    random, because hundreds of ranks start together."""
    group_list_s: float = 1.0
    """Maximum age of the member list from which a publish takes the subscribers that it waits for."""
    record_pause_s: float = 0.05
    """Pause before a decision is sent to the hub again. The fleet waits for the record."""
    probe_interval_s: float = 1.0
    """How long a subscriber is silent before rank 0 checks whether its process is alive. A dead process must not delay
    the trainer until the stall deadline."""
    members_pause_s: float = 0.05
    """Pause between two checks for ranks or subscribers for which the caller waits."""
    exchange_first_pause_s: float = 0.0005
    """First pause before a rank asks again for its part of the boundary exchange. Each pause doubles. All ranks publish
    within milliseconds of each other. With 20 ms, an early rank began to quantise late in most versions."""
    exchange_pause_s: float = 0.02
    """Maximum pause before a rank asks again for its part of the boundary exchange."""
    exchange_probe_s: float = 1.0
    """Interval at which rank 0 checks whether a rank in the boundary exchange is alive. Each check asks the hub."""

    # -- sync: the members of a sync.

    restarted_hub_pause_s: float = 0.1
    """Pause between two requests to a hub that has just restarted. It knows all members after about two heartbeats."""
    alive_s: float = 2.0
    """Deadline of an alive check. A server that answers later may be a stopped process. Only a refused connection
    proves that the process is gone."""

    # -- cache: models that stay in memory, and the processes that attach to them.

    cache_drain_s: float = 30.0
    """How long a cache that leaves waits for engines and readers. A killed engine counts until its lease expires after
    15 s."""
    recall_wait_s: float = 4.0
    """How long a request for a lease waits for a model to come back, before the reader is told to ask again."""
    tier_pause_s: float = 0.02
    """Pause before a model that is being moved is freed."""
    lease_renew_s: float = 2.0
    """Interval between renewals of a lease, a fraction of its 15 s. An engine learns about a drain after at most this
    time."""
    lease_end_s: float = 0.5
    """How long closing waits for the release of a lease. A lease that was not released expires."""
    cache_pause_s: float = 0.05
    """Pause between two requests to a cache. It is short compared with the start of an engine, and long compared with a
    request to the hub."""

    # -- fetch: a member that reads from others and from storage.

    fetch_turn_s: float = 0.05
    """Maximum pause between two rounds of assignment. News from an upstream ends it earlier."""
    hub_pause_s: float = 0.1
    """Minimum pause between two requests for upstreams, even for a member that has nothing to read."""
    hub_retry_s: float = 0.5
    """Pause before a failed request to the hub is repeated."""
    hub_word_s: float = 1.0
    """The hub's answer about other readers' progress is valid for twice the polling interval plus this time."""
    gather_s: float = 0.25
    """Maximum wait for enough chunks for one read of an upstream, while storage is read. Each read, with its digests
    and reports, takes some milliseconds of Python, for which the threads that read storage wait. A link that is slower
    than storage gets few chunks at once, so nothing waits there."""
    failed_pause_s: float = 2.0
    """Pause before an upstream that failed is tried again, if the hub still names it. It doubles after each failure."""
    silent_pause_s: float = 30.0
    """Pause for an upstream that sent nothing within its deadline, if storage can be read instead. The hub counts the
    complaint for the same time (`hub.complaints.COMPLAINT_TTL_S`)."""
    full_pause_s: float = 0.5
    """Pause before a parent without a free reservation for a reader is tried again. Reservations become free as readers
    finish. Other holders are tried again at the earliest after this time, once the hub answers. If they caused a
    request each, a fleet that starts cold would ask the hub all the time."""
    log_wait_s: float = 1.0
    """How long a request for a log waits for news at the upstream. Each request also renews the lease."""
    log_gather_s: float = 0.002
    """Minimum time between two requests for a log. Chunks verified in between arrive in one answer and cause one
    wake-up."""
    log_pause_s: float = 0.02
    """Maximum pause between requests for a log while more chunks are known than one read takes."""
    spare_pause_s: float = 0.25
    """Delay before connecting to a later upstream, and pause between requests for its log. Most fetches never need it.
    With two trees only parents are connected before another upstream is needed, because a member's two children in each
    tree, with their own children, would use all of its reservations for readers."""
    fetch_end_s: float = 0.5
    """How long closing waits for threads that only send requests. They do not use the memory, so they may end later."""


DEFAULT = Timing()
"""The times outside of tests."""
