"""Support for tests that other projects can use too: conformance suites, an HTTP server, synthetic checkpoints.

Import the module you need. Only the tests import pytest.
"""
