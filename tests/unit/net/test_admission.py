"""Limits of a listener's connections: number, owner and age."""

from __future__ import annotations

import logging
import time

import pytest

from penstock.net.admission import SWEEP_S, Admission, Connection, ConnectionLimits, network_of

LIMITS = ConnectionLimits(total=8, unproven=4, unproven_per_address=2, per_principal=3, grace_s=0.0, head_s=60.0)


class Cuts:
    """Names of aborted connections, which are released as their server would do."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.admission, self.names = Admission(limits, name="test"), list[str]()

    def come(self, name: str, address: str) -> Connection | None:
        found: list[Connection] = []

        def cut() -> None:
            self.names.append(name)
            found[0].release()

        connection = self.admission.admit(address, cut)
        if connection is not None:
            found.append(connection)
        return connection


def test_oldest_unauthenticated_connection_is_closed_at_address_limit() -> None:
    cuts = Cuts()
    for name in "abc":
        cuts.come(name, "10.0.0.1")
    cuts.come("other", "10.0.0.2")
    assert cuts.names == ["a"] and cuts.admission.num_open == 3


def test_oldest_unauthenticated_connection_is_closed_at_overall_limit() -> None:
    cuts = Cuts()
    for number in range(6):
        cuts.come(str(number), f"10.0.0.{number}")
    assert cuts.names == ["0", "1"]


def test_new_connection_displaces_no_authenticated_connection() -> None:
    cuts = Cuts()
    for number in range(8):
        member = cuts.come(f"member {number}", "10.0.0.1")
        assert member is not None and member.prove(f"token {number % 4}")
    assert cuts.come("stranger", "10.0.0.2") is None
    assert not cuts.names and cuts.admission.num_open == 8


def test_member_sharing_address_with_flood_stays_connected() -> None:
    cuts = Cuts()
    for number in range(50):
        cuts.come(f"stranger {number}", "10.0.0.1")
    member = cuts.come("member", "10.0.0.1")
    assert member is not None and member.prove("token")
    for number in range(50):
        cuts.come(f"stranger {number}", "10.0.0.1")
    assert "member" not in cuts.names


def test_recent_connections_are_not_displaced_by_new_ones() -> None:
    cuts = Cuts(ConnectionLimits(total=8, unproven=4, unproven_per_address=2, grace_s=60.0))
    assert [cuts.come(name, "10.0.0.1") is not None for name in "abcd"] == [True, True, False, False]
    assert not cuts.names


def test_caller_above_connection_limit_loses_longest_idle_connection() -> None:
    cuts = Cuts()
    connections = []
    for number in range(3):
        connections.append(cuts.come(str(number), "10.0.0.1"))
        assert connections[-1] is not None and connections[-1].prove("token")
    for connection in connections[1:] + connections[:1]:
        assert connection is not None
        connection.begin(10.0)
        connection.end()
    last = cuts.come("3", "10.0.0.1")
    assert last is not None and last.prove("token")
    assert cuts.names == ["1"]
    for connection in (connections[0], connections[2], last):
        assert connection is not None
        connection.begin(10.0)
    extra = cuts.come("4", "10.0.0.1")
    assert extra is not None and not extra.prove("token"), "all of them are busy"


def test_connection_past_deadline_is_closed_once() -> None:
    cuts = Cuts()
    late, waiting = cuts.come("late", "10.0.0.1"), cuts.come("waiting", "10.0.0.1")
    assert late is not None and waiting is not None
    late.expect(-1.0)
    cuts.admission.sweep()
    cuts.admission.sweep()
    assert cuts.names == ["late"] and cuts.admission.num_open == 1


def test_process_suspension_extends_connection_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr("penstock.net.admission.time.monotonic", lambda: now)
    cuts = Cuts()
    waiting = cuts.come("waiting", "10.0.0.1")
    assert waiting is not None
    waiting.expect(10.0)
    cuts.admission.sweep()
    # The process is stopped for a minute, so it could not read what the peers sent.
    now += 60.0
    cuts.admission.sweep()
    now += SWEEP_S
    cuts.admission.sweep()
    assert not cuts.names
    for _ in range(20):
        now += SWEEP_S
        cuts.admission.sweep()
    assert cuts.names == ["waiting"]


def test_refusals_are_logged_at_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
    cuts = Cuts()
    with caplog.at_level(logging.WARNING, "penstock.net"):
        for number in range(1000):
            cuts.come(str(number), "10.0.0.1")
    assert len(caplog.records) == 1


def test_ipv6_network_counts_as_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("fe80::1%eth0") == "fe80::/64"


@pytest.mark.parametrize("num_descriptors", [64, 256, 1024, 20_000, 1 << 20])
def test_connection_limits_fit_available_file_descriptors(num_descriptors: int) -> None:
    limits = ConnectionLimits.for_descriptors(num_descriptors)
    assert limits.total <= max(16, num_descriptors - 128)
    assert limits.unproven_per_address <= limits.unproven < limits.total
    assert limits.per_principal < limits.total
