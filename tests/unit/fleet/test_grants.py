"""Grants: signed, short-lived, for one reader and source, taken once."""

from __future__ import annotations

import logging

import msgspec
import pytest

from penstock.errors import GrantRefused, PermissionDenied
from penstock.fleet.grants import GRANT_TTL_S, Grant, GrantChecker, GrantSigner

KEY = "0" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def signer(clock) -> GrantSigner:
    return GrantSigner(b"s" * 32, clock=clock)


@pytest.fixture
def checker(signer, clock) -> GrantChecker:
    # The source's own clock is 4000 s behind the hub's.
    return GrantChecker(signer.public_key, "source", now=clock(), clock=lambda: clock.now - 4000)


def test_a_good_one_passes_once(signer, checker) -> None:
    grant = signer.sign(key=KEY, reader="reader", source="source")
    checker.check(grant, key=KEY, reader="reader")
    with pytest.raises(GrantRefused, match="shown before"):
        checker.check(grant, key=KEY, reader="reader")
    checker.check(signer.sign(key=KEY, reader="reader", source="source"), key=KEY, reader="reader")


def test_replicas_of_one_seed_sign_for_each_other(clock, checker) -> None:
    other = GrantSigner(b"s" * 32, clock=clock)
    checker.check(other.sign(key=KEY, reader="reader", source="source"), key=KEY, reader="reader")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"key": "1" * 32}, "another key"),
        ({"reader": "other"}, "another reader"),
        ({"source": "other"}, "another source"),
        ({"ttl_s": -1.0}, "expired"),
    ],
)
def test_one_for_something_else_is_refused(signer, checker, made, why) -> None:
    grant = signer.sign(**{"key": KEY, "reader": "reader", "source": "source", **made})
    with pytest.raises(GrantRefused, match=why):
        checker.check(grant, key=KEY, reader="reader")


def test_it_expires_by_the_hubs_clock(signer, checker, clock) -> None:
    grant = signer.sign(key=KEY, reader="reader", source="source")
    clock.now += GRANT_TTL_S + 0.1
    with pytest.raises(GrantRefused, match="expired"):
        checker.check(grant, key=KEY, reader="reader")


def test_nonces_are_forgotten_with_their_grants(signer, checker, clock) -> None:
    for _ in range(50):
        checker.check(signer.sign(key=KEY, reader="reader", source="source"), key=KEY, reader="reader")
        clock.now += 10
    assert len(checker._seen) <= GRANT_TTL_S / 10


def test_a_forged_one_is_refused(signer, checker, clock) -> None:
    good = signer.sign(key=KEY, reader="reader", source="source")
    theirs = GrantSigner(b"t" * 32, clock=clock).sign(key=KEY, reader="reader", source="source")
    bodies = [b"", good[:64], good[:-1], theirs, bytes([good[0] ^ 1]) + good[1:], good + b"\x00", b"x" * 5000]
    longer = msgspec.msgpack.encode(Grant(KEY, "reader", "source", 9e9, b"n" * 12))
    bodies += [good[: -1 - len(longer)] + longer, good[:64] + longer]
    for body in bodies:
        with pytest.raises(PermissionDenied):
            checker.check(body, key=KEY, reader="reader")


def test_each_leaves_a_line(signer, checker, caplog) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    grant = signer.sign(key=KEY, reader="reader", source="source")
    checker.check(grant, key=KEY, reader="reader")
    with pytest.raises(GrantRefused):
        checker.check(grant, key=KEY, reader="reader")
    assert [record.getMessage() for record in caplog.records] == [
        f"event=issued key={KEY} reader=reader source=source ttl_s=30",
        f"event=used key={KEY} reader=reader source=source",
        f"event=refused key={KEY} reader=reader source=source why='shown before'",
    ]
