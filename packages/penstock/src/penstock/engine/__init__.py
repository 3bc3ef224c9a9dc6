"""The engine: four executors (fetch, place, compute, send) that run a plan under one memory budget, into one trace.

`run` is the run loop of every journey: a `Run` owns the executors, their `RunState` and the order in which they
end. `threads` are kept from run to run. `fetch_ring` is the ring executor.
"""
