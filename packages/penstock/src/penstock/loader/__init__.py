"""The load journey: from any storage into memory, as whole tensors, regions, streams or live parameters.

The verbs are in `load`, `into`, `safe_open`, `start` and `verify`. `session` and `run` execute a load, `match` assigns
tensors to targets, and `boxes` and `regions` cut regions from verified leaves. `group` and the `shared_*` modules read
weights together with other ranks.
"""
