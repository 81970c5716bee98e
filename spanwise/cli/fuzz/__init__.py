"""``spanwise fuzz``: random attention calls on local ranks, compared with dense float64 attention.

    cases (describe) ─► build (call spanwise) ─► ranks (run) ─┐
                   └──► cells, oracle (what must come out) ───┴─► check ─► command

``cases``, ``cells`` and ``oracle`` import nothing of the rest of spanwise: expected results share no code with found
ones.
"""
