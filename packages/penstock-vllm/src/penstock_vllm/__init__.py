"""Penstock for vLLM: its load format, weight transfers, sleep mode and compiled code.

The package imports no module, because each module needs the package that it adapts.
"""
