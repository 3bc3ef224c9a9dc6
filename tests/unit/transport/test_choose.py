from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from penstock.errors import Cancelled, ConfigError, DestinationError, PlanError
from penstock.transport import choose
from penstock.transport.choose import PeerLinks, TransportKind, open_links, register_transport
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Descriptor, Handle, Memory, Transport, decode, encode


def _fail(error: Exception) -> Transport:
    raise error


def test_unavailable_transport_is_skipped_with_reason() -> None:
    with PeerLinks({"loopback": LoopbackTransport, "shm": lambda: _fail(ConfigError("no memfds"))}) as links:
        assert list(links.transports) == ["loopback"] and links.refused == {"shm": "no memfds"}


def test_failed_transport_open_closes_earlier_transports() -> None:
    opened: list[LoopbackTransport] = []

    def loopback() -> LoopbackTransport:
        opened.append(LoopbackTransport())
        return opened[0]

    with pytest.raises(DestinationError):
        PeerLinks({"loopback": loopback, "shm": lambda: _fail(DestinationError("no descriptor is left"))})
    with pytest.raises(Cancelled):
        opened[0].register(Memory.of_buffer(bytearray(8)))


class _Near(LoopbackTransport):
    name = "near"


class _Far(LoopbackTransport):
    name = "far"


@pytest.fixture
def by_rack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PeerLinks]]:
    """Open two registered transports between hosts, of which the nearer one refuses these endpoints."""

    def open_by_rack(*refused: str, also_far: bool = False) -> PeerLinks:
        def unless_peer(into: Handle, source: Descriptor) -> str:
            assert into.memory.nbytes == 8
            return f"{source.endpoint} is in another rack" if source.endpoint in refused else ""

        monkeypatch.setattr(choose, "_kinds", {})
        far = {"unless_peer": lambda into, source: "no route"} if also_far else {}
        register_transport(TransportKind(name="far", open=lambda setup: _Far(), reach="network", rank=2, **far))
        near = TransportKind(name="near", open=lambda setup: _Near(), reach="network", rank=1, unless_peer=unless_peer)
        register_transport(near)
        return opened.enter_context(open_links())

    with ExitStack() as opened:
        yield open_by_rack


def _offered(links: PeerLinks) -> dict[str, bytes]:
    handles = links.register(Memory.of_buffer(bytearray(8)))
    return {name: encode(handle.descriptor) for name, handle in handles.items()}


def test_refused_peer_falls_back_to_next_transport(
    by_rack: Callable[..., PeerLinks],
) -> None:
    offered = _offered(by_rack())
    endpoint = decode(offered["near"]).endpoint
    links = by_rack(endpoint)
    ours = links.register(Memory.of_buffer(bytearray(8)))
    transport, descriptor, why = links.choose(ours, offered, same_host=False, same_process=False)
    assert (transport.name, descriptor.transport) == ("far", "far")
    assert why == f"near: {endpoint} is in another rack"
    # A peer with a different endpoint is read by the nearer transport.
    assert links.choose(ours, _offered(by_rack()), same_host=False, same_process=False)[0].name == "near"


def test_refusal_by_all_transports_lists_reasons(by_rack: Callable[..., PeerLinks]) -> None:
    offered = _offered(by_rack())
    links = by_rack(decode(offered["near"]).endpoint, also_far=True)
    ours = links.register(Memory.of_buffer(bytearray(8)))
    with pytest.raises(PlanError, match=r"near: .* is in another rack; far: no route"):
        links.choose(ours, offered, same_host=False, same_process=False)
