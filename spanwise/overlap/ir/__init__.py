"""A step as plain data: the dag, an order of it, its simulation, bounds and memory."""
