"""Memory: the fixed-size staging pool that bytes pass through, and what it costs to have it."""
