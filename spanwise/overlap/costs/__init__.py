"""What nodes cost: roofline, FLOPs, measurements."""
