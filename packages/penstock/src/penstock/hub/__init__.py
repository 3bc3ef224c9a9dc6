"""The client of a fleet's hub, and what it shares with the hub, whose server is in the package `penstock_hub`.

`client` sends the requests, and `messages` defines requests and responses. `local_hub` finds the hub of one host or
hosts it in a member's process. `auth` checks callers, and `grants` signs and checks permissions to read.
"""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["hub"]]
__getattr__ = lazily(__name__, MODULES["hub"])


def __dir__() -> list[str]:
    return sorted(__all__)
