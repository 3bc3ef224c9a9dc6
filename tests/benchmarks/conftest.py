"""Fixtures of the integration tests that tests of benchmarks use too."""

from tests.integration.conftest import fork_server, host, launcher_fork_servers

__all__ = ["fork_server", "host", "launcher_fork_servers"]
