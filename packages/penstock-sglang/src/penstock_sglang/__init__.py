"""Penstock for SGLang: a load format, weight updates and released memory.

The package imports none of its modules, because they require SGLang.
"""
