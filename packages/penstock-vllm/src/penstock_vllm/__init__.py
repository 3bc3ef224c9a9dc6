"""Penstock for vLLM: a load format, weight transfers, sleep mode and compiled code.

The package imports none of its modules, because most of them require vLLM.
"""
