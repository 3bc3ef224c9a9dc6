"""The connection settings in an adapter's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config import ConnectionSettings

_NAMES = ("hub", "token_file", "listen", "data_port", "stall_s")


def connection_of(options: Mapping[str, Any], rank: int | None = 0) -> ConnectionSettings:
    """Read the connection settings from an adapter's options. A wrong value raises ConfigError.

    Args:
        options: `hub`, `token_file`, `listen`, `data_port` and `stall_s` are read. A missing option or None means the
            default of `ConnectionSettings`. Other options are ignored.
        rank: rank of this process in one engine on this host. Rank 0 uses the ports in the options. Other ranks use
            free ports, because two processes cannot share a port. None means that this process serves no peers.
    """
    names = ("hub", "token_file", "stall_s") if rank is None else _NAMES
    values = {name: options[name] for name in names if options.get(name) is not None}
    if rank and "listen" in values:
        values |= {"listen": f"{values['listen'].rpartition(':')[0]}:0", "data_port": 0}
    return ConnectionSettings(**values)
