"""Milliseconds of nodes: a roofline with FLOPs, or measurements."""
