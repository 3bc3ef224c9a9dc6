"""The directory service of a fleet: its state, its server, its client."""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["hub"]]
__getattr__ = lazily(__name__, MODULES["hub"])


def __dir__() -> list[str]:
    return sorted(__all__)
