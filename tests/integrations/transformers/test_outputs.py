"""Outputs of a rank's tokens: they know their layout, and two models on one batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

import spanwise
from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers.outputs import of_layout
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

DOCUMENTS = tiny.documents_of((150, 11, 90))
BATCH = tiny.packed(DOCUMENTS)
UNLABELLED = {name: x for name, x in BATCH.items() if name != "labels"}


def _pair() -> tuple[Any, Any]:
    """A student of full attention and a teacher of windows, whose layouts differ."""
    return tiny.model_of("llama"), tiny.model_of("gemma3", seed=3, sliding_window=5)


def _divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return functional.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum")


def test_two_models_on_one_batch() -> None:
    student, teacher = _pair()
    alone, other = copy.deepcopy(student), copy.deepcopy(teacher)
    pairs = [(alone(input_ids=d[None]), other(input_ids=d[None], use_cache=False)) for d in DOCUMENTS]
    want = tiny.differentiated(alone, torch.stack([_divergence(x.logits, y.logits.detach()) for x, y in pairs]).sum())
    models = [(copy.deepcopy(student), copy.deepcopy(teacher)) for _ in range(2)]

    def on_rank(rank: int, mesh: Any) -> Any:
        mine = [hf.context_parallel(one, mesh, balancer="head_tail") for one in models[rank]]
        plan = hf.make_plan(UNLABELLED, teacher.config, 2)  # has masks for the layers of both
        for_student, for_teacher = (hf.prepare(UNLABELLED, one, plan) for one in mine)
        with torch.no_grad():
            wanted = mine[1](**for_teacher).logits
        part = _divergence(mine[0](**for_student).logits, wanted)
        _, gradients = tiny.differentiated(mine[0], part * 2)
        total = part.detach().clone()
        torch.distributed.all_reduce(total, group=mesh.get_group())
        return total.item(), gradients

    tiny.check(run_ranks(2, on_rank), want)


@pytest.mark.parametrize("act", [lambda x: x, lambda x: x[0], lambda x: x.topk(3).values.squeeze(0)])
def test_outputs_of_two_layouts(act: Any) -> None:
    pairs = [_pair() for _ in range(2)]

    def on_rank(rank: int, mesh: Any) -> Any:
        layouts = ("head_tail", "contiguous")
        mine = [hf.context_parallel(one, mesh, balancer=x) for one, x in zip(pairs[rank], layouts, strict=True)]
        return _divergence(*(act(one(**BATCH).logits) for one in mine))

    with pytest.raises(ValueError, match="hold other tokens on each rank.*hf.prepare"):
        run_ranks(2, on_rank)


def test_places_and_pools_in_the_outputs_of_a_rank() -> None:
    """Two rows on two ranks: a shard has as many tokens as a row, so that the batch's mask would fit."""
    model = transformers.AutoModel.from_config(tiny.config_of("llama")).train()
    batch = {"input_ids": torch.stack(tiny.documents_of((12, 12)))}

    def on_rank(rank: int, mesh: Any) -> None:
        out = hf.context_parallel(copy.deepcopy(model), mesh)(**batch, output_hidden_states=True)
        hidden = out.last_hidden_state
        places = (slice(None), -1), (slice(None), slice(-3, None)), (torch.tensor([0]), torch.tensor([5]))
        for index in (*places, (..., slice(None, -1), slice(None)), (0, 5), (None, slice(None), 0)):
            with pytest.raises(ValueError, match=r"names places in the sequence.*spanwise.unshard"):
                hidden[index]
        mask = torch.ones(2, 12, 1)
        for pool in (lambda: (hidden * mask).sum(1), lambda: mask * hidden, lambda: out.hidden_states[-1].mean(1)):
            with pytest.raises(ValueError, match=r"of a shard.*several places and rows.*spanwise.unshard"):
                pool()
        assert type(hidden[0, torch.arange(3)]) is torch.Tensor
        assert hidden[..., :4].shape == hidden[:, :, :4].shape == (1, hidden.shape[1], 4)
        assert type(hidden.as_subclass(torch.Tensor)[:, -1]) is type(copy.deepcopy(hidden.detach())) is torch.Tensor
        valid = torch.ones(hidden.shape[:2], dtype=torch.bool)
        assert hidden[valid].shape == hidden.shape[1:]
        hidden.sum().backward()

    run_ranks(2, on_rank)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.filterwarnings("ignore:.*(script_method. is deprecated|be instantiated):DeprecationWarning")  # of torch
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_functions_of_a_ranks_outputs(backend: str) -> None:
    torch._dynamo.reset()
    plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 20, 64]), 2)
    weight, labels = torch.randn(1, 32, 50, dtype=torch.float64), torch.arange(32)

    def ours(logits: torch.Tensor) -> torch.Tensor:
        scores = spanwise.token_logprobs(logits, labels[None], temperature=0.7)
        return spanwise.cross_entropy(logits, labels[None], None) + scores.sum()

    def loss(logits: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
        logits /= 3  # in place: gradients flow through what the caller has
        rest = torch.stack([logits, *more]).sum(0)[:, :, :40] * 2 + logits.mean(-1, keepdim=True)
        return functional.cross_entropy(rest.flatten(0, 1), labels) + logits[:, -1].square().sum() + ours(logits)

    results = []
    for function in (loss, torch.compile(loss, backend=backend, fullgraph=True)):
        leaf = weight.clone().requires_grad_()
        logits, more = (of_layout(leaf * x, plan.layout) if x else leaf.sin() for x in (1, 0))
        given = logits.as_subclass(torch.Tensor) if function is loss else logits
        value = function(given, [more])
        value.backward()
        results.append((value.detach(), leaf.grad, logits.detach().as_subclass(torch.Tensor)))
        assert type(value) is torch.Tensor
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want)
