"""Penstock for SGLang: its load format, weight updates and released memory.

No module is imported here: each needs the package that it adapts.
"""
