"""What an adapter for an engine, a trainer or a library may use besides the public names: docs/extend/spi.md."""

from penstock.exports import SPI, lazily

__all__ = [*SPI]
__getattr__ = lazily(__name__, SPI)


def __dir__() -> list[str]:
    return sorted(__all__)
