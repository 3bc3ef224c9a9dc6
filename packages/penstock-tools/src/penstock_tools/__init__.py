"""Plans, simulations, calibration and benchmarks of Penstock.

No module is imported here: each needs the package that it adapts.
"""
