"""Graphs of training steps on fake ranks, for `overlap_zoo`: how a step is traced, and the table of families.

Everything is a fake tensor on the CPU: nothing is computed. Models are those of Hugging Face with the sizes of their
configurations and few layers. A parameter is gathered where a module reads it, as in torchtitan's SimpleFSDP.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parametrize

from spanwise.cli.overlap import plan_attention
from spanwise.hardware import H100
from spanwise.overlap import _torch
from spanwise.overlap.fx.capture import CaptureConfig, capture, recompute_gathers
from spanwise.overlap.fx.decoder import Axis, Moved, all_gather, all_reduce, gathered, reduce_scatter, scattered

BF16, INT = torch.bfloat16, torch.int64
OPS = _torch.functional_collectives
Axes = Mapping[str, Axis]
Traced = tuple[dict[str, fx.GraphModule], dict[str, Sequence[int]]]  # graphs of a step, ranks of their groups


def trace(
    make: Callable[[Axes], nn.Module], groups: Mapping[str, Sequence[int]], inputs: Mapping[str, Any],
    gathers: str = "dp", microbatches: int = 0, own: Sequence[str] = ("every", "dp", "replicas"),
) -> Traced:  # fmt: skip
    """The graphs of a training step, on a rank that is in all of its groups.

    Args:
        make: the module; its (first) output is the loss, or what it sends as a stage in the middle of a pipeline, "pp".
        groups: ranks by label; parameters are sharded over "dp", and their gradients summed over "replicas", too.
        inputs: dtypes and shapes. gathers: label of the group whose gathers the backward repeats.
        microbatches: their forwards, backwards and AdamW are one graph; 0: a forward and a backward are two graphs.
        own: a word in the names of other modules, and labels for their parameters in place of "dp" and "replicas".
    """
    rank, last = min(set.intersection(*map(set, groups.values()))), max(map(max, groups.values()))
    dist.init_process_group("fake", rank=rank, world_size=last + 1, store=_torch.fake_store())
    try:
        axes = {
            label: Axis(_torch.group_name(dist.new_group(list(ranks))), tuple(ranks), list(ranks).index(rank))
            for label, ranks in groups.items()
        }
        with _torch.fake_mode(), _torch.compiling():
            model = make(axes).train()
            _shard(model, axes, *own)
            state = dict(model.named_buffers()) | dict(model.named_parameters())

            def run(*given: torch.Tensor) -> tuple[torch.Tensor]:
                named = dict(zip([*inputs, *state], given, strict=True))
                y = torch.func.functional_call(model, named, (), {name: named.pop(name) for name in inputs})
                y = y if isinstance(y, torch.Tensor) else y[0]
                return (y if "pp" in axes else y.float().square().mean(),)

            batches = [[torch.empty(size, dtype=of) for of, size in inputs.values()] for _ in range(microbatches or 1)]
            if microbatches:
                moments = [[torch.empty_like(x.detach()) for x in model.parameters()] for _ in range(2)]
                graphs = {"step": make_fx(partial(_step, run, axes.get("pp")))(batches, list(state.values()), *moments)}
            else:
                joint = _torch.joint_graph(run, [*batches[0], *state.values()])
                recompute_gathers(joint, axes[gathers].name if gathers in axes else "")
                graphs = dict(zip(("forward", "backward"), _torch.partition(joint, 1), strict=True))
    finally:
        dist.destroy_process_group()
    for gm in graphs.values():
        _torch.drop_assertions(gm.graph)
        gm.graph.eliminate_dead_code()
    return graphs, ranks_of(axes)


def ranks_of(axes: Axes) -> dict[str, Sequence[int]]:
    return {axis.name: axis.ranks for axis in axes.values() if axis.name}


def _shard(model: nn.Module, axes: Axes, word: str, *own: str) -> None:
    """Make a model compute its parameters of flat shards."""
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            labels = own if word in prefix else ("dp", "replicas")
            made = _Parameter(parameter.shape, *(axes.get(label, Axis("", (0,), 0)) for label in labels))
            setattr(module, name, nn.Parameter(torch.empty(-(-parameter.numel() // made.shard.size))))
            parametrize.register_parametrization(module, name, made, unsafe=True)


class _Parameter(nn.Module):
    """A parameter in bfloat16, of its flat shard; gradients are averaged in float32."""

    def __init__(self, shape: torch.Size, shard: Axis, replicas: Axis) -> None:
        super().__init__()
        self.shape, self.shard, self.replicas = shape, shard, replicas

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        full = Moved.apply(x, self.shard, lambda x, axis: all_gather(x.to(BF16), axis), self._reduce)
        return full[: self.shape.numel()].view(self.shape)

    def _reduce(self, grad: torch.Tensor, shard: Axis) -> torch.Tensor:
        grad = reduce_scatter(grad.float(), shard)
        return all_reduce(grad, self.replicas) / (shard.size * self.replicas.size)


def _step(run: Callable[..., Any], pipe: Axis | None, batches: Any, state: Any, *moments: Any) -> Any:
    """All microbatches, one after the other, or with messages along a pipe in the order 1F1B; then AdamW."""

    def send(x: torch.Tensor, to: int) -> list[torch.Tensor]:
        return [OPS.isend(x.detach().contiguous(), pipe.index + to, 0, pipe.name)] if pipe else []

    def receive(x: torch.Tensor, by: int) -> torch.Tensor:
        found = OPS.irecv(torch.zeros_like(x), pipe.index + by, 0, pipe.name) if pipe else x
        return _torch.wait(found).requires_grad_() if pipe else x

    state = [x.detach().requires_grad_(x.requires_grad) for x in state]
    parameters, warm = [x for x in state if x.requires_grad], pipe.size - pipe.index - 1 if pipe else 0
    live, sent, sums = [], [], [0.0] * len(parameters)
    for at in range(len(batches) + warm):
        if at < len(batches):
            given = [receive(x, -1) for x in batches[at]]
            live.append((given, run(*given, *state)[0]))
            sent += send(live[-1][1], 1)
        if at >= warm:
            given, y = live[at - warm]
            grads = torch.autograd.grad(y, parameters + given if pipe else parameters, receive(torch.ones_like(y), 1))
            sent += send(grads[-1], -1)
            sums = [total + grad for total, grad in zip(sums, grads, strict=False)]
    updated = []
    for p, g, m, v in zip(parameters, sums, *moments, strict=True):
        m, v = m * 0.9 + g * 0.1, v * 0.999 + g * g * 0.001
        updated.append((p.detach() * 0.9999 - 1e-4 * m / (v.sqrt() + 1e-8), m, v))
    return [_torch.wait(x) for x in sent], updated


def _exchanged(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """All-to-all of dim 0, in both directions."""

    def move(x: torch.Tensor, axis: Axis) -> torch.Tensor:
        parts = [x.shape[0] // axis.size] * axis.size
        return _torch.wait(OPS.all_to_all_single.default(x.contiguous(), parts, parts, axis.name))

    return Moved.apply(x, axis, move, move)


def _huggingface(name: str, axes: Axes, **sizes: Any) -> nn.Module:
    """A model of transformers: its experts over "ep", its normalization over "norm"; over "pp" only its layers."""
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes))
    if "pp" in axes:
        model.embed_tokens = nn.Identity()
    for child, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            if "norm" in axes:
                module.forward = partial(_synchronized, module, axes["norm"])
        elif child.endswith("experts"):
            for weights in (module.gate_up_proj, module.down_proj):
                weights.data = weights.data[: len(weights) // axes["ep"].size]
            module.forward = partial(_expert_parallel, module, axes["ep"])
    return model


def _synchronized(norm: nn.BatchNorm2d, axis: Axis, x: torch.Tensor) -> torch.Tensor:
    """Batch normalization by the statistics of all ranks: their sum has little to hide behind."""
    sums = torch.stack([x.float().mean((0, 2, 3)), x.float().square().mean((0, 2, 3))])
    mean, square = (Moved.apply(sums, axis, all_reduce, all_reduce) / axis.size).unbind()
    scale = norm.weight * (square - mean.square() + norm.eps).rsqrt()
    scale, shift = (part.to(x.dtype).view(1, -1, 1, 1) for part in (scale, norm.bias - mean * scale))
    return x * scale + shift


def _expert_parallel(own: Any, ep: Axis, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts over ranks: tokens of fixed capacity travel to their experts and back."""
    slots, capacity = experts.flatten().argsort(), experts.numel() // own.num_experts
    rows = slots // experts.shape[1]
    sent = _exchanged(x[rows], ep).view(ep.size, -1, capacity, x.shape[1]).transpose(0, 1).flatten(1, 2)
    gate, up = (sent @ own.gate_up_proj.mT).chunk(2, -1)
    out = ((F.silu(gate) * up) @ own.down_proj.mT).unflatten(1, (ep.size, -1)).transpose(0, 1)
    back = _exchanged(out.flatten(0, 2), ep) * weights.flatten()[slots].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, rows, back.to(x.dtype))


class _DLRM(nn.Module):
    """Tables over ranks by an all-to-all, the multilayer perceptrons on every rank."""

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.axis, features = axes["replicas"], 1 + 8 * axes["replicas"].size
        self.tables = nn.ModuleList(nn.Embedding(100_000, 128) for _ in range(8))
        self.bottom, self.top = (
            nn.Sequential(*(part for i, o in itertools.pairwise(sizes) for part in (nn.Linear(i, o), nn.ReLU())))
            for sizes in ((13, 512, 256, 128), (128 + features * features, 4096, 4096, 2048, 1))
        )

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        found = [_exchanged(table(row), self.axis) for table, row in zip(self.tables, rows, strict=True)]
        x = self.bottom(dense)
        features = torch.stack([x, *(part for one in found for part in one.chunk(self.axis.size))], 1)
        return self.top(torch.cat([x, (features @ features.mT).flatten(1)], 1)).float().mean()


class _Random(nn.Module):
    """Branches of matrix products of random sizes, joined at times, with collectives of three groups between them."""

    def __init__(self, axes: Axes, seed: int) -> None:
        super().__init__()
        self.axes, self.seed = list(axes.values()), seed
        widths = random.Random(seed).choices([512, 2048, 8192], k=24 + 8 * seed)
        self.layers = nn.ModuleList(nn.Linear(2048, width, bias=False) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choose, branches = random.Random(self.seed), 4 + 2 * self.seed
        heads = [x * scale for scale in range(1, branches + 1)]
        for layer in self.layers:
            at, axis, w = choose.randrange(branches), choose.choice(self.axes), layer.weight
            h = scattered(gathered(heads[at], axis), axis) if choose.random() < 0.4 else heads[at]
            h = h + heads[choose.randrange(branches)] if choose.random() < 0.3 else h
            heads[at] = F.relu(h @ w.t()) @ w
        return reduce(torch.add, heads).float().square().mean()


def _decoder(exchange: str = "", **sizes: Any) -> Traced:
    """The decoder of `spanwise overlap`, with context parallelism by a plan."""
    config = CaptureConfig(**(LLAMA_8B | sizes), device="cpu")
    graphs = capture(config, plan_attention(config, H100, exchange) if exchange else None)
    return {"forward": graphs.forward, "backward": graphs.backward}, ranks_of(graphs.axes)


def _lm(name: str, groups: Any, batch: int, length: int, layers: int, **options: Any) -> Callable[[], Traced]:
    model = partial(_huggingface, name, num_hidden_layers=layers, use_cache=False, tie_word_embeddings=False)
    return partial(trace, model, groups, dict.fromkeys(("input_ids", "labels"), (INT, (batch, length))), **options)


LLAMA_8B = {"dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq_len": 8192}
_LLAMA, _GPT2, _QWEN, _HOSTS = "LlamaForCausalLM", "GPT2LMHeadModel", "Qwen3MoeForCausalLM", range(0, 64, 8)
_DIT = partial(_huggingface, "Qwen2_5OmniToken2WavDiTModel", num_hidden_layers=8)
_STAGE = partial(_huggingface, "LlamaModel", num_hidden_layers=2)
_RESNET = partial(_huggingface, "ResNetForImageClassification")
_IMAGES = {"pixel_values": (BF16, (64, 3, 224, 224)), "labels": (INT, (64,))}
_SPEECH = {"hidden_states": (BF16, (8, 1024, 80)), "condition_vector": (BF16, (8, 128, 80)), "time_step": (BF16, (8,)),
           "speaker_embedding": (BF16, (8, 1024, 192)), "quantized_code": (INT, (8, 512))}  # fmt: skip
_CLICKS, _MATRIX = {"dense": (BF16, (4096, 13)), "rows": (INT, (8, 4096 * 16))}, {"x": (BF16, (4096, 2048))}
_MANY = {"a": range(8), "b": _HOSTS, "dp": range(64)}
_EP, _PP = {"dp": range(32), "ep": range(8), "edp": range(0, 32, 8)}, {"dp": range(8, 16), "pp": range(0, 32, 8)}
FAMILIES: dict[str, Callable[[], Traced]] = {
    "llama, FSDP": _lm(_LLAMA, {"dp": range(64)}, 1, 8192, 6),
    "llama, ZeRO-2": _lm(_LLAMA, {"dp": range(16)}, 1, 4096, 6, gathers=""),
    "llama, HSDP": _lm(_LLAMA, {"dp": range(8), "replicas": _HOSTS}, 1, 4096, 6),
    "llama, whole step": _lm(_LLAMA, {"dp": range(32)}, 1, 4096, 3, microbatches=1),
    "llama, 2 microbatches": _lm(_LLAMA, {"dp": range(32)}, 1, 4096, 2, microbatches=2),
    "llama, pipeline": partial(trace, _STAGE, _PP, {"inputs_embeds": (BF16, (1, 4096, 4096))}, microbatches=4),
    "gemma2, FSDP": _lm("Gemma2ForCausalLM", {"dp": range(32)}, 1, 2048, 6),
    "gpt2, DDP": _lm(_GPT2, {"replicas": range(16)}, 8, 1024, 12),
    "gpt2, 8 microbatches": _lm(_GPT2, {"dp": range(16)}, 2, 1024, 4, microbatches=8),
    "qwen3 moe, EP": _lm(_QWEN, _EP, 1, 4096, 4, own=("experts", "", "edp")),
    "dit, FSDP": partial(trace, _DIT, {"dp": range(16)}, _SPEECH),
    "resnet50, FSDP": partial(trace, _RESNET, {"dp": range(16)}, _IMAGES),
    "resnet50, synchronized norm": partial(trace, _RESNET, {"dp": range(16), "norm": range(8)}, _IMAGES),
    "dlrm": partial(trace, _DLRM, {"replicas": range(16)}, _CLICKS, own=("tables", "", "")),
    **{f"random {seed}": partial(trace, partial(_Random, seed=seed), _MANY, _MATRIX) for seed in range(2)},
    "decoder, tp 8": partial(_decoder, layers=4, dp=8, tp=8, vocab=128_256),
    "decoder, cp 8": partial(_decoder, "needed", layers=3, dp=2, cp=8, seq_len=32_768),
    "decoder, cp 4, tp 4": partial(_decoder, "needed", layers=3, dp=2, cp=4, tp=4, seq_len=32_768),
    "decoder, ulysses": partial(_decoder, "ulysses", layers=4, dp=4, cp=8),
}
