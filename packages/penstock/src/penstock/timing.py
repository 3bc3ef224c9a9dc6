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
    """Maximum age of the member list from which an update chooses its planner."""
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
    packed_lease_s: float = 0.75
    """Interval at which a receiver renews its leases of packed rows: a quarter of `sync.packer.LEASE_S`."""
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
