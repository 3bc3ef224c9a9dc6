"""The connection settings among an adapter's options.

In: options as an engine, a trainer or a request gives them. Out: settings for the verbs that use a hub.
Not here: settings from the environment, which each verb adds (`hub.client`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config import ConnectionSettings

_NAMES = ("hub", "token_file", "listen", "data_port", "stall_s")


def connection_of(options: Mapping[str, Any], rank: int | None = 0) -> ConnectionSettings:
    """Read the connection settings among an adapter's options.

    Args:
        options: `hub`, `token_file`, `listen`, `data_port` and `stall_s` are read. A missing option and None mean the
            default of `ConnectionSettings`. Other options are ignored.
        rank: this process among those of one engine on this host. Rank 0 takes the given ports. Other ranks take free
            ports at the same host, because two processes cannot have one port. None: this process asks the hub and
            serves nobody.

    Raises:
        ConfigError: an option has a wrong value.

    The token file is read when a verb uses the settings.
    """
    names = ("hub", "token_file", "stall_s") if rank is None else _NAMES
    given = {name: options[name] for name in names if options.get(name) is not None}
    if rank and "listen" in given:
        given |= {"listen": f"{given['listen'].rpartition(':')[0]}:0", "data_port": 0}
    return ConnectionSettings(**given)
