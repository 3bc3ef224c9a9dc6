"""The receiving side of sync: engines read a version, verify it and make it live.

In the order of a call:

- `subscribe` checks the arguments and joins. `subscriber` has the verbs, and `states` its states and transitions.
- `update` finds a planner, requests the part and retries. `sources`, `steps`, `transfer`, `packed` and `tied` read it.
- `target` is the memory to fill, `followed` notices tensors that moved, and `staged` is a verified version.
- `participant` checks it, votes, and waits for the decision of a fleet.
- `flip` makes it live, with `hooks` of the engine and `leases` of readers. `serving` offers it to others.
- `released` frees weights while an engine sleeps. `versions` is the loop of an engine that serves requests.
"""
