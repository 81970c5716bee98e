"""Degrees of parallelism for a model, with intervals: a step's seconds and memory from its config and documents."""
