"""The directory service of a fleet: its state, its server, its client.

State: `directory` over a `store`, with `claims`, `complaints`, `conversions`, `failures`, `grants`, `limits` (the
share of each caller), `snapshot`, `explain`. Server: `app`, `routes`, `server`, `connection`, `auth`, `audit`,
`metrics`, `page`. Client: `client`, `job_reporter`. `local_hub` is hosted by a member. Values: `messages`,
`address`.
"""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["hub"]]
__getattr__ = lazily(__name__, MODULES["hub"])


def __dir__() -> list[str]:
    return sorted(__all__)
