"""Plans: needs, traffic, memory and predicted time of every rank, from masks and a layout. Reads no process group."""
