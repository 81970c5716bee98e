"""Predictions of the cost model against measurements that others published."""
