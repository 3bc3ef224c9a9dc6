from __future__ import annotations

import pytest

from penstock.errors import Cancelled, ConfigError, DestinationError
from penstock.transport.choose import Links
from penstock.transport.loopback import LoopbackTransport
from penstock.transport.protocol import Memory, Transport


def _fail(error: Exception) -> Transport:
    raise error


def test_what_is_not_to_be_had_here_is_left_out_and_said() -> None:
    with Links({"loopback": LoopbackTransport, "shm": lambda: _fail(ConfigError("no memfds"))}) as links:
        assert list(links.transports) == ["loopback"] and links.refused == {"shm": "no memfds"}


def test_where_opening_them_fails_none_is_left_open() -> None:
    opened: list[LoopbackTransport] = []

    def loopback() -> LoopbackTransport:
        opened.append(LoopbackTransport())
        return opened[0]

    with pytest.raises(DestinationError):
        Links({"loopback": loopback, "shm": lambda: _fail(DestinationError("no descriptor is left"))})
    with pytest.raises(Cancelled):
        opened[0].register(Memory.of_buffer(bytearray(8)))
