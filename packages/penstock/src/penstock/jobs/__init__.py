"""The convert journey: any weight set to any other, through compute, out of core, on workers that may die."""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["jobs"]]
__getattr__ = lazily(__name__, MODULES["jobs"])


def __dir__() -> list[str]:
    return sorted(__all__)
