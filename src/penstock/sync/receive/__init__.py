"""The receiving side of sync: how a version arrives."""
