"""Measurements of `spanwise bench`: each module prints a table and writes JSON."""
