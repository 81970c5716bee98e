"""Hide the communication of a whole step: schedules and buckets of collectives on ATen FX graphs.

    fx graph ─► graph ─► dag ─► schedule · bucket ─► emit ─► runnable graph
                          └──► simulate, bounds ─► report

`dag`, `simulate` and `bounds` are plain numpy: what there is to run, how long an order of it takes, and how long any
order must take. The rest of the package knows torch.
"""
