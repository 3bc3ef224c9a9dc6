"""Connection settings are read from an adapter's options in one place, and host functions are replaced once."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest

from penstock import ConnectionSettings
from penstock.errors import ConfigError
from penstock.spi import connection_of, patch_once

OPTIONS = {"hub": "http://hub:7070", "token_file": "/t", "listen": "a:7071", "data_port": 7072, "stall_s": 5.0}


def test_missing_connection_options_use_defaults() -> None:
    assert connection_of({"listen": None, "fleet": "m"}) == ConnectionSettings()


def test_rank_zero_listens_on_configured_ports() -> None:
    assert connection_of({**OPTIONS, "verify": True}) == ConnectionSettings(**OPTIONS)


def test_nonzero_ranks_listen_on_free_ports() -> None:
    assert connection_of(OPTIONS, 1) == ConnectionSettings(**{**OPTIONS, "listen": "a:0", "data_port": 0})


def test_process_without_rank_does_not_listen() -> None:
    settings = connection_of(OPTIONS, None)
    assert (settings.listen, settings.data_port, settings.hub) == (None, 0, "http://hub:7070")


@pytest.mark.parametrize("wrong", [{"hub": "no address"}, {"stall_s": -1}, {"data_port": 7072}])
def test_invalid_option_raises_config_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        connection_of(wrong)


class Host:
    def add(self, number: int) -> int:
        """Add one."""
        return number + 1

    async def answer(self) -> str:
        return "own"


def twice(original: Any, self: Any, number: int) -> int:
    return 2 * int(original(self, number))


def host_class() -> type[Host]:
    return type("Host", (Host,), {})


def test_repeated_patch_replaces_function_once() -> None:
    host = host_class()
    for _ in range(3):
        patch_once(host, add=twice)
    assert (host().add(1), host.add.__doc__, Host().add(1)) == (4, "Add one.", 2)


def test_function_patched_twice_runs_both_replacements() -> None:
    def plus_ten(original: Any, self: Any, number: int) -> int:
        return 10 + int(original(self, number))

    host = host_class()
    for replacement in (twice, plus_ten, twice, plus_ten):
        patch_once(host, add=replacement)
    assert host().add(1) == 14


def test_patch_of_missing_function_changes_nothing() -> None:
    host = host_class()
    with pytest.raises(AttributeError, match="flush"):
        patch_once(host, add=twice, flush=twice)
    assert host().add(1) == 2


def test_patch_applies_to_module_functions_and_coroutines() -> None:
    module, host = ModuleType("m"), Host()
    vars(module)["add"] = Host().add

    def negative(original: Any, number: int) -> int:
        return -int(original(number))

    async def ours(original: Any) -> str:
        return "ours after " + str(await original())

    patch_once(module, add=negative)
    patch_once(host, add=negative, answer=ours)
    assert (module.add(1), host.add(1), Host().add(1)) == (-2, -2, 2)
    assert asyncio.run(host.answer()) == "ours after own"
