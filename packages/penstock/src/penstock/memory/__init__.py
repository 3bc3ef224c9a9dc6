"""Memory: staging buffers that bytes pass through, arenas in which they stay, tiers between which they move."""
