"""What context parallelism of Hugging Face models refuses, with a text that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertModel, FNetModel, LlamaForCausalLM

import spanwise
from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

DOCUMENTS = tiny.documents_of((23, 41))
BATCH = tiny.packed(DOCUMENTS)
SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=160)


def _attach(config: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    run_ranks(1, lambda rank, mesh: hf.context_parallel(model, mesh))


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        ("bloom", dict(hidden_size=64, n_layer=2, n_head=4), "takes no position_ids"),
        ("gptj", dict(n_embd=64, n_layer=2, n_head=4, rotary_dim=8), "AttentionInterface"),
        ("rwkv", dict(hidden_size=64, num_hidden_layers=2, attention_hidden_size=64), "RwkvSelfAtt.* carries a state"),
        ("inkling_text", SMALL, "layers of type .*hybrid_sliding"),
        ("deepseek_v32", {}, "layers of type .*indexed_attention"),
        ("bart", dict(d_model=64, decoder_layers=1, encoder_layers=1), "encoder|position_ids"),
        ("xmod", SMALL | dict(is_decoder=True), "counts positions by a rule of its own"),
        ("neomme", {}, "layers of NeoMMEConfig differ in sliding_window"),
        ("perceiver", {}, "tells neither layer_types nor num_hidden_layers"),
    ],
)
def test_models(kind: str, values: dict[str, Any], text: str) -> None:
    if kind in ("deepseek_v32", "neomme", "perceiver"):
        with pytest.raises(ValueError, match=text):
            hf.make_plan(BATCH, AutoConfig.for_model(kind), 2)
        return
    with pytest.raises(ValueError, match=text):
        _attach(AutoConfig.for_model(kind, **values))


def test_poolers_and_layers_that_mix_all_tokens() -> None:
    bert, fnet = tiny.config_of("bert"), AutoConfig.for_model("fnet", hidden_size=64, num_hidden_layers=2)
    for model, text in (
        (BertModel(bert), "the pooler of BertModel reads the first token"),
        (FNetModel(fnet, add_pooling_layer=False), "FNetFourierTransform"),
    ):
        with pytest.raises(ValueError, match=text):
            run_ranks(1, lambda rank, mesh, model=model: hf.context_parallel(model, mesh))
    run_ranks(1, lambda rank, mesh: hf.context_parallel(BertModel(bert, add_pooling_layer=False), mesh))


class WithoutKeywords(LlamaForCausalLM):
    """A model that keeps keyword arguments for itself."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids)


def test_a_decoder_that_gets_no_plan() -> None:
    model = WithoutKeywords(tiny.config_of("llama")).eval()

    @torch.no_grad()
    def on_rank(rank: int, mesh: Any) -> None:
        model(**hf.prepare({"input_ids": BATCH["input_ids"]}, hf.context_parallel(model, mesh)))

    with pytest.raises(ValueError, match="WithoutKeywords does not pass the plan on to its decoder"):
        run_ranks(1, on_rank)


def test_what_is_no_model() -> None:
    with pytest.raises(ValueError, match="takes a model of transformers, got Linear; call it before"):
        run_ranks(1, lambda rank, mesh: hf.context_parallel(torch.nn.Linear(2, 2), mesh))


def test_twice() -> None:
    model = tiny.model_of("llama")

    def on_rank(rank: int, mesh: Any) -> None:
        hf.context_parallel(hf.context_parallel(model, mesh), mesh)

    with pytest.raises(ValueError, match="under context parallelism already"):
        run_ranks(1, on_rank)


def _call(name: str, batch: dict[str, Any], ranks: int = 2, **changes: Any) -> None:
    models = tiny.copies(tiny.model_of(name, **changes), ranks)
    run_ranks(ranks, lambda rank, mesh: hf.context_parallel(models[rank], mesh)(**batch))


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"labels": BATCH["labels"]}, "needs input_ids or inputs_embeds"),
        (
            BATCH | {"attention_mask": (torch.arange(64) > 0).long()[None]},
            "start anew in a padded row.*token 23 of row 0",
        ),
        ({"input_ids": BATCH["input_ids"], "attention_mask": torch.ones(1, 1, 64, 64)}, r"\[B, S\] = \(1, 64\)"),
        ({"input_ids": BATCH["input_ids"], "attention_mask": 2 * torch.ones(1, 64)}, "must hold 0 and 1"),
        ({"input_ids": BATCH["input_ids"], "attention_mask": torch.zeros(1, 64)}, "must hold 0 and 1, and a token"),
        (BATCH | {"cu_seq_lens_q": torch.tensor([0, 70])}, "ascend from 0 to all 64 tokens"),
        (
            {"input_ids": BATCH["input_ids"].view(2, 32), "cu_seq_lens_q": torch.tensor([0, 23, 64])},
            "all 64 tokens by each row's start",
        ),
        (BATCH | {"position_ids": torch.arange(63)[None]}, r"\[B, S\] = \(1, 64\).*got shape \(1, 63\)"),
        (BATCH | {"labels": BATCH["labels"][:, 1:]}, r"labels must be \[B, S\]"),
        (BATCH | {"use_cache": True}, "use_cache=False"),
        (BATCH | {"logits_to_keep": 1}, "logits_to_keep"),
        (BATCH | {"output_attentions": True}, "makes no attention weights"),
        (
            BATCH | {"position_ids": 2 * torch.arange(64)[None]},
            "skip numbers, where a document may.*token 1 of row 0",
        ),
        (BATCH | {"seq_idx": torch.arange(64)[None] // 32}, "seq_idx changes where no document.*token 32 of row 0"),
        (BATCH | {"seq_idx": torch.zeros(64)}, r"seq_idx must be \[B, S\] = \(1, 64\), got shape \(64,\)"),
        ({name: x.tolist() for name, x in BATCH.items()}, "input_ids must be a tensor, got a list; collate the batch"),
        (BATCH | {"labels": BATCH["labels"].numpy()}, "labels must be a tensor, got a ndarray"),
        (BATCH | {"cu_seq_lens_k": torch.tensor([0, 64])}, "cu_seq_lens_k is not cu_seq_lens_q"),
        (
            BATCH | {"pixel_values": torch.randn(1, 3, 28, 28)},
            "LlamaForCausalLM gets pixel_values of shape .*merge it into",
        ),
        (BATCH | {"text": ["a", "b"]}, r"passes \['text'\] to its attention.* leave out of the batch"),
        ({"input_ids": BATCH["input_ids"], "attention_mask": {"full_attention": None}}, "got a dict"),
    ],
)
def test_batches(batch: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _call("llama", batch)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_cross_attention(name: str) -> None:
    """GPT-2 gives its cross attention neither the plan nor a mask; states as long as the batch would be cut."""
    batch = BATCH | {"encoder_hidden_states": torch.randn(1, 64, 64)}
    with pytest.raises(ValueError, match="encoder_hidden_states does not go with .* reads it by cross attention"):
        _call(name, batch, add_cross_attention=True)


def test_padding_between_tokens() -> None:
    mask = torch.ones(1, 64, dtype=torch.long)
    mask[0, 30] = 0
    with pytest.raises(ValueError, match="padding between tokens of a row.*token 31 of row 0"):
        _call("llama", {"input_ids": BATCH["input_ids"], "attention_mask": mask})


def test_blocks_longer_than_the_batch() -> None:
    class First:
        def assign(self, problem: Any, num_ranks: int) -> list[int]:
            return [0] * problem.num_blocks

    models = tiny.copies(tiny.model_of("llama"), 2)
    with pytest.raises(ValueError, match="a token on every rank"):
        run_ranks(2, lambda rank, mesh: hf.context_parallel(models[rank], mesh, balancer=First())(**BATCH))


def test_as_many_tokens_as_ranks() -> None:
    documents = tiny.documents_of((2, 1))
    model = tiny.model_of("llama")
    models = tiny.copies(model, 3)
    results = run_ranks(
        3, lambda rank, mesh: tiny.step(hf.context_parallel(models[rank], mesh), tiny.packed(documents))
    )
    tiny.check(results, tiny.reference(model, documents))


def test_attention_dropout() -> None:
    with pytest.raises(ValueError, match="no attention dropout"):
        _call("llama", BATCH, attention_dropout=0.1)


def test_a_mask_that_the_config_does_not_tell() -> None:
    models = tiny.copies(tiny.model_of("gemma3"), 2)

    def on_rank(rank: int, mesh: Any) -> None:
        hf.context_parallel(models[rank], mesh)
        models[rank].config.layer_types = ["full_attention"] * 3  # after the plan's layers were read
        models[rank](**BATCH)

    with pytest.raises(ValueError, match="asks for attention of full_attention"):
        run_ranks(2, on_rank)


def test_a_decoder_called_without_its_model() -> None:
    model = tiny.model_of("llama")
    with pytest.raises(ValueError, match="called without the model around it"):
        run_ranks(1, lambda rank, mesh: hf.context_parallel(model, mesh).model(input_ids=BATCH["input_ids"]))


class WithZLoss(LlamaForCausalLM):
    """A model that adds a mean over its tokens to its loss, in place or not."""

    in_place = False

    def forward(self, **kwargs: Any) -> Any:
        out = super().forward(**kwargs)
        term = 0.01 * out.logits.logsumexp(-1).pow(2).mean()
        if self.in_place:
            out.loss += term
        else:
            out.loss = out.loss + term
        return out


@pytest.mark.parametrize("in_place", [False, True])
def test_a_term_added_to_the_loss(in_place: bool) -> None:
    models = tiny.copies(WithZLoss(tiny.config_of("llama")).train(), 2)

    def on_rank(rank: int, mesh: Any) -> None:
        models[rank].in_place = in_place
        hf.context_parallel(models[rank], mesh)(**BATCH)

    with pytest.raises(ValueError, match="WithZLoss adds a term to its loss"):
        run_ranks(2, on_rank)


def test_a_loss_function_replaced_later() -> None:
    model = tiny.model_of("llama")

    def on_rank(rank: int, mesh: Any) -> None:
        hf.context_parallel(model, mesh)
        del model._loss_function
        model(**BATCH)

    with pytest.raises(ValueError, match="replaced after hf.context_parallel"):
        run_ranks(1, on_rank)


def test_a_plan_of_another_batch() -> None:
    models = tiny.copies(tiny.model_of("llama"), 2)
    others = (tiny.documents_of((23, 40)), tiny.documents_of((24, 40)))

    def on_rank(rank: int, mesh: Any, other: tiny.Documents) -> None:
        model = hf.context_parallel(models[rank], mesh)
        hf.prepare(BATCH, model, hf.make_plan(tiny.packed(other), model.config, 2))

    with pytest.raises(ValueError, match="for 63 tokens on 2 ranks; the batch has 64"):
        run_ranks(2, on_rank, others[0])
    models = tiny.copies(tiny.model_of("llama"), 2)
    with pytest.raises(ValueError, match="documents start at"):
        run_ranks(2, on_rank, others[1])


def test_a_plan_without_the_models_masks() -> None:
    models = tiny.copies(tiny.model_of("llama"), 2)
    plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 23, 64]), 2, cu_seqlens=[0, 23, 64])

    def on_rank(rank: int, mesh: Any) -> None:
        hf.prepare(BATCH, hf.context_parallel(models[rank], mesh), plan)

    with pytest.raises(ValueError, match="full_attention"):
        run_ranks(2, on_rank)
