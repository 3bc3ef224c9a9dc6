"""Waiting times: pauses, polling intervals and durations of long polls.

Deadlines that a user may set (`stall_s`, `timeout_s`) are arguments of the verbs. Tests pass a `Timing` with shorter
times.
"""

from __future__ import annotations

import msgspec


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The waiting times of the journeys, in seconds."""

    # -- sync: a subscriber that receives versions.

    version_grace_s: float = 1.0
    """How long an update retries while no member has its version."""
    version_pause_s: float = 0.1
    """Pause between two attempts to find a version. Each attempt sends a request to the hub."""
    member_list_s: float = 0.5
    """Maximum age of the member list from which an update chooses its planner, and a planner chooses its sources."""
    retry_pause_s: float = 0.05
    """Pause before an update is repeated without the source that it lost. The member list changes within one heartbeat,
    so a back-off would not help."""
    news_wait_s: float = 1.0
    """Duration of a long poll for a newer version at the planner."""
    no_planner_pause_s: float = 0.1
    """Pause between two attempts to find a planner that responds."""
    next_update_pause_s: float = 1.0
    """Pause of `for report in subscriber` after a failed update."""
    map_wait_s: float = 1.0
    """Duration of a long poll for a version map at the source."""
    map_pause_s: float = 0.02
    """Pause before a request for a version map is repeated."""
    digest_wait_s: float = 0.5
    """Duration of a long poll for digests or packed rows at the source. A run that has ended stops within this time."""
    progress_interval_s: float = 0.5
    """Interval of progress reports to the planner. It is shorter than any stall deadline, and cheap for a rank 0 with
    hundreds of receivers."""
    decision_wait_s: float = 1.0
    """Duration of a long poll for the fleet's decision at rank 0 of the publishers."""
    decision_pause_s: float = 0.1
    """Pause between two requests for the fleet's decision."""

    # -- sync: the ranks of a trainer that publishes versions.

    group_pause_s: float = 0.2
    """Pause between two requests for the members while a rank claims the sync's name or joins rank 0. A quarter of the
    pause is random, because hundreds of ranks start at the same time."""
    group_list_s: float = 1.0
    """Maximum age of the member list with the subscribers that a publish waits for."""
    record_pause_s: float = 0.05
    """Pause before a decision is sent to the hub again. The fleet waits until the decision is recorded."""
    probe_interval_s: float = 1.0
    """How long a subscriber may be silent before rank 0 checks whether its process is alive. A dead process must not
    delay the trainer until the stall deadline."""
    members_pause_s: float = 0.05
    """Pause between two checks for ranks or subscribers that the caller waits for."""
    exchange_first_pause_s: float = 0.0005
    """First pause before a rank repeats its request for data of the boundary exchange. Each pause doubles. With 20 ms,
    a rank that published some milliseconds early began to quantise late in most versions."""
    exchange_pause_s: float = 0.02
    """Maximum pause before a rank repeats its request for data of the boundary exchange."""
    exchange_probe_s: float = 1.0
    """Interval at which rank 0 asks the hub whether a rank in the boundary exchange is alive."""

    # -- sync: the members of a sync.

    restarted_hub_pause_s: float = 0.1
    """Pause between two requests to a restarted hub. It knows all members after about two heartbeats."""
    alive_s: float = 2.0
    """Deadline of an alive check. Only a refused connection proves that the process is gone."""

    # -- cache: models that stay in memory, and the processes that attach to them.

    cache_drain_s: float = 30.0
    """How long a cache that exits waits for engines and readers. The lease of a killed engine expires after 15 s."""
    recall_wait_s: float = 4.0
    """How long a request for a lease waits until an evicted model is back in memory."""
    tier_pause_s: float = 0.02
    """Pause before the memory of a model that is being moved is freed."""
    lease_renew_s: float = 2.0
    """Interval between renewals of a 15 s lease. An engine detects a drain within this time."""
    lease_end_s: float = 0.5
    """How long closing waits for the release of a lease. A lease that was not released expires."""
    cache_pause_s: float = 0.05
    """Pause between two requests to a cache."""

    # -- fetch: a member that reads from other members and from storage.

    fetch_turn_s: float = 0.05
    """Maximum pause between two rounds of assignment. A reply from an upstream ends the pause early."""
    hub_pause_s: float = 0.1
    """Minimum pause between two requests for upstreams, even for a member that has nothing to read."""
    hub_retry_s: float = 0.5
    """Pause before a failed request to the hub is repeated."""
    hub_word_s: float = 1.0
    """The hub's reply about the progress of other readers is valid for twice the polling interval plus this time."""
    gather_s: float = 0.25
    """Maximum wait for enough chunks for one read of an upstream, while storage is read. Each read takes some
    milliseconds of Python, which delay the threads that read storage."""
    failed_pause_s: float = 2.0
    """Pause before a failed upstream is retried. It doubles after each failure."""
    silent_pause_s: float = 30.0
    """Pause before retrying an upstream that sent nothing within its deadline, if storage can be read instead. The hub
    counts the complaint for the same time (`hub.complaints.COMPLAINT_TTL_S`)."""
    full_pause_s: float = 0.5
    """Pause before retrying a parent that has no free reservation for a reader. Other full holders are retried after
    this time at the earliest, because a fleet that starts cold would otherwise flood the hub."""
    log_wait_s: float = 1.0
    """Duration of a long poll for an upstream's log. Each request also renews the lease."""
    log_gather_s: float = 0.002
    """Minimum time between two requests for a log, so that one reply reports several verified chunks."""
    log_pause_s: float = 0.02
    """Maximum pause between requests for a log while more chunks are known than one read can request."""
    spare_pause_s: float = 0.25
    """Delay before connecting to a later upstream, and pause between requests for its log. Most fetches never use one.
    With two trees only parents are connected at first, because a member's children use all its reservations."""
    fetch_end_s: float = 0.5
    """How long closing waits for threads that only send requests and do not use the memory."""


DEFAULT = Timing()
"""The times that are used outside tests."""
