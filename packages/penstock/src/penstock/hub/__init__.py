"""The directory service of a fleet: its state, its server and its client.

`directory` has the hub's logic on a `store`. `app` serves the hub over HTTP, with `auth` and `page`. `client` sends the
requests. `local_hub` hosts the hub of one machine in a member's process. `messages` defines requests and responses.
"""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["hub"]]
__getattr__ = lazily(__name__, MODULES["hub"])


def __dir__() -> list[str]:
    return sorted(__all__)
