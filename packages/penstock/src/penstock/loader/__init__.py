"""The load journey: from any storage into memory, as whole tensors, regions, streams or live parameters.

`load`, `into`, `safe_open` and `verify` are the verbs; `start` and `pending` a module that is used while it loads.
`session` and `run` carry out a load, `match` finds which tensor fills which target, and `boxes` and `regions` cut
parts from verified leaves. `group` shares a load between ranks. `shared_files`, `shared_read` and `shared_turns`
read files once that ranks open alike. `progress` is the bar of every long verb.
"""
