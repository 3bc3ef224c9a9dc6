"""The sync journey: from a trainer's ranks to the inference ranks, a whole version or none."""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["sync"]]
__getattr__ = lazily(__name__, MODULES["sync"])


def __dir__() -> list[str]:
    return sorted(__all__)
