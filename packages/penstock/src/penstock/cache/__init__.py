"""Keeper: models that stay in memory, and processes that attach to them."""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["cache"]]
__getattr__ = lazily(__name__, MODULES["cache"])


def __dir__() -> list[str]:
    return sorted(__all__)
