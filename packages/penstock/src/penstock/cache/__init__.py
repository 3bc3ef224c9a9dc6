"""Models that stay in memory (`WeightCache`), and processes that attach to them (`attach`, `cache_parameters`)."""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["cache"]]
__getattr__ = lazily(__name__, MODULES["cache"])


def __dir__() -> list[str]:
    return sorted(__all__)
