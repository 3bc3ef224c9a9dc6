"""Numbers of bytes as people write them."""

from __future__ import annotations

import pytest

from penstock.config import parse_bytes
from penstock.errors import ConfigError
from penstock.types import GIB, MIB


def test_bytes_are_numbers_with_or_without_a_unit() -> None:
    assert [parse_bytes(text) for text in ("4096", "256M", " 1.5GiB ", "2kb", "0", 7)] == [
        4096,
        256 * MIB,
        3 * GIB // 2,
        2048,
        0,
        7,
    ]


@pytest.mark.parametrize("text", ["", "M", "lots", "nan", "inf", "1e400", "-5", "-1M", -1])
def test_what_is_no_number_of_bytes_is_said_so(text: str | int) -> None:
    with pytest.raises(ConfigError, match="bytes"):
        parse_bytes(text)
