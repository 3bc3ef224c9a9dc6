"""Plans, simulations, calibration and benchmarks for Penstock.

The package imports no module, because each module needs the package that it adapts.
"""
