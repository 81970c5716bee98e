"""What follows from mask and layout for every rank, and what "auto" chooses. Pure: no process group is read."""
