"""The sync journey: from a trainer's ranks to the inference ranks, a whole version or none."""
