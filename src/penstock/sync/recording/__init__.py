"""Recording of a loader: which part of which published tensor each parameter needs."""
