"""Support for tests, also in other projects: conformance suites, an HTTP server, and synthetic checkpoints.

Import the module you need. Only the tests import pytest.
"""
