"""Reports of the functions that read weights without loading them."""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["reports"]]
__getattr__ = lazily(__name__, MODULES["reports"])


def __dir__() -> list[str]:
    return sorted(__all__)
