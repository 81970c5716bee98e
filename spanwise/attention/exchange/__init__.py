"""Exchanges move K/V to the ranks that read them and bring dK/dV home."""
