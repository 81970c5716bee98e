"""Your own balancer: whole documents, longest first, each to the rank with the least work so far.

    torchrun --nproc-per-node 2 examples/own_balancer.py

No document is cut, so no rank reads K/V of another rank; the price is imbalance, and shards of different lengths.
"""

import numpy as np
import torch.distributed as dist

import spanwise


class WholeDocuments:
    """A `spanwise.LoadBalancer`: any object with `assign`. Deterministic, so that every rank gets the same layout."""

    def assign(self, problem: spanwise.LayoutProblem, num_ranks: int) -> spanwise.Layout:
        if problem.cu_seqlens_rows is None:
            raise ValueError("WholeDocuments needs make_plan(cu_seqlens=...)")
        (offsets,) = problem.cu_seqlens_rows
        if len(offsets) <= num_ranks:
            raise ValueError(f"{num_ranks} ranks need at least as many documents, got {len(offsets) - 1}")
        work = np.add.reduceat(problem.area[0], offsets[:-1])  # (query, key) pairs of each document
        load = np.zeros(num_ranks)
        runs = []
        for document in np.argsort(-work, kind="stable"):
            rank = int(load.argmin())
            load[rank] += work[document]
            runs.append((rank, offsets[document], offsets[document + 1]))
        return spanwise.Layout([np.array(runs)], num_ranks, problem.seq_len)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    cu_seqlens = np.array([0, 180, 560, 640, 1024])
    mask = spanwise.SpanMask.documents(cu_seqlens)
    for balancer in ("contiguous", "local", WholeDocuments()):
        plan = spanwise.make_plan(mask, mesh.size(), balancer=balancer, cu_seqlens=cu_seqlens, block_size=16)
        report = spanwise.verify(spanwise.context_parallel_attention, plan, mesh)  # outputs, gradients, leaks
        report.raise_if_failed()
        if mesh.get_rank() == 0:
            name = balancer if isinstance(balancer, str) else type(balancer).__name__
            print(f"{name}: imbalance {plan.imbalance():.2f}, tokens received {plan.recv_tokens().tolist()}, verified")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
