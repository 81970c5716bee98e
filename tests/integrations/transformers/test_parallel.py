"""Hugging Face models under context parallelism and other parallelism, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.calls import mismatch
from tests.ranks.gloo import GlooPool

LENGTHS = (23, 41, 7, 30)


def _shard(model: Any, mesh: Any, **options: Any) -> None:
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _with_fsdp(rank: int, mesh: Any, name: str, batch: dict[str, Any], first: str) -> Any:
    model = tiny.model_of(name)
    if first == "fsdp":
        _shard(model, mesh)
    hf.context_parallel(model, mesh)
    if first == "cp":
        _shard(model, mesh)
    return tiny.step(model, batch)


@pytest.mark.parametrize("first", ["fsdp", "cp"])
@pytest.mark.parametrize(
    "name", ["gemma3", "qwen3_next", "deepseek_v32", pytest.param("mamba2", marks=pytest.mark.slow)]
)
def test_fsdp(gloo_pool: GlooPool, name: str, first: str) -> None:
    documents = tiny.documents_of(LENGTHS)
    results = gloo_pool.run(2, _with_fsdp, name, tiny.packed(documents), first)
    want = tiny.reference(tiny.model_of(name), documents)
    for result in results:  # FSDP2 has averaged
        tiny.check([result], want)


def _in_bfloat16(rank: int, mesh: Any, name: str, batch: dict[str, Any]) -> Any:
    model, ids = tiny.model_of(name), []
    hf.context_parallel(model, mesh)
    _shard(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for layer in model.base_model.layers:  # FSDP2 casts and copies what is in arguments
        layer.register_forward_pre_hook(lambda m, a, k: ids.append(id(k["spanwise_plan"])), with_kwargs=True)
    return tiny.step(model, batch), len(set(ids))


@pytest.mark.parametrize("kind", ["packed", "tree"])
def test_fsdp_in_bfloat16(gloo_pool: GlooPool, kind: str) -> None:
    """Parameters and activations are cast, and the plan and the weights of labels are not."""
    documents = tiny.documents_of(LENGTHS)
    batch = tiny.packed(documents)
    batch = hf.share_prefixes(batch) if kind == "tree" else batch
    want = tiny.reference(tiny.model_of("llama"), documents)
    for result, plans in gloo_pool.run(2, _in_bfloat16, "llama", batch):
        loss, gradient, name = tiny.errors(result, want)
        assert loss <= 2e-3 and gradient <= 5e-2, (loss, gradient, name)
        assert plans == 1


def _with_replicas(rank: int, mesh: Any, name: str, batches: list[dict[str, Any]]) -> Any:
    model = tiny.model_of(name)
    both = mesh["dp", "cp"]
    hf.context_parallel(model, mesh["cp"], loss_mesh=both)
    _shard(model, both._flatten())
    return tiny.step(model, batches[mesh["dp"].get_local_rank()])


def test_replicas_with_unequal_tokens(gloo_pool: GlooPool) -> None:
    documents = tiny.documents_of((50, 11, 16, 9, 4))
    batches = [tiny.packed(documents[:2]), tiny.packed(documents[2:])]
    results = gloo_pool.run(4, _with_replicas, "llama", batches, mesh_shape=(2, 2), mesh_dim_names=("dp", "cp"))
    want = tiny.reference(tiny.model_of("llama"), documents)
    for result in results:
        tiny.check([result], want)


_TENSOR_PARALLEL = {
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(use_local_output=False),
}


_BESIDE_STATES = {
    "model.layers.*.mamba.in_proj": ColwiseParallel(output_layouts=Replicate()),
    "model.layers.*.feed_forward.gate_proj": ColwiseParallel(),
    "model.layers.*.feed_forward.up_proj": ColwiseParallel(),
    "model.layers.*.feed_forward.down_proj": RowwiseParallel(),
}


def _with_tensor_parallelism(rank: int, mesh: Any, name: str, batch: dict[str, Any]) -> Any:
    model = tiny.model_of(name)
    parallelize_module(model, mesh["tp"], _TENSOR_PARALLEL | (_BESIDE_STATES if name == "falcon_h1" else {}))
    for layer in model.model.layers:
        if hasattr(getattr(layer, "self_attn", None), "sinks"):
            sinks = distribute_tensor(layer.self_attn.sinks.detach(), mesh["tp"], [Shard(0)])
            layer.self_attn.sinks = torch.nn.Parameter(sinks)
    hf.context_parallel(model, mesh["cp"])
    return tiny.step(model, batch)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_tensor_parallelism(gloo_pool: GlooPool, name: str) -> None:
    documents = tiny.documents_of(LENGTHS)
    mesh = dict(mesh_shape=(2, 2), mesh_dim_names=("cp", "tp"))
    results = gloo_pool.run(4, _with_tensor_parallelism, name, tiny.packed(documents), **mesh)
    want = tiny.reference(tiny.model_of(name), documents)
    for tp in range(2):
        tiny.check([results[tp], results[2 + tp]], want)


def _leaves_out_a_backward(rank: int, mesh: Any, batch: dict[str, Any]) -> str:
    model = hf.context_parallel(tiny.model_of("llama"), mesh)

    def steps() -> None:
        for number in range(4):
            loss = model(**batch).loss
            if not (rank == 1 and number == 2):
                loss.backward()

    return mismatch(steps)


def test_a_rank_that_leaves_out_a_backward(gloo_pool: GlooPool) -> None:
    """It goes on to the plan of the next batch, where the others are not."""
    for text in gloo_pool.run(2, _leaves_out_a_backward, tiny.packed(tiny.documents_of(LENGTHS))):
        assert "rank 0: backward of context_parallel_attention(" in text and "rank 1: plan.local()" in text, text


def _checkpointed(rank: int, mesh: Any, name: str, batch: dict[str, Any], reentrant: bool) -> Any:
    model = hf.context_parallel(tiny.model_of(name), mesh)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    other = tiny.packed(tiny.documents_of((12, 50), seed=5))
    loss = model(**batch).loss
    with torch.no_grad():
        model(**other)  # another batch before the recomputation of the first
    loss.backward()
    return loss.item(), tiny.gradients(model)


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        pytest.param(name, reentrant, marks=[] if (i % 2 == 0) == reentrant else pytest.mark.slow)
        for i, name in enumerate(["gemma3", "llama, dynamic NTK", "stablelm", "qwen3_next", "mamba", "hy_v4"])
        for reentrant in (True, False)
    ],
)
def test_checkpointing(gloo_pool: GlooPool, name: str, reentrant: bool) -> None:
    documents = tiny.documents_of((31, 31))
    results = gloo_pool.run(2, _checkpointed, name, tiny.packed(documents), reentrant)
    tiny.check(results, tiny.reference(tiny.model_of(name), documents))


def _with_ddp(rank: int, mesh: Any, batch: dict[str, Any]) -> Any:
    model = tiny.model_of("llama")
    result = tiny.step(DistributedDataParallel(hf.context_parallel(model, mesh)), batch)
    return result[0], {name.removeprefix("module."): x for name, x in result[1].items()}


def test_ddp(gloo_pool: GlooPool) -> None:
    documents = tiny.documents_of(LENGTHS)
    want = tiny.reference(tiny.model_of("llama"), documents)
    for result in gloo_pool.run(2, _with_ddp, tiny.packed(documents)):
        tiny.check([result], want)
