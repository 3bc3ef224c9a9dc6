"""Penstock for vLLM: its load format, weight transfers, sleep mode and compiled code.

No module is imported here: each needs the package that it adapts.
"""
