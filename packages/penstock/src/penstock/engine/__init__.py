"""The engine: four executors (fetch, place, compute, send) that run a plan under one memory budget, into one trace."""
