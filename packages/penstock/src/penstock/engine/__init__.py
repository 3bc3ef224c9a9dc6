"""The engine: executors (fetch, place, compute, send) that run a plan within one memory limit and record a trace."""
