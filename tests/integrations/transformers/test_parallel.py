"""Hugging Face models under context parallelism beside what else users put around a model: on processes, but PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

DOCUMENTS, EQUAL = tiny.documents_of((23, 41, 7, 30)), tiny.documents_of((31, 31))
OTHER = tiny.packed(tiny.documents_of((12, 50), seed=5))
TENSOR_PARALLEL: dict[str, Any] = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
TENSOR_PARALLEL |= {"model.layers.*.self_attn.o_proj": RowwiseParallel()}
TENSOR_PARALLEL |= {"lm_head": ColwiseParallel(use_local_output=False)}
BESIDE_STATES: dict[str, Any] = {
    "model.layers.*.mamba.in_proj": ColwiseParallel(output_layouts=Replicate()),
    "model.layers.*.feed_forward.gate_proj": ColwiseParallel(),
    "model.layers.*.feed_forward.up_proj": ColwiseParallel(),
    "model.layers.*.feed_forward.down_proj": RowwiseParallel(),
}


def _shard(model: Any, mesh: Any, **options: Any) -> None:
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _step(rank: int, mesh: Any, name: str, how: str, batch: Any) -> Any:
    model, cp = tiny.model_of(name), mesh["cp"]
    if how == "fsdp, cp":
        _shard(model, mesh)
    if how == "replicas":
        both, batch = mesh["dp", "cp"], batch[mesh["dp"].get_local_rank()]
        hf.context_parallel(model, cp, loss_mesh=both)
        _shard(model, both._flatten())
        return tiny.step(model, batch)
    if how == "tensors":
        parallelize_module(model, mesh["tp"], TENSOR_PARALLEL | (BESIDE_STATES if name == "falcon_h1" else {}))
        for layer in model.model.layers:
            if hasattr(getattr(layer, "self_attn", None), "sinks"):
                sinks = distribute_tensor(layer.self_attn.sinks.detach(), mesh["tp"], [Shard(0)])
                layer.self_attn.sinks = torch.nn.Parameter(sinks)
    hf.context_parallel(model, cp)
    if how == "cp, fsdp":
        _shard(model, mesh)
    if how == "ddp":
        loss, gradients = tiny.step(DistributedDataParallel(model), batch)
        return loss, {n.removeprefix("module."): x for n, x in gradients.items()}
    if how in CHECKPOINTS:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        loss = model(**batch).loss
        with torch.no_grad():
            model(**OTHER)  # another batch before the recomputation of the first
        return tiny.differentiated(model, loss)
    return tiny.step(model, batch)


CHECKPOINTS = ("reentrant", "checkpointed")
CHECKPOINTED = ["gemma3", "llama, dynamic NTK", "stablelm", "qwen3_next", "mamba", "hy_v4"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gemma3", "fsdp, cp"), ("qwen3_next", "cp, fsdp"), ("deepseek_v32", "fsdp, cp"), ("mamba2", "cp, fsdp"),
        ("llama", "ddp"), ("llama", "replicas"), ("llama", "tensors"), ("gpt_oss", "tensors"),
        pytest.param("falcon_h1", "tensors", marks=pytest.mark.slow),
        *((name, CHECKPOINTS[i % 2]) for i, name in enumerate(CHECKPOINTED)),
        *(pytest.param(name, CHECKPOINTS[1 - i % 2], marks=pytest.mark.slow) for i, name in enumerate(CHECKPOINTED)),
    ],
)  # fmt: skip
def test_parallelism(gloo_pool: GlooPool, name: str, how: str) -> None:
    """Ranks that average gradients have the whole ones; replicas have unequal numbers of tokens."""
    documents = EQUAL if how in CHECKPOINTS else DOCUMENTS
    batch: Any = tiny.packed(documents)
    if how == "replicas":
        batch = [tiny.packed(DOCUMENTS[:1]), tiny.packed(DOCUMENTS[1:])]
    axes = {"replicas": ("dp", "cp"), "tensors": ("cp", "tp")}.get(how, ("cp",))
    ranks = 2 ** len(axes)
    results = gloo_pool.run(ranks, _step, name, how, batch, mesh_shape=(2,) * len(axes), mesh_dim_names=axes)
    want = tiny.reference(tiny.model_of(name), documents)
    own = [results] if how in CHECKPOINTS else [[result] for result in results]
    for alike in (results[::2], results[1::2]) if how == "tensors" else own:
        tiny.check(alike, want)


def _in_bfloat16(rank: int, mesh: Any, batch: dict[str, Any]) -> Any:
    model, ids = tiny.model_of("llama"), []
    hf.context_parallel(model, mesh)
    _shard(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for layer in model.base_model.layers:  # FSDP2 casts and copies what is in arguments
        layer.register_forward_pre_hook(lambda m, a, k: ids.append(id(k["spanwise_plan"])), with_kwargs=True)
    return tiny.step(model, batch), len(set(ids))


def test_fsdp_in_bfloat16(gloo_pool: GlooPool) -> None:
    """Parameters and activations are cast, and the plan and the weights of labels of a tree are not."""
    want = tiny.reference(tiny.model_of("llama"), DOCUMENTS)
    for result, plans in gloo_pool.run(2, _in_bfloat16, tiny.as_tree(DOCUMENTS, DOCUMENTS)):
        loss, gradient, name = tiny.errors(result, want)
        assert loss <= 2e-3 and gradient <= 5e-2, (loss, gradient, name)
        assert plans == 1


def _with_experts(rank: int, mesh: Any, folder: Path, batch: dict[str, Any]) -> Any:
    config = DistributedConfig(fsdp_size=mesh.size(), ep_size=mesh.size())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32).train()
    experts = model.model.layers[-1].mlp.experts
    hf.context_parallel(model, mesh)
    return experts.num_experts, tiny.step(model, batch)


@pytest.mark.parametrize("name", ["mixtral, auxiliary loss", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_experts_on_the_cp_mesh(gloo_pool: GlooPool, tmp_path: Path, name: str) -> None:
    """By transformers' own expert parallelism."""
    model = tiny.model_of(name)
    model.save_pretrained(tmp_path)
    want = tiny.reference(model, DOCUMENTS)
    for experts, result in gloo_pool.run(4, _with_experts, tmp_path, tiny.packed(DOCUMENTS)):
        assert experts == 1  # of four
        tiny.check([result], want)


PACKINGS = [
    tiny.documents_of(n, seed=i) for i, n in enumerate([(31, 20, 40), (12, 50, 30), (70, 9, 18, 33), (20,) * 5])
]


def _compiled(rank: int, mesh: Any, name: str, how: str) -> Any:
    """Steps of a model whose layers are compiled, also with states in another layout, or of a compiled model."""
    torch._dynamo.reset()  # processes are reused
    model = hf.context_parallel(tiny.model_of(name), mesh)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True) if how == "whole" else model
    for layer in model.base_model.layers if how != "whole" else ():
        layer.compile(backend=counter, fullgraph=True)
    results, graphs = [], []
    for batch in (tiny.packed(d) for d in PACKINGS):
        model.zero_grad()
        if how == "relaid":
            plan = hf.make_plan(batch, model.config, mesh.size(), balancer="head_tail", block_size=4)
            batch = hf.prepare(batch, model, plan.replace(relayout=True))
        loss = run(**(hf.prepare(batch, model) if how == "whole" else batch)).loss
        loss.backward()
        results.append((loss.item(), tiny.gradients(model)))
        graphs.append(counter.frame_count)
    return results, graphs


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how", "kinds"),  # of layers, where they are counted
    [
        ("gemma3", "layers", 2), ("qwen3_next", "layers", 2), ("minicpm3", "layers", 1), ("gemma3", "whole", 1),
        ("mamba", "whole", 1), ("jamba", "whole", 1), ("qwen3_next", "relaid", 0),
    ],
)  # fmt: skip
def test_compiled(gloo_pool: GlooPool, name: str, how: str, kinds: int) -> None:
    """Exact for any packing: a graph a kind, once more when the shard's length changes, and never again."""
    results = gloo_pool.run(2, _compiled, name, how)
    for index, documents in enumerate(PACKINGS):
        tiny.check([result[0][index] for result in results], tiny.reference(tiny.model_of(name), documents))
    for _, graphs in results:
        assert not kinds or (graphs[0] == kinds and graphs[2] == graphs[3] == 2 * kinds)


# --- adapters of PEFT ------------------------------------------------------------------------------------------------


def _adapted(model: Any, kind: Any = peft.LoraConfig, **options: Any) -> Any:
    torch.manual_seed(3)
    if kind is peft.LoraConfig:
        options = dict(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]) | options
        options |= dict(r=4, init_lora_weights=False)
    return peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **options)).train()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads what transformers deprecates
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama", None), ("qwen3_next", "q_proj in_proj_qkvz in_proj_ba out_proj"), ("falcon_h1", "q_proj in_proj"),
        ("mamba2", "in_proj"), ("mamba", "in_proj x_proj"),
    ],
)  # fmt: skip
def test_lora(name: str, modules: str | None) -> None:
    """Adapters around a model before `context_parallel`; of a Llama also after it, and in its base model."""
    plain, options = tiny.model_of(name), dict(target_modules=modules.split(), modules_to_save=None) if modules else {}
    model, batch = _adapted(copy.deepcopy(plain), **options), tiny.packed(DOCUMENTS)
    # The same modules without PEFT's wrapper: its base model holds the adapters.
    loss, gradients = tiny.reference(copy.deepcopy(model).get_base_model(), DOCUMENTS)
    want = loss, {f"base_model.model.{n}": x for n, x in gradients.items()}
    tiny.check(tiny.train(model, batch), want)
    if modules is not None:
        return

    def on_rank(rank: int, mesh: Any) -> Any:
        hf.context_parallel(model.get_base_model(), mesh)
        return tiny.step(model, batch), tiny.step(_adapted(hf.context_parallel(plain, mesh)), batch)

    for result in run_ranks(1, on_rank)[0]:  # one rank: threads draw from one generator
        tiny.check([result], want)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_virtual_tokens() -> None:
    """The prompt stands before the padding of a row, so documents are padded on the right; prefixes are refused."""
    model, prefixed = (
        _adapted(tiny.model_of("llama"), kind, num_virtual_tokens=4)
        for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig)
    )
    batch = tiny.padded(DOCUMENTS, "right")
    tiny.check(tiny.train(model, batch), tiny.step(copy.deepcopy(model), batch))
    with pytest.raises(ValueError, match="as with prefix tuning"):
        tiny.train(prefixed, batch, 1)
