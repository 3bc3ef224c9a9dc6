"""The interface for adapters of engines, trainers and libraries, in addition to the public names.

See docs/extend/spi.md.
"""

from penstock.exports import SPI, lazily

__all__ = [*SPI]
__getattr__ = lazily(__name__, SPI)


def __dir__() -> list[str]:
    return sorted(__all__)
