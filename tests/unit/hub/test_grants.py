"""Grants: signed, short-lived, for one reader and source, accepted once."""

from __future__ import annotations

import logging

import msgspec
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from penstock.errors import GrantRefused, PermissionDenied
from penstock.hub.grants import EPOCH_S, GRACE_S, Grant, GrantChecker, GrantSigner

KEY = "0" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Hub:
    """Sign with the last epoch of the source."""

    def __init__(self, seed: bytes = b"s" * 32) -> None:
        self.signer, self.epoch = GrantSigner(seed), 0
        self.private = Ed25519PrivateKey.from_private_bytes(seed)

    def sign(self, *, source: str = "source", epoch: int | None = None, is_alone: bool = False, **changes) -> bytes:
        """Return a grant for the source that shares a signature with two grants for other sources."""
        now = self.epoch if epoch is None else epoch
        epochs, spoken = {"before": 1, source: now, "after": now}, {source: "2.4"} if is_alone else {}
        given = {"key": KEY, "reader": "reader", "epochs": epochs, "protocols": spoken, **changes}
        return self.signer.sign(**given)[source]


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def checker(hub, clock) -> GrantChecker:
    made = GrantChecker(hub.signer.public_key, "source", clock=clock)
    hub.epoch = made.epoch()
    return made


def test_valid_grant_is_accepted_once(hub, checker) -> None:
    grant = hub.sign()
    checker.check(grant, key=KEY, reader="reader")
    with pytest.raises(GrantRefused, match="already used"):
        checker.check(grant, key=KEY, reader="reader")
    checker.check(hub.sign(), key=KEY, reader="reader")


def test_separately_signed_grant_is_accepted_once(hub, checker) -> None:
    grant = hub.sign(is_alone=True)
    checker.check(grant, key=KEY, reader="reader")
    with pytest.raises(GrantRefused, match="already used"):
        checker.check(grant, key=KEY, reader="reader")
    # Releases before 2.5 check a grant like this.
    hub.private.public_key().verify(grant[:64], b"penstock grant 2\n" + grant[64:])
    assert msgspec.msgpack.decode(grant[64:], type=Grant).source == "source"


def test_caller_name_in_grant_differs_for_each_source(hub, clock) -> None:
    def caller(name: str, reader: str = "reader", source: str = "source", seed: bytes = b"s" * 32) -> str:
        checker, hub = GrantChecker(GrantSigner(seed).public_key, source, clock=clock), Hub(seed)
        grant = hub.sign(source=source, epoch=checker.epoch(), reader=reader, caller=name)
        return checker.check(grant, key=KEY, reader=reader)

    one = caller("token:1")
    assert one and one == caller("token:1", reader="other")
    names = {one, caller("token:2"), caller("token:1", source="s2"), caller("token:1", seed=b"t" * 32)}
    assert len(names) == 4


@pytest.mark.parametrize("protocol", ["2.1", "2.4", "2.5"])
def test_grant_for_older_release_has_five_fields(hub, checker, protocol) -> None:
    grant = hub.sign(protocols={"source": protocol}, caller="token:1")
    body = grant[64:] if protocol < "2.5" else grant[65 + 32 * grant[64] :]
    assert len(msgspec.msgpack.decode(body)) == 5
    assert checker.check(grant, key=KEY, reader="reader") == ""


@pytest.mark.parametrize("count", [1, 2, 16, 17, 40])
def test_grant_is_accepted_only_at_its_source(hub, clock, count) -> None:
    checkers = {f"s{i}": GrantChecker(hub.signer.public_key, f"s{i}", clock=clock) for i in range(count)}
    epochs = {source: one.epoch() for source, one in checkers.items()}
    grants = hub.signer.sign(key=KEY, reader="reader", epochs=epochs, protocols={"s0": "2.4"})
    assert list(grants) == list(epochs) and max(map(len, grants.values())) < 1024
    for source, grant in grants.items():
        for other in checkers.keys() - {source}:
            with pytest.raises(GrantRefused, match="another source"):
                checkers[other].check(grant, key=KEY, reader="reader")
        checkers[source].check(grant, key=KEY, reader="reader")


def test_grant_from_replica_with_same_seed_is_accepted(hub, checker) -> None:
    other = Hub()
    other.epoch = hub.epoch
    checker.check(other.sign(), key=KEY, reader="reader")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"key": "1" * 32}, "another key"),
        ({"reader": "other"}, "another reader"),
        ({"source": "other"}, "another source"),
        ({"epoch": 0}, "expired"),
        ({"epoch": 1 << 60}, "expired"),
    ],
)
def test_grant_for_wrong_target_is_refused(hub, checker, made, why) -> None:
    with pytest.raises(GrantRefused, match=why):
        checker.check(hub.sign(**made), key=KEY, reader="reader")


@pytest.mark.parametrize("age_s", [0.0, EPOCH_S, EPOCH_S + GRACE_S - 0.1])
def test_grant_is_valid_during_epoch_and_grace_period(hub, checker, clock, age_s) -> None:
    grant = hub.sign()
    clock.now += age_s
    assert (checker.epoch() == hub.epoch) == (age_s < EPOCH_S)
    checker.check(grant, key=KEY, reader="reader")
    with pytest.raises(GrantRefused, match="already used"):
        checker.check(grant, key=KEY, reader="reader")


def test_grant_expires_although_checker_was_idle(hub, checker, clock) -> None:
    grant = hub.sign()
    clock.now += EPOCH_S + GRACE_S  # no call replaced the epoch meanwhile
    with pytest.raises(GrantRefused, match="expired"):
        checker.check(grant, key=KEY, reader="reader")
    hub.epoch = checker.epoch()
    checker.check(hub.sign(), key=KEY, reader="reader")


def test_grant_is_refused_after_source_restart(hub, checker, clock) -> None:
    grant = hub.sign()
    checker.check(grant, key=KEY, reader="reader")
    with pytest.raises(GrantRefused, match="expired"):
        GrantChecker(hub.signer.public_key, "source", clock=clock).check(grant, key=KEY, reader="reader")


def test_nonces_are_removed_when_their_epoch_expires(hub, checker, clock) -> None:
    for _ in range(50):
        hub.epoch = checker.epoch()
        checker.check(hub.sign(), key=KEY, reader="reader")
        clock.now += 10
    assert sum(len(one.nonces) for one in checker._epochs) <= (EPOCH_S + GRACE_S) / 10 + 1


def test_forged_grant_is_refused(hub, checker) -> None:
    good = hub.sign()
    theirs = Hub(b"t" * 32).sign(epoch=hub.epoch)
    bodies = [b"", good[:64], good[:-1], theirs, bytes([good[0] ^ 1]) + good[1:], good + b"\x00", b"x" * 5000]
    later = msgspec.msgpack.encode(Grant(KEY, "reader", "source", hub.epoch + 1, b"n" * 12))
    one = msgspec.msgpack.encode(Grant(KEY, "reader", "source", hub.epoch, b"n" * 12))
    # The grant is next to other grants' digests, or replaces its digest.
    head = 64 + 1 + 3 * 32
    bodies += [good[: -len(later)] + later, good[:64] + later, good[:head] + one, good[:64] + b"\x00" + one]
    bodies += [good[:65] + blake3(one).digest() * 3 + one, good[:64] + b"\x01" + blake3(one).digest() + one]
    bodies += [good[:64] + b"\x10" + good[65:], good[:65], good[:head]]
    for body in bodies:
        with pytest.raises(PermissionDenied):
            checker.check(body, key=KEY, reader="reader")


@pytest.mark.parametrize("count", [0, 1, 2, 16])
def test_signature_over_different_digests_is_refused(hub, checker, count) -> None:
    body = msgspec.msgpack.encode(Grant(KEY, "reader", "source", hub.epoch, b"n" * 12))
    digests = blake3(b"other").digest() * count
    signature = hub.private.sign(b"penstock grants 2.5\n" + digests)
    for said in {0, 1, count, 16}:
        with pytest.raises(GrantRefused):
            checker.check(signature + bytes([said]) + digests + body, key=KEY, reader="reader")


def test_each_grant_check_is_audited(hub, checker, caplog) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    grant = hub.signer.sign(key=KEY, reader="reader", epochs={"source": hub.epoch})["source"]
    checker.check(grant, key=KEY, reader="reader")
    with pytest.raises(GrantRefused):
        checker.check(grant, key=KEY, reader="reader")
    assert [record.getMessage() for record in caplog.records] == [
        f"event=issued key={KEY} reader=reader source=source",
        f"event=used key={KEY} reader=reader source=source",
        f"event=refused key={KEY} reader=reader source=source why='already used'",
    ]
