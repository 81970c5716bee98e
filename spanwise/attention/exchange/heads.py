"""Which heads each rank computes when the ranks of a group trade tokens for heads (exchange "ulysses").

Numbers only, for the planner, which counts bytes, and for the exchange, which moves them. Rank j computes the query
heads ``[j * Hq / n, (j + 1) * Hq / n)`` and receives a window of K/V heads that holds those which they read. Windows
are equally wide on all ranks, for they travel as rows of one collective; where n divides Hkv they do not overlap, where
Hkv divides n each is one head, and only otherwise may a rank receive a head that it does not read.
"""

from __future__ import annotations


def check_heads(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """``ValueError`` unless `num_ranks` ranks can share the query heads evenly, with a number of ranks that can."""
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads are not a multiple of {num_kv_heads} key/value heads")
    if num_q_heads % num_ranks:
        works = ", ".join(str(n) for n in range(1, num_q_heads + 1) if num_q_heads % n == 0)
        raise ValueError(
            f"exchange 'ulysses' deals {num_q_heads} query heads ({num_kv_heads} key/value heads) out to {num_ranks} "
            f"ranks, which cannot get equally many; {num_q_heads} heads go with {works} ranks. Let fewer ranks trade "
            f"heads, num_ranks=(outer, inner) with such an inner number, or take another exchange"
        )


def kv_heads_read(num_q_heads: int, num_kv_heads: int, num_ranks: int, rank: int) -> tuple[int, ...]:
    """The K/V head that each of the rank's query heads reads, ascending."""
    own = num_q_heads // num_ranks
    return tuple(head // (num_q_heads // num_kv_heads) for head in range(rank * own, (rank + 1) * own))


def kv_heads_held(num_q_heads: int, num_kv_heads: int, num_ranks: int, rank: int) -> int:
    """K/V heads that the rank computes with: those that its query heads read, equally many each, or one for each of
    its query heads where they cannot be grouped so.

    >>> [kv_heads_held(12, 4, 2, rank) for rank in range(2)], [kv_heads_held(24, 6, 8, rank) for rank in range(4)]
    ([2, 2], [1, 3, 2, 1])
    """
    read = kv_heads_read(num_q_heads, num_kv_heads, num_ranks, rank)
    readers = {read.count(head) for head in read}
    return len(set(read)) if len(readers) == 1 else len(read)


def kv_heads_of(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[int, tuple[int, ...]]:
    """How many K/V heads a rank receives, and the first one of each rank's window.

    Raises:
        ValueError: heads that do not go with this number of ranks, see `check_heads`.

    >>> kv_heads_of(32, 4, 8)
    (1, (0, 0, 1, 1, 2, 2, 3, 3))
    >>> kv_heads_of(12, 4, 6)
    (2, (0, 0, 1, 2, 2, 2))
    """
    check_heads(num_q_heads, num_kv_heads, num_ranks)
    read = [kv_heads_read(num_q_heads, num_kv_heads, num_ranks, rank) for rank in range(num_ranks)]
    count = max(heads[-1] + 1 - heads[0] for heads in read)
    return count, tuple(min(heads[0], num_kv_heads - count) for heads in read)
