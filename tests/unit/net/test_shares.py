"""Shares of a limited resource: one caller may use everything until another caller enters."""

from __future__ import annotations

import pytest

from penstock.net.shares import Shares


def filled(limit: int, **counts: int) -> Shares[str]:
    shares = Shares[str](limit)
    for caller, count in counts.items():
        for number in range(count):
            assert shares.enter(f"{caller}{number}", caller) == ()
    return shares


def test_single_caller_can_use_full_limit() -> None:
    shares = filled(4, a=4)
    assert shares.enter("a4", "a") == ("a0",)
    assert "a0" not in shares and "a4" in shares


def test_largest_caller_loses_entries_until_shares_are_equal() -> None:
    shares = filled(4, a=4)
    assert shares.enter("b0", "b") == ("a0",)
    assert shares.enter("b1", "b") == ("a1",)
    assert shares.enter("b2", "b") == ("b0",)
    assert shares.enter("c0", "c") in {("a2",), ("b1",)}


def test_new_entry_from_caller_at_its_share_is_rejected() -> None:
    shares = filled(4, a=4)
    assert shares.enter("a4", "a", displaces_own=False) is None
    assert not shares.has_room("a", displaces_own=False) and shares.has_room("b", displaces_own=False)
    assert shares.enter("b0", "b", displaces_own=False) == ("a0",)
    assert shares.enter("a4", "a", displaces_own=False) is None
    assert all(f"a{number}" in shares for number in (1, 2, 3))


def test_renewed_entry_counts_once_and_becomes_newest() -> None:
    shares = filled(3, a=3)
    assert shares.enter("a0", "a") == ()
    assert shares.enter("b0", "b") == ("a1",)
    shares.drop("a0")
    shares.drop("a0")
    assert shares.enter("c0", "c") == ()


def test_entry_weights_count_against_limit() -> None:
    shares = Shares[str](100)
    assert shares.enter("a0", "a", 60) == () and shares.enter("a1", "a", 30) == ()
    assert shares.enter("b0", "b", 20) == ("a0",)
    assert shares.enter("b0", "b", 101) is None
    assert shares.enter("a2", "a", 60) == ("a1",)


def test_rejected_entry_displaces_no_other_entry() -> None:
    shares = Shares[str](10)
    shares.enter("a0", "a", 6)
    shares.enter("b0", "b", 4)
    assert shares.enter("b0", "b", 9, displaces_own=False) is None
    assert "a0" in shares and shares.enter("c0", "c", 2) == ("a0",)


def test_expired_entries_are_removed_when_space_is_needed() -> None:
    now = [0.0]
    shares = Shares[str](2, ttl_s=10.0, clock=lambda: now[0])
    shares.enter("a0", "a")
    now[0] = 8.0
    shares.enter("a1", "a")
    now[0] = 11.0
    assert shares.enter("a2", "a", displaces_own=False) == ()
    assert "a0" not in shares and "a1" in shares


@pytest.mark.parametrize("callers", [2, 7])
def test_flooding_caller_leaves_space_for_others(callers: int) -> None:
    shares = Shares[tuple[str, int]](50)
    for number in range(1_000):
        shares.enter(("flood", number), "flood")
    for name in range(callers):
        assert shares.enter((f"c{name}", 0), f"c{name}", displaces_own=False) is not None
    for number in range(1_000, 2_000):
        shares.enter(("flood", number), "flood")
    assert all((f"c{name}", 0) in shares for name in range(callers))
