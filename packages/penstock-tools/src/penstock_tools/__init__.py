"""Plans, simulations, calibration and benchmarks for Penstock.

The package imports none of its modules.
"""
