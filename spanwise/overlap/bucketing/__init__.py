"""Which collectives become one."""
