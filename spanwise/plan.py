"""Plan: which rank holds which tokens, what each must fetch, and what that costs.

Planning is pure and global. `make_plan` computes every rank's part on the host from masks and numbers alone; no
process group is read, so it runs in a data-loader worker and gives the same plan everywhere. `plan.fingerprint`
proves it. The torch side, this rank's tensors, is built by `plan.local` (`spanwise.rank_plan`).

    mask -> balancer -> layout -> Plan -> plan.local(mesh, device) -> shard, exchange, kernels
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from spanwise import balancers, cost
from spanwise.layout import Layout, count_tokens, subtract_runs
from spanwise.mask import SpanMask

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from spanwise.rank_plan import RankPlan

EXCHANGES = ("all_gather", "needed")
_DESIGNED_EXCHANGES = ("ring", "ulysses")
_FORMAT = 1
# What "auto" compares. All of them move the same bytes under all_gather, so that the busiest rank decides; within this
# fraction the earlier, simpler layout is kept.
_AUTO_BALANCERS = ("contiguous", "head_tail", "lpt")
_AUTO_TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The part of every rank. Made by :func:`make_plan`; immutable, picklable, equal when fingerprints are equal.

    Attributes:
        masks: mask by name, all over the same tokens.
        layout: token runs of every rank.
        num_ranks: size of the cp axis.
        block_size: tile in tokens.
        balancer: what dealt out the tokens.
        exchange: how K/V travel.
        weights: layers that use each mask; what the layout balances.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: attention shape, or None if not given.
        dtype: name of the K/V dtype.
        itemsize: bytes of one K/V element.
        hardware: rates that `predict` uses.
        cu_seqlens: document offsets of each batch row, or None.
        reason: why this layout was chosen.
    """

    masks: dict[str, SpanMask]
    layout: Layout
    num_ranks: int
    block_size: int
    balancer: str
    exchange: str
    weights: dict[str, float]
    num_q_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    v_head_dim: int | None
    dtype: str
    itemsize: int
    hardware: cost.Hardware
    cu_seqlens: tuple[np.ndarray, ...] | None
    reason: str

    @property
    def seq_len(self) -> int:
        return self.layout.seq_len

    @property
    def batch_size(self) -> int:
        """Batch rows that the masks distinguish; 1 serves any batch. The layout has as many, or one for all."""
        return max(mask.batch_size for mask in self.masks.values())

    def mask(self, name: str = "default") -> SpanMask:
        """The mask called ``name``; ``ValueError`` lists the names there are."""
        if name not in self.masks:
            raise ValueError(f"the plan has no mask named {name!r}; it has {sorted(self.masks)}")
        return self.masks[name]

    def runs(self, rank: int, row: int = 0) -> np.ndarray:
        """Token runs of ``rank`` in batch row ``row``, int64 ``[n, 2]``. One layout row serves every batch row."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank must be in [0, {self.num_ranks}), got {rank}")
        return self.layout.runs(rank, row if self.layout.batch_size > 1 else 0)

    @functools.cached_property
    def causal(self) -> tuple[str, ...]:
        """Names of the masks that are the plain causal mask."""
        causal = SpanMask.causal(self.seq_len)
        return tuple(sorted(name for name, mask in self.masks.items() if mask == causal))

    # What the ranks do and receive.

    def work(self, mask: str = "default") -> np.ndarray:
        """Exact mask area of each rank, (query, key) pairs summed over batch rows; int64 ``[num_ranks]``."""
        area = self.mask(mask).area()
        before = np.zeros((area.shape[0], self.seq_len + 1), dtype=np.int64)
        np.cumsum(area, axis=1, out=before[:, 1:])
        work = np.zeros(self.num_ranks, dtype=np.int64)
        for row in range(self.batch_size):
            total = before[row if area.shape[0] > 1 else 0]
            for rank in range(self.num_ranks):
                runs = self.runs(rank, row)
                work[rank] += int((total[runs[:, 1]] - total[runs[:, 0]]).sum())
        return work

    def imbalance(self, mask: str = "default") -> float:
        """Largest over mean work of the ranks; 1.0 is perfect, and what an empty mask has."""
        work = self.work(mask)
        return float(work.max() / work.mean()) if work.any() else 1.0

    def needs(self, rank: int, mask: str = "default", row: int = 0) -> np.ndarray:
        """K/V runs that ``rank`` reads and does not own, int64 ``[n, 2]``, ascending, disjoint."""
        self.mask(mask)
        return self._needs[mask][row][rank]

    @functools.cached_property
    def _needs(self) -> dict[str, list[list[np.ndarray]]]:
        needs: dict[str, list[list[np.ndarray]]] = {}
        for name, mask in self.masks.items():
            needs[name] = []
            for row in range(self.batch_size):
                unbatched = mask.row(row if mask.batch_size > 1 else 0)
                runs = [self.runs(rank, row) for rank in range(self.num_ranks)]
                reads = unbatched.keys_read_many(runs)
                needs[name].append([subtract_runs(read, own) for read, own in zip(reads, runs, strict=True)])
        return needs

    def needed_tokens(self, mask: str = "default") -> np.ndarray:
        """K/V tokens that each rank reads and does not own, summed over batch rows; int64 ``[num_ranks]``.

        The least any exchange can move for this layout.
        """
        self.mask(mask)
        rows = self._needs[mask]
        return np.array([sum(count_tokens(row[rank]) for row in rows) for rank in range(self.num_ranks)], np.int64)

    def recv_tokens(self, mask: str = "default") -> np.ndarray:
        """K/V tokens that each rank receives in one forward, summed over batch rows; int64 ``[num_ranks]``.

        With the all_gather exchange that is every token of the other ranks, with "needed" those that it reads.
        """
        self.mask(mask)
        if self.exchange == "needed":
            return self.needed_tokens(mask)
        return self.batch_size * (self.seq_len - self.layout.tokens_per_rank)

    def recv_bytes(self, mask: str = "default") -> np.ndarray:
        """Bytes of K and V that each rank receives in one forward, int64; with all_gather padding included.

        Needs ``num_kv_heads`` and ``head_dim``.
        """
        self.mask(mask)
        self._require_shape("recv_bytes()")
        assert self.num_kv_heads is not None and self.head_dim is not None and self.v_head_dim is not None
        token = self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.itemsize
        if self.exchange == "needed":
            return self.needed_tokens(mask) * token
        padded = int(self.layout.tokens_per_rank.max())
        return np.full(self.num_ranks, self.batch_size * (self.num_ranks - 1) * padded * token, dtype=np.int64)

    def predict(self) -> dict[str, float]:
        """Predicted seconds of attention in one step (forward and backward), all masks by weight.

        Returns:
            ``compute_forward``, ``compute_backward`` (busiest rank), ``gather``, ``reduce_scatter`` (gradients travel
            in float32 at least) and ``total``, their sum: nothing is taken for hidden.
        """
        self._require_shape("predict()")
        assert self.num_q_heads is not None and self.head_dim is not None and self.v_head_dim is not None
        parts = dict.fromkeys(("compute_forward", "compute_backward", "gather", "reduce_scatter"), 0.0)
        for name, weight in self.weights.items():
            busiest = float(self.work(name).max())
            for part, backward in (("compute_forward", False), ("compute_backward", True)):
                flops = cost.attention_flops(
                    busiest, self.num_q_heads, self.head_dim, self.v_head_dim, backward=backward
                )
                parts[part] += weight * self.hardware.attention_seconds(flops, backward=backward)
            received = float(self.recv_bytes(name).max())
            shard = received / max(1, self.num_ranks - 1)
            parts["gather"] += weight * self.hardware.all_gather_seconds(shard, self.num_ranks)
            grad_shard = shard * max(self.itemsize, 4) / self.itemsize
            parts["reduce_scatter"] += weight * self.hardware.reduce_scatter_seconds(grad_shard, self.num_ranks)
        return {**parts, "total": sum(parts.values())}

    def _require_shape(self, what: str) -> None:
        missing = [n for n in ("num_q_heads", "num_kv_heads", "head_dim") if getattr(self, n) is None]
        if missing:
            raise ValueError(f"{what} needs {', '.join(missing)}: pass them to make_plan")

    # Identity, text, files.

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything that must agree across ranks."""
        digest = hashlib.blake2b(digest_size=16)
        header = {key: value for key, value in self._header().items() if key != "reason"}
        digest.update(json.dumps(header, sort_keys=True).encode())
        digest.update(self.layout.digest())
        for name in sorted(self.masks):
            digest.update(name.encode())
            digest.update(self.masks[name].digest())
        for cu in self.cu_seqlens or ():
            digest.update(np.ascontiguousarray(cu, dtype=np.int64).tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def _header(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "num_ranks": self.num_ranks,
            "block_size": self.block_size,
            "balancer": self.balancer,
            "exchange": self.exchange,
            "weights": self.weights,
            "num_q_heads": self.num_q_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "dtype": self.dtype,
            "itemsize": self.itemsize,
            "hardware": self.hardware.to_dict(),
            "reason": self.reason,
        }

    def explain(self) -> str:
        """Work, traffic, predicted time and the reason of the choice, as text for a person."""
        tokens = self.layout.tokens_per_rank
        lines = [
            f"{self.seq_len:,} tokens on {self.num_ranks} ranks: {tokens.min():,} to {tokens.max():,} tokens a rank",
            f"balancer {self.balancer}, exchange {self.exchange}, blocks of {self.block_size} tokens",
            f"why: {self.reason}",
        ]
        for name in self.masks:
            work, recv, needed = self.work(name), self.recv_tokens(name), self.needed_tokens(name)
            lines.append(
                f"mask {name!r} (weight {self.weights[name]:g}): work {work.mean():,.0f} pairs a rank, imbalance "
                f"{self.imbalance(name):.3f}; receives {recv.mean():,.0f} K/V tokens, reads {needed.mean():,.0f}"
            )
        if self.num_q_heads and self.num_kv_heads and self.head_dim:
            parts = ", ".join(f"{part} {seconds * 1e3:.3f} ms" for part, seconds in self.predict().items())
            lines.append(f"predicted on {self.hardware.name}: {parts}")
        lines.append(f"fingerprint {self.fingerprint}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"Plan(seq_len={self.seq_len}, num_ranks={self.num_ranks}, masks={sorted(self.masks)}, "
            f"balancer={self.balancer!r}, exchange={self.exchange!r}, fingerprint={self.fingerprint[:8]}…)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` (numpy's npz; no pickled code)."""
        arrays: dict[str, np.ndarray] = {}
        for i, name in enumerate(self.masks):
            arrays[f"mask{i}_start"], arrays[f"mask{i}_end"] = self.masks[name].start, self.masks[name].end
        for row in range(self.layout.batch_size):
            for rank in range(self.num_ranks):
                arrays[f"runs{row}_{rank}"] = self.layout.runs(rank, row)
        for row, cu in enumerate(self.cu_seqlens or ()):
            arrays[f"cu_seqlens{row}"] = cu
        header = self._header() | {
            "masks": list(self.masks),
            "kv_len": self.seq_len,
            "layout_rows": self.layout.batch_size,
            "cu_rows": len(self.cu_seqlens or ()),
            "fingerprint": self.fingerprint,
        }
        with open(path, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, header=np.array(json.dumps(header)), **arrays)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that :meth:`save` wrote; ``ValueError`` if the file is not one, or was altered."""
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as data:
                header = json.loads(str(data["header"]))
                if header["format"] != _FORMAT:
                    raise ValueError(
                        f"{os.fspath(path)} has plan format {header['format']}, this version reads {_FORMAT}"
                    )
                masks = {
                    name: SpanMask(data[f"mask{i}_start"], data[f"mask{i}_end"], header["kv_len"])
                    for i, name in enumerate(header["masks"])
                }
                ranks = range(header["num_ranks"])
                rows = [[data[f"runs{row}_{rank}"] for rank in ranks] for row in range(header["layout_rows"])]
                cu = tuple(data[f"cu_seqlens{row}"] for row in range(header["cu_rows"])) or None
            fields = {f.name for f in dataclasses.fields(Plan)}
            plain = {key: value for key, value in header.items() if key in fields - {"masks"}}
            plain["hardware"] = cost.Hardware.from_dict(header["hardware"])
            plan = Plan(masks=masks, layout=Layout.from_runs(rows, header["kv_len"]), cu_seqlens=cu, **plain)
        except FileNotFoundError:
            raise
        except (KeyError, OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{os.fspath(path)} is not a plan written by Plan.save: {error}") from error
        if plan.fingerprint != header["fingerprint"]:
            raise ValueError(
                f"{os.fspath(path)} was altered or damaged: its fingerprint is {header['fingerprint']}, "
                f"its contents give {plan.fingerprint}"
            )
        return plan

    def __getstate__(self) -> dict[str, Any]:
        # What is cached can be computed again, and a rank's tensors have no place in a message between processes.
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    # The torch side.

    @functools.cached_property
    def built(self) -> dict[Any, RankPlan]:
        """Rank plans that `local` has built from this object, so that each layer of a model gets the same one."""
        return {}

    def local(
        self, mesh: DeviceMesh | None, device: torch.device | str | None = None, *, kernel: str = "auto"
    ) -> RankPlan:
        """This rank's tensors, as a frozen pytree; see :func:`spanwise.rank_plan.local_plan`."""
        from spanwise import rank_plan

        return rank_plan.local_plan(self, mesh, device, kernel=kernel)

    def shard(self, x: Any, rank: int, dim: int = 1, *, batch_dim: int | None = 0) -> Any:
        """``rank``'s shard of ``x``, a tensor or a pytree of tensors, without a mesh; see :func:`spanwise.shard`."""
        from spanwise import batch

        return batch.shard_for_rank(self, rank, x, dim=dim, batch_dim=batch_dim)


def make_plan(
    mask: SpanMask | Mapping[str, Any] | Any,
    num_ranks: int,
    *,
    weights: Mapping[str, float] | None = None,
    balancer: str | balancers.LoadBalancer = "auto",
    exchange: str = "auto",
    block_size: int = 128,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    dtype: Any = "bfloat16",
    hardware: cost.Hardware | None = None,
    cu_seqlens: Any = None,
) -> Plan:
    """Plan context parallelism of one sequence length over ``num_ranks`` ranks. Pure: no process group is read.

    Args:
        mask: a :class:`SpanMask`, a FlexAttention ``BlockMask``, or masks by name that share one layout.
        num_ranks: size of the cp axis.
        weights: layers that use each named mask (default 1 each); what the layout balances.
        balancer: "contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local" (little K/V to read
            elsewhere under a bound on the imbalance; pair it with exchange="needed"), "auto" (the layout whose busiest
            rank has least work; the simplest within 2 %), or an object with ``assign(problem, num_ranks)``.
        exchange: "all_gather" (every rank gets all K/V), "needed" (every rank gets what its queries read), or "auto",
            which is "all_gather".
        block_size: tile in tokens that block-wise balancers deal out.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: attention shape; needed only to speak of bytes and seconds
            (``num_kv_heads`` defaults to ``num_q_heads``, ``v_head_dim`` to ``head_dim``).
        dtype: K/V dtype, a ``torch.dtype`` or its name.
        hardware: rates for :meth:`Plan.predict`.
        cu_seqlens: document offsets ``[num_docs + 1]``, or one such array per batch row; needed by
            "per_document_head_tail", and the default of :func:`spanwise.shard_batch`.

    Raises:
        ValueError: masks that differ in length or batch size or are not square, unknown names, bad numbers.
        NotImplementedError: an exchange or balancer that does not exist yet.
    """
    masks = _as_masks(mask)
    if exchange in _DESIGNED_EXCHANGES:
        raise NotImplementedError(f"exchange {exchange!r} does not exist yet; {list(EXCHANGES)} do")
    if exchange not in (*EXCHANGES, "auto"):
        raise ValueError(f"unknown exchange {exchange!r}; choose one of {[*EXCHANGES, 'auto']}")
    for name, value in (
        ("num_ranks", num_ranks),
        ("block_size", block_size),
        ("num_q_heads", num_q_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("v_head_dim", v_head_dim),
    ):
        if value is not None and (not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    num_q_heads, num_kv_heads, head_dim, v_head_dim = (
        None if value is None else int(value)
        for value in (num_q_heads, num_kv_heads or num_q_heads, head_dim, v_head_dim or head_dim)
    )
    if num_q_heads is not None and num_kv_heads is not None and num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads={num_q_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    problem = balancers.LayoutProblem(masks=masks, weights=weights, block_size=int(block_size), cu_seqlens=cu_seqlens)
    weight_of = {name: float(weight) for name, weight in (problem.weights or {}).items()}
    dtype_name, itemsize = _dtype(dtype)
    candidates = _AUTO_BALANCERS if isinstance(balancer, str) and balancer == "auto" else (balancer,)
    best: Plan | None = None
    busiest: dict[str, float] = {}
    for candidate in candidates:
        label = candidate if isinstance(candidate, str) else type(candidate).__name__
        plan = Plan(
            masks=masks,
            layout=balancers.assign_layout(candidate, problem, int(num_ranks)),
            num_ranks=int(num_ranks),
            block_size=int(block_size),
            balancer=label,
            exchange="all_gather" if exchange == "auto" else exchange,
            weights=weight_of,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype_name,
            itemsize=itemsize,
            hardware=hardware or cost.H100,
            cu_seqlens=problem.cu_seqlens_rows,
            reason="chosen by the caller",
        )
        if len(candidates) == 1:
            return plan
        total: np.ndarray = sum(weight_of[name] * plan.work(name) for name in masks)  # type: ignore[assignment]
        busiest[label] = float(total.max() / max(total.mean(), 1e-30))
        if best is None or busiest[label] < busiest[best.balancer] - _AUTO_TOLERANCE:
            best = plan
        if busiest[best.balancer] <= 1 + _AUTO_TOLERANCE:
            break
    assert best is not None
    tried = ", ".join(f"{label} {value:.3f}" for label, value in busiest.items())
    return dataclasses.replace(best, reason=f"imbalance of the candidates: {tried}")


def _as_masks(mask: Any) -> dict[str, SpanMask]:
    named = dict(mask) if isinstance(mask, Mapping) else {"default": mask}
    if not named:
        raise ValueError("make_plan needs at least one mask, got an empty mapping")
    masks: dict[str, SpanMask] = {}
    for name, value in named.items():
        if isinstance(value, SpanMask):
            masks[name] = value
        elif hasattr(value, "kv_num_blocks") and hasattr(value, "mask_mod"):
            masks[name] = SpanMask.from_block_mask(value)
        else:
            raise ValueError(
                f"mask {name!r} is a {type(value).__name__}; make_plan takes a SpanMask or a BlockMask. A dense "
                f"mask or a mask_mod becomes one with SpanMask.from_mask_mod"
            )
    return masks


def _dtype(dtype: Any) -> tuple[str, int]:
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
    name = str(dtype).removeprefix("torch.")
    if name not in sizes:
        raise ValueError(f"dtype must be one of {sorted(sizes)} or the torch dtype of that name, got {dtype!r}")
    return name, sizes[name]
