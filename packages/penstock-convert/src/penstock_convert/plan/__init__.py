"""Planning of conversions: pure functions on values, without torch, clocks or I/O.

`tasks` cuts recipes into tasks, and `placement` assigns tasks to workers. `simulate_convert` predicts how long a
conversion takes on a cluster that `cluster` describes.
"""
