"""Worker processes of conversions: how they are started, what they run."""
