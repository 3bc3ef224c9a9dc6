"""The outcome of a version: how it becomes visible, is withdrawn, or stays unknown. One two-phase commit decides it.

1. Subscribers stage a version, check it, and report prepared, failed or refused.
2. Rank 0 of the publishers is the coordinator. It counts the reports (`ballot`) and proposes an outcome by the
   deadline.
3. The hub records a commit before the coordinator reports it to a subscriber. The first proposal to the hub counts
   (`hub.messages.DecideRequest`).
4. A subscriber goes live only after the coordinator or the hub reported `Committed` (`learned`).
5. If the coordinator does not reply, a subscriber proposes a withdrawal to the hub, which returns the recorded outcome.
   A subscriber that learns no outcome keeps its version.
6. Ranks announce their newest version that is not withdrawn (`announced`).

No subscriber goes live before the hub has recorded a commit, which is final. So all subscribers make the same choice.

`outcome` defines the outcomes and their messages. `coordinator` adds a lock and a clock to the ballots. The other
modules of this room use no clocks and no threads, except that `announced` wakes waiting threads. Publishers and
subscribers only carry the messages.
"""
