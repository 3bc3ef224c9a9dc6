"""`wait_all` waits for all reads, and a device's error outranks a source's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.errors import DestinationError, PenstockError, SourceStalled, StaleDescriptor
from penstock.testing.transport_suite import segments
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import LATE_S, Memory, PendingRead, Transport, wait_all


class Ending(LoopbackTransport):
    """A transport whose reads fail."""

    def __init__(self, error: PenstockError, name: str = "loopback") -> None:
        super().__init__()
        self.name, self._error = name, error
        self.given_s: list[float] = []

    def wait(self, pending: PendingRead, *, stall_s: float) -> None:
        self.given_s.append(stall_s)
        raise self._error


def read(transport: LoopbackTransport) -> tuple[Transport, PendingRead]:
    source, into = (transport.register(Memory.of_buffer(bytearray(100))) for _ in range(2))
    return transport, LoopbackTransport.post_read(transport, into, source.descriptor, segments([(0, 0, 100)]))


@pytest.fixture
def whole() -> Iterator[LoopbackTransport]:
    made = LoopbackTransport()
    yield made
    made.close()


def test_first_error_is_returned_after_last_read(whole) -> None:
    first, second = Ending(StaleDescriptor("one")), Ending(SourceStalled("two"))
    failed, is_touched = wait_all([read(first), read(second)], stall_s=5)
    assert (failed is not None and failed.message, is_touched) == ("one", False)
    assert len(second.given_s) == 1
    failed, is_touched = wait_all([read(first), read(whole)], stall_s=5)
    assert (failed is not None and failed.message, is_touched) == ("one", True)
    assert wait_all([read(whole)], stall_s=5) == (None, True)


def test_failed_post_waits_for_earlier_reads(whole) -> None:
    source, into = (whole.register(Memory.of_buffer(bytearray(100))) for _ in range(2))
    old = source.descriptor
    source.fence()

    def posting() -> Iterator[tuple[Transport, PendingRead]]:
        yield read(whole)
        yield whole, whole.post_read(into, old, segments([(0, 0, 100)]))
        raise AssertionError("it goes on after a failure")

    failed, is_touched = wait_all(posting(), stall_s=5)
    assert isinstance(failed, StaleDescriptor)
    assert is_touched


@pytest.mark.parametrize("by", ["staged_http", "cuda_ipc", "pinned_shm"])
def test_device_error_outranks_source_error(by: str) -> None:
    silent = SourceStalled("no byte") if by != "staged_http" else DestinationError("a device hangs", mutated=True)
    for before in (StaleDescriptor("gone"), None):
        posted = [] if before is None else [read(Ending(before))]
        failed, is_touched = wait_all([*posted, read(Ending(silent, by))], stall_s=5)
        assert isinstance(failed, DestinationError)
        assert failed.mutated
        assert is_touched
    assert isinstance(wait_all([read(Ending(SourceStalled("no byte"), "shm"))], stall_s=5)[0], SourceStalled)


def test_reads_from_silent_peer_share_deadline() -> None:
    silent = Ending(SourceStalled("no byte"))
    wait_all([read(silent) for _ in range(4)], stall_s=30)
    assert silent.given_s == [30, *3 * [LATE_S]]
    # A copy that cannot be cancelled gets the whole deadline until a device has failed.
    device = Ending(SourceStalled("no byte"), "cuda_ipc")
    wait_all([read(silent), read(device), read(device)], stall_s=30)
    assert device.given_s == [30, LATE_S]
