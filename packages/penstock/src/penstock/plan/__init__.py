"""Planning: pure functions on values, without torch, clocks or I/O, so that a plan can be verified without a GPU."""
