"""Measurements behind `spanwise bench`: each module prints a table and writes JSON."""
