"""The convert journey: any weight set to any other, through compute, out of core, on workers that may die."""
