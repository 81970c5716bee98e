"""Hide the communication of a whole step: schedules and buckets of collectives on ATen FX graphs.

    fx graph ─► graph ─► dag ─► schedule ─► emit ─► runnable graph
                          └──► simulate, bounds ─► report

`dag`, `simulate`, `bounds`, `memory` and `schedule` are plain numpy: what there is to run, how long an order of it
takes, how long any order must take, and a good one within a budget of memory. `operators`, `graph`, `costs` and
`capture` know torch: what the nodes of a graph do, what they cost, and graphs to try it on. `emit` does not exist yet.
"""
