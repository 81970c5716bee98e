"""Heads that each rank computes when the ranks of a group trade tokens for heads (exchange "ulysses").

Numbers only: planning counts bytes with them, and the exchange moves these heads. Of n ranks, rank j computes the query
heads ``[j * Hq / n, (j + 1) * Hq / n)``. It receives a window of K/V heads that holds all heads which these read.
Windows are equally wide on all ranks, because they travel as rows of one collective. They do not overlap where n
divides Hkv, and are one head wide where Hkv divides n. Otherwise a rank may receive a head that it does not read.
"""

from __future__ import annotations


def check_heads(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """``ValueError`` unless `num_ranks` ranks can share the query heads evenly; it lists the numbers that can."""
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
    if num_q_heads % num_ranks:
        works = ", ".join(str(n) for n in range(1, num_q_heads + 1) if num_q_heads % n == 0)
        raise ValueError(
            f"exchange 'ulysses' cannot divide {num_q_heads} query heads ({num_kv_heads} key/value heads) evenly over "
            f"{num_ranks} ranks; {num_q_heads} heads go with {works} ranks. Let fewer ranks trade heads, "
            f"num_ranks=(outer, inner) with such an inner number, or take another exchange"
        )


def kv_heads_read(num_q_heads: int, num_kv_heads: int, num_ranks: int, rank: int) -> tuple[int, ...]:
    """The K/V head that each of the rank's query heads reads, ascending."""
    own = num_q_heads // num_ranks
    return tuple(head // (num_q_heads // num_kv_heads) for head in range(rank * own, (rank + 1) * own))


def kv_heads_held(num_q_heads: int, num_kv_heads: int, num_ranks: int, rank: int) -> int:
    """K/V heads that the rank computes with: the distinct heads that its query heads read.

    Kernels want equally many query heads for each K/V head. Where that fails, K/V heads are repeated, one for each
    query head.

    >>> [kv_heads_held(12, 4, 2, rank) for rank in range(2)], [kv_heads_held(24, 6, 8, rank) for rank in range(4)]
    ([2, 2], [1, 3, 3, 1])
    """
    read = kv_heads_read(num_q_heads, num_kv_heads, num_ranks, rank)
    readers = {read.count(head) for head in read}
    return len(set(read)) if len(readers) == 1 else len(read)


def kv_heads_of(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[int, tuple[int, ...]]:
    """How many K/V heads a rank receives, and the first one of each rank's window; refuses heads as `check_heads`.

    >>> kv_heads_of(32, 4, 8)
    (1, (0, 0, 1, 1, 2, 2, 3, 3))
    >>> kv_heads_of(12, 4, 6)
    (2, (0, 0, 1, 2, 2, 2))
    """
    check_heads(num_q_heads, num_kv_heads, num_ranks)
    read = [kv_heads_read(num_q_heads, num_kv_heads, num_ranks, rank) for rank in range(num_ranks)]
    count = max(heads[-1] + 1 - heads[0] for heads in read)
    return count, tuple(min(heads[0], num_kv_heads - count) for heads in read)
