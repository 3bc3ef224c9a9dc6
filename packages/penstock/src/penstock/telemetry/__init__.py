"""Prometheus metrics of journeys and members, and OpenTelemetry spans."""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["telemetry"]]
__getattr__ = lazily(__name__, MODULES["telemetry"])


def __dir__() -> list[str]:
    return sorted(__all__)
