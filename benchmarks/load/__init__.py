"""The load journey beside its peers: one command, one machine, the same files, in one run.

    checkpoints -> cache state -> measure (a fresh process each) -> JSON lines -> report (the committed page)

In: `python -m benchmarks.load --rows a,b,e`. Out: `load.jsonl` and `load.md`.
Not here: where one load spends its time (`benchmarks/profile_load.py`).
"""
