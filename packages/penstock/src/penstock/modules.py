"""Modules that are used while their weights are still being loaded."""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["modules"]]
__getattr__ = lazily(__name__, MODULES["modules"])


def __dir__() -> list[str]:
    return sorted(__all__)
