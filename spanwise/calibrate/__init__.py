"""Measures the rates of this machine and the links of a process group, as a `spanwise.Hardware`."""
