"""Draining a member: no reader is sent to it, its chunks are read elsewhere, and the order ends with the member."""

from __future__ import annotations

import logging

import pytest
from tests.support.hubs import IDENTITY, HubBench, key_state

from penstock.errors import ConfigError, PermissionDenied, UnknownMember
from penstock.hub.auth import Caller
from penstock.hub.messages import Beat, Drain, HoldingState, Identity, UpstreamsRequest, WhyRequest
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory

WHOLE = ((0, 100),)
OPERATOR = Caller(name="token:operator", is_operator=True)
ORDER = Drain(reason="a new driver")


@pytest.fixture
def bench() -> HubBench:
    return HubBench()


@pytest.fixture
def hub(bench: HubBench) -> Directory:
    """`a` and `b` hold the model, `r` fetches it."""
    hub = bench.hub()
    bench.join(hub, "a", "b", "r")
    bench.beat(hub, "a", key_state(WHOLE))
    bench.beat(hub, "b", key_state(WHOLE))
    return hub


def upstreams(hub: Directory, member: str = "r", **more) -> list[str]:
    request = UpstreamsRequest(member=member, holding=key_state(((0, 1),)), **more)
    # The first request registers the reader.
    hub.upstreams(request)
    return [upstream.member for upstream in hub.upstreams(request).upstreams]


def test_readers_avoid_drained_member_until_drain_is_undone(bench: HubBench, hub: Directory) -> None:
    assert set(upstreams(hub)) == {"a", "b"}
    hub.drain("a", ORDER, OPERATOR)
    bench.now += 1
    assert upstreams(hub) == ["b"]
    # The member's heartbeats and requests do not undo the drain.
    bench.beat(hub, "a", key_state(WHOLE))
    bench.now += 1
    assert upstreams(hub) == ["b"]
    hub.drain("a", None, OPERATOR)
    bench.now += 1
    assert set(upstreams(hub)) == {"a", "b"}


def test_reader_without_layout_avoids_drained_member(bench: HubBench, hub: Directory) -> None:
    hub.drain("a", ORDER, OPERATOR)
    bench.now += 1
    asks = HoldingState(key=IDENTITY.key(), identity=IDENTITY, num_chunks=0, nbytes=0)
    assert [u.member for u in hub.upstreams(UpstreamsRequest(member="r", holding=asks)).upstreams] == ["b"]
    # An engine that names the drained member does not attach to it.
    named = UpstreamsRequest(member="r", holding=asks, source="a")
    assert hub.upstreams(named).upstreams == ()


def test_draining_last_holder_sends_readers_to_storage(bench: HubBench, hub: Directory) -> None:
    for member in "ab":
        hub.drain(member, ORDER, OPERATOR)
    bench.now += 1
    assert upstreams(hub, can_read_storage=True) == []
    assert bench.claim(hub, "r", key_state(((0, 1),))).ranges != ()


def test_drained_member_can_still_fetch(bench: HubBench, hub: Directory) -> None:
    hub.drain("r", ORDER, OPERATOR)
    bench.now += 1
    assert set(upstreams(hub)) == {"a", "b"}


def test_status_shows_drain_state_and_reason(bench: HubBench, hub: Directory) -> None:
    hub.drain("a", ORDER, OPERATOR)
    shown = {member.member: member for member in hub.status().members}
    assert shown["a"].drain == Drain(by="token:operator", reason="a new driver")
    assert [holding.state for holding in shown["a"].holdings] == ["draining"]
    assert shown["b"].drain is None and [holding.state for holding in shown["b"].holdings] == ["whole"]
    upstreams(hub)
    assert "a: is whole; an operator drains it" in "\n".join(hub.why(WhyRequest(model="llama", member="r")).lines)


def test_drain_order_is_removed_with_its_member(bench: HubBench, hub: Directory) -> None:
    hub.drain("a", ORDER, OPERATOR)
    bench.now += 11  # longer than the time to live of a silent member
    bench.join(hub, "a")
    bench.beat(hub, "a", key_state(WHOLE))
    assert all(member.drain is None for member in hub.status().members)
    with pytest.raises(UnknownMember):
        hub.drain("nobody", ORDER, OPERATOR)


def test_restarted_hub_learns_drain_order_from_heartbeat(bench: HubBench, hub: Directory) -> None:
    hub.drain("a", ORDER, OPERATOR)
    order = hub.beat("a", Beat(holdings=(key_state(WHOLE),))).drain
    assert order == Drain(by="token:operator", reason="a new driver")
    after = HubBench()
    new = after.hub(fresh=False)
    new.begin()
    after.join(new, "a", "b")
    assert new.beat("a", Beat(holdings=(key_state(WHOLE),), drain=order)).drain == order
    # The drain is undone immediately, so an earlier heartbeat does not restore it.
    new.drain("a", None, OPERATOR)
    assert new.beat("a", Beat(holdings=(key_state(WHOLE),), drain=order)).drain is None
    new.drain("a", ORDER, OPERATOR)
    # Once the hub is not new, a late heartbeat cannot restore an undone order.
    after.now += 5
    new.drain("a", None, OPERATOR)
    assert new.beat("a", Beat(holdings=(key_state(WHOLE),), drain=order)).drain is None


def test_every_drain_order_is_written_to_audit_log(hub: Directory, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.audit"):
        hub.drain("a", ORDER, OPERATOR)
        hub.drain("a", None, OPERATOR)
    assert caplog.messages == [
        "event=drain member=a caller=token:operator reason='a new driver'",
        "event=undrain member=a caller=token:operator reason=''",
    ]


def test_text_from_member_cannot_forge_audit_lines(caplog: pytest.LogCaptureFixture) -> None:
    bench = HubBench()
    hub = bench.hub(fresh=False)
    hub.begin()
    bench.join(hub, "a")
    with caplog.at_level(logging.INFO, "penstock.audit"):
        hub.beat("a", Beat(drain=Drain(by="x\nevent=drain member=b caller=token:operator")))
    (line,) = caplog.messages
    assert line.startswith("event=drain_restored member=a ") and "\n" not in line


def test_operator_cannot_drain_member_with_forbidden_model(bench: HubBench, hub: Directory) -> None:
    limited = Caller(models=("llama",), name="token:limited", is_operator=True)
    hub.drain("a", ORDER, limited)
    bench.beat(hub, "b", key_state(WHOLE), key_state(WHOLE, identity=Identity(model="secret")))
    with pytest.raises(PermissionDenied):
        hub.drain("b", ORDER, limited)


def test_token_file_entry_grants_operator_right(tmp_path) -> None:
    path = tmp_path / "tokens"
    path.write_text("member-0123456789 llama*\noperator-0123456789 @operator\nsome-of-it-0123456789 llama* @operator\n")
    auth = Auth.of(token_file=path)
    callers = [auth.caller(f"Bearer {word}-0123456789") for word in ("member", "operator", "some-of-it")]
    assert [(caller.models, caller.is_operator) for caller in callers if caller is not None] == [
        (("llama*",), False),
        (None, True),
        (("llama*",), True),
    ]
    path.write_text("operator-0123456789 @operater\n")
    with pytest.raises(ConfigError, match="@operater"):
        Auth.of(token_file=path)


def test_certificate_without_token_cannot_drain(tmp_path) -> None:
    """Without tokens and certificates the hub's socket is private to its user."""
    caller = Auth().caller("")
    assert caller is not None and caller.is_operator
    certificate = Auth(client_ca=tmp_path / "ca").caller("", "commonName:member")
    assert certificate is not None and not certificate.is_operator
