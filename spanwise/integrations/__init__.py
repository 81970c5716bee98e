"""Calls of other frameworks, translated into the public API; each framework is imported with its own module."""
