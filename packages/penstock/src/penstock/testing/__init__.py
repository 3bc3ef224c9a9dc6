"""Support for tests, shipped so that others can use it: conformance suites, an HTTP server, made-up checkpoints.

In / Out: nothing here; import the module you need. Not here: pytest itself, which only tests import.
"""
