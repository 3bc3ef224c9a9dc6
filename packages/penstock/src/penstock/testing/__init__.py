"""Support for tests, also in other projects: conformance suites and synthetic checkpoints.

Import the required module. Only tests import pytest.
"""
