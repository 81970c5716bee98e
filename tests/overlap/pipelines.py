"""Steps of several microbatches as one graph: gradient accumulation under FSDP, and stages of a pipeline (1F1B).

Written out by hand, forward and backward, so that one function is traced without ranks and runs on real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from spanwise.overlap import _torch

OPS = torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a pipeline over ranks [0, stages × dp): rank = stage × dp + its place in dp.

    Attributes:
        each: whether every microbatch's gradients are reduced, as FSDP does without ``no_sync``; else their sum.
        batch: whether messages go through ``batch_p2p_ops``.
    """

    rank: int = 0
    stages: int = 1
    dp: int = 2
    microbatches: int = 4
    layers: int = 3
    dim: int = 8
    tokens: int = 4
    each: bool = True
    batch: bool = False

    @property
    def stage(self) -> int:
        return self.rank // self.dp

    def ranks(self, axis: str) -> list[int]:
        first = self.stage * self.dp
        if axis == "dp":
            return list(range(first, first + self.dp))
        return list(range(self.rank % self.dp, self.stages * self.dp, self.dp))

    def groups(self) -> dict[str, str]:
        """Names of this rank's groups; real ranks make all groups together."""
        found = {}
        for axis in ("dp", "pp")[: 1 + (self.stages > 1)]:
            every = {tuple(dataclasses.replace(self, rank=r).ranks(axis)) for r in range(self.stages * self.dp)}
            for ranks in sorted(every):
                if self.rank in ranks or not _torch.is_simulated(dist.group.WORLD):
                    group = dist.new_group(list(ranks))
                    found |= {axis: _torch.group_name(group)} if self.rank in ranks else {}
        return found

    def inputs(self) -> list[torch.Tensor]:
        """Microbatches, the same on all stages of a place in dp, and this rank's shards of its layers."""
        draw = torch.Generator().manual_seed(self.rank % self.dp)
        xs = [torch.randn(self.tokens, self.dim, generator=draw) for _ in range(self.microbatches)]
        draw = torch.Generator().manual_seed(1000 + self.rank)
        shape = self.dim // self.dp, self.dim
        return xs + [torch.randn(shape, generator=draw) / self.dim**0.5 for _ in range(self.layers)]

    def step(self, groups: dict[str, str], given: Sequence[torch.Tensor]) -> Any:
        """Outputs of the last stage, and gradients of the shards."""
        xs, shards = given[: self.microbatches], given[self.microbatches :]
        saved: dict[int, list[torch.Tensor]] = {}
        sums: list[Any] = [None] * self.layers
        sent: list[torch.Tensor] = []
        outputs = []

        def message(x: torch.Tensor, peer: int, *, send: bool) -> torch.Tensor:
            peer, name = self.stage + peer, groups["pp"]  # a rank of the group
            op = "isend" if send else "irecv"
            if self.batch:
                return OPS.batch_p2p_ops([op], [peer], [0], [x], name)[0]
            return getattr(OPS, op)(x, peer, 0, name)

        def gathered(layer: int) -> torch.Tensor:
            return OPS.wait_tensor(OPS.all_gather_into_tensor(shards[layer], self.dp, groups["dp"]))

        def reduced(grad: torch.Tensor) -> torch.Tensor:
            return OPS.wait_tensor(OPS.reduce_scatter_tensor(grad, "sum", self.dp, groups["dp"]))

        def forward(at: int) -> None:
            x = xs[at]
            if self.stage:
                x = OPS.wait_tensor(message(torch.zeros_like(x), -1, send=False))
            saved[at] = [x]
            for layer in range(self.layers):
                saved[at].append(torch.tanh(saved[at][-1] @ gathered(layer)))
            if self.stage + 1 < self.stages:
                sent.append(message(saved[at][-1], 1, send=True))
            else:
                outputs.append(saved[at][-1].square().sum())

        def backward(at: int) -> None:
            grad = saved[at][-1] * 2
            if self.stage + 1 < self.stages:
                grad = OPS.wait_tensor(message(torch.zeros_like(grad), 1, send=False))
            for layer in reversed(range(self.layers)):
                inner = grad * (1 - saved[at][layer + 1].square())
                new = saved[at][layer].t() @ inner
                new = reduced(new) if self.each else new
                sums[layer] = new if sums[layer] is None else sums[layer] + new
                grad = inner @ gathered(layer).t()
            if self.stage:
                sent.append(message(grad, -1, send=True))

        warm = min(self.stages - self.stage - 1, self.microbatches)
        for at in range(self.microbatches + warm):
            if at < self.microbatches:
                forward(at)
            if at >= warm:
                backward(at - warm)
        for x in sent:
            OPS.wait_tensor(x)
        return [*outputs, *(total if self.each else reduced(total) for total in sums)]

    def trace(self, groups: dict[str, str]) -> fx.GraphModule:
        return make_fx(lambda *given: self.step(groups, given), tracing_mode="fake")(*self.inputs())

    def traced(self) -> tuple[fx.GraphModule, dict[str, tuple[int, ...]]]:
        """The graph without ranks and tensors of any size, and the ranks of its groups."""
        dist.init_process_group("fake", rank=self.rank, world_size=self.stages * self.dp, store=_torch.fake_store())
        try:
            groups = self.groups()
            with _torch.fake_mode():
                gm = make_fx(lambda *given: self.step(groups, given))(*self.inputs())
        finally:
            dist.destroy_process_group()
        return gm, {groups[axis]: tuple(self.ranks(axis)) for axis in groups}
