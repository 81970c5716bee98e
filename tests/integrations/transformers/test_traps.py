"""Models and batches whose loss or gradients would be wrong on shards without an error: right, or refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers.documents import find_documents
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

DOCUMENTS = tiny.documents_of((23, 41))
BATCH = tiny.packed(DOCUMENTS)
IDS = {"input_ids": BATCH["input_ids"], "labels": BATCH["labels"]}


def _attach(model: Any) -> None:
    run_ranks(1, lambda rank, mesh: hf.context_parallel(model, mesh))


@pytest.mark.parametrize("head", ["SequenceClassification", "QuestionAnswering"])
def test_outputs_from_certain_tokens(head: str) -> None:
    model = getattr(transformers, f"AutoModelFor{head}").from_config(tiny.config_of("llama"))
    with pytest.raises(ValueError, match=f"LlamaFor{head} computes its output from certain tokens"):
        _attach(model)


def test_layers_that_are_skipped_at_random() -> None:
    with pytest.raises(ValueError, match="skips layers at random, by {'layerdrop': 0.5}"):
        _attach(tiny.model_of("opt", layerdrop=0.5))


def test_a_kind_of_layer_without_its_length() -> None:
    with pytest.raises(ValueError, match="layers of type 'sliding_attention' and sliding_window=None"):
        hf.make_plan(BATCH, tiny.config_of("gemma3", sliding_window=None), 2)
    with pytest.raises(ValueError, match="sliding_window=0; set sliding_window"):
        hf.make_plan(BATCH, tiny.config_of("mistral, sliding", sliding_window=0), 2)
    with pytest.raises(ValueError, match="attention_chunk_size=None"):
        hf.make_plan(BATCH, tiny.config_of("llama4", attention_chunk_size=None), 2)


def test_attention_that_was_set_back() -> None:
    models = tiny.copies(tiny.model_of("llama"), 2)

    def on_rank(rank: int, mesh: Any) -> None:
        hf.context_parallel(models[rank], mesh).set_attn_implementation("sdpa")
        models[rank](**BATCH)

    with pytest.raises(ValueError, match="set to 'sdpa' after hf.context_parallel"):
        run_ranks(2, on_rank)


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids", "pixels"])
def test_ranks_with_different_batches(name: str) -> None:
    """Equal documents, so that their plans are equal."""
    models = tiny.copies(tiny.model_of("llama"), 2)
    batch = {**BATCH, "pixels": torch.randn(3, 5)}

    def on_rank(rank: int, mesh: Any) -> None:
        mine = dict(batch)
        if rank == 1:
            mine[name] = mine[name] + 1 if name == "position_ids" else mine[name].flip(0).flip(1)
        hf.prepare(mine, hf.context_parallel(models[rank], mesh))

    with pytest.raises(ValueError, match="got different batches of equal lengths"):
        run_ranks(2, on_rank)


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_of_padding(side: str) -> None:
    model = tiny.model_of("llama")
    batch = tiny.padded(DOCUMENTS, side)
    with pytest.raises(ValueError, match="18 tokens of padding have labels"):
        run_ranks(1, lambda rank, mesh: hf.prepare(batch | {"labels": batch["input_ids"]}, _prepared(model, mesh)))


def _prepared(model: Any, mesh: Any) -> Any:
    return hf.context_parallel(copy.deepcopy(model), mesh)


def test_training_behind_a_cache() -> None:
    """As prefix tuning does: each rank would train on the whole batch."""
    model = tiny.model_of("llama")

    def on_rank(rank: int, mesh: Any) -> None:
        _prepared(model, mesh)(**BATCH, past_key_values=DynamicCache(config=model.config))

    with pytest.raises(ValueError, match="trains behind a KV cache, as with prefix tuning"):
        run_ranks(1, on_rank)


def test_a_loss_that_is_not_known() -> None:
    model = tiny.model_of("llama")
    model.loss_function = torch.nn.functional.cross_entropy
    with pytest.raises(ValueError, match="is neither that of causal language models nor that of token classification"):
        run_ranks(1, lambda rank, mesh: _prepared(model, mesh)(**BATCH))


def test_a_models_own_loss() -> None:
    """It gets labels that are shifted and cut, here to this rank's sum, whose mean over ranks is the loss."""
    model = tiny.model_of("llama")
    total = sum(len(d) - 1 for d in DOCUMENTS)

    def own(logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum") / total * 2

    models = tiny.copies(model, 2)

    def on_rank(rank: int, mesh: Any) -> Any:
        models[rank].loss_function = own
        return tiny.step(hf.context_parallel(models[rank], mesh, reduce_loss=False), BATCH)

    results = run_ranks(2, on_rank)
    mean = sum(loss for loss, _ in results) / 2
    tiny.check([(mean, gradients) for _, gradients in results], tiny.reference(model, DOCUMENTS))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generating_from_short_prompts(attention: str) -> None:
    """The masks of transformers are as small as the empty ones of planned batches."""
    model = tiny.model_of("llama", attention=attention).eval()
    ids, mask = torch.tensor([[5, 6]]), torch.tensor([[0, 1]])
    want = copy.deepcopy(model).generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)

    def on_rank(rank: int, mesh: Any) -> Any:
        prepared = _prepared(model, mesh)
        return prepared.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)

    assert torch.equal(run_ranks(1, on_rank)[0], want)


def test_a_model_is_pickled() -> None:
    model = tiny.model_of("llama")

    def on_rank(rank: int, mesh: Any) -> Any:
        file = io.BytesIO()
        torch.save(_prepared(model, mesh), file)
        file.seek(0)
        return tiny.step(torch.load(file, weights_only=False), BATCH)

    tiny.check(run_ranks(1, on_rank), tiny.reference(model, DOCUMENTS))


def test_tuples() -> None:
    """Auxiliary losses too."""
    name = "mixtral, auxiliary loss"
    models = tiny.copies(tiny.model_of(name), 2)

    def on_rank(rank: int, mesh: Any) -> Any:
        loss = hf.context_parallel(models[rank], mesh)(**BATCH, return_dict=False)[0]
        loss.backward()
        return loss.item(), tiny.gradients(models[rank])

    tiny.check(run_ranks(2, on_rank), tiny.reference(tiny.model_of(name), DOCUMENTS))


def test_an_auxiliary_loss_that_only_the_call_asks_for() -> None:
    name, asked = "mixtral, auxiliary loss", {"output_router_logits": True}
    models = tiny.copies(tiny.model_of(name, output_router_logits=False), 2)
    results = run_ranks(2, lambda rank, mesh: tiny.step(hf.context_parallel(models[rank], mesh), BATCH | asked))
    tiny.check(results, tiny.reference(tiny.model_of(name), DOCUMENTS))


@pytest.mark.parametrize("name", ["jamba", "granitemoehybrid"])
def test_an_auxiliary_loss_of_models_without_attention(name: str) -> None:
    """What tells their decoder the plan must not reach the auxiliary loss as a mask."""
    kinds: dict[str, Any] = dict(layer_types=["linear_attention"] * 2)
    if name == "jamba":
        kinds = dict(attn_layer_period=9, attn_layer_offset=8)
    model = tiny.model_of(name, output_router_logits=True, router_aux_loss_coef=0.1, **kinds)
    models = tiny.copies(model, 2)
    results = run_ranks(2, lambda rank, mesh: tiny.step(hf.context_parallel(models[rank], mesh), BATCH))
    tiny.check(results, tiny.reference(model, DOCUMENTS))


PADDING = 1


def _counts_from_padding(kind: str) -> Any:
    bert = {name: x for name, x in tiny.config_of("bert").to_dict().items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **bert | dict(pad_token_id=PADDING))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return tiny.randomized(transformers.AutoModelForCausalLM.from_config(config)).train()


@pytest.mark.parametrize(
    "kind",
    [
        "roberta",
        "camembert",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("xlm-roberta", "xlm-roberta-xl", "data2vec-text")),
        pytest.param("roberta-prelayernorm", marks=pytest.mark.slow),
    ],
)
def test_positions_that_start_behind_padding(kind: str) -> None:
    """Padding inside of a document does not count."""
    model, documents = _counts_from_padding(kind), tiny.documents_of((23, 41, 7))
    documents[1][[5, 6, 30]] = PADDING
    want = tiny.reference(model, documents)
    for batch in (tiny.packed(documents, "cu_seq_lens_q"), tiny.padded(documents, "left")):
        models = tiny.copies(model, 2)
        tiny.check(run_ranks(2, lambda rank, mesh, m=models, b=batch: tiny.step(_prepared(m[rank], mesh), b)), want)


def test_given_positions_that_start_behind_padding() -> None:
    """Taken as they are; those that count from 0, as collators make them, would be other embeddings."""
    model = _counts_from_padding("roberta")
    models = tiny.copies(model, 2)
    batch = BATCH | {"position_ids": BATCH["position_ids"] + PADDING + 1}
    results = run_ranks(2, lambda rank, mesh: tiny.step(hf.context_parallel(models[rank], mesh), batch))
    tiny.check(results, tiny.reference(model, DOCUMENTS))
    with pytest.raises(ValueError, match=r"position_ids of the model's tokens start at padding_idx \+ 1 = 2"):
        run_ranks(1, lambda rank, mesh: hf.prepare(BATCH, _prepared(model, mesh)))


def test_embeddings_as_input_where_positions_start_behind_padding() -> None:
    model = _counts_from_padding("roberta")
    want = tiny.reference(model, DOCUMENTS)
    models = tiny.copies(model, 2)

    def on_rank(rank: int, mesh: Any) -> Any:
        mine, batch = hf.context_parallel(models[rank], mesh), tiny.packed(DOCUMENTS, "cu_seq_lens_q")
        batch["inputs_embeds"] = mine.get_input_embeddings()(batch.pop("input_ids"))
        return tiny.step(mine, batch)

    tiny.check(run_ranks(2, on_rank), want)


@pytest.mark.parametrize("longer", [False, True], ids=["alone", "a longer batch before the backward"])
def test_a_checkpoint_around_a_model_whose_frequencies_depend_on_the_length(longer: bool) -> None:
    """transformers keeps the frequencies of the longest batch so far; recomputed ones differ as on one device."""
    model = tiny.model_of("llama, dynamic NTK")
    short, long = ({"input_ids": d[None], "labels": d[None], "use_cache": False} for d in tiny.documents_of((24, 60)))

    def step(model: Any) -> Any:
        loss = checkpoint(lambda: model(**short).loss, use_reentrant=False)
        if longer:
            model(**long)
        loss.backward()
        return loss.item(), tiny.gradients(model)

    models = tiny.copies(model, 2)
    results = run_ranks(2, lambda rank, mesh: step(hf.context_parallel(models[rank], mesh)))
    tiny.check(results, step(copy.deepcopy(model)))


@pytest.mark.parametrize("more", ["padding", "offsets"])
def test_contradicting_batches_in_evaluation(more: str) -> None:
    """What training refuses would run there as in plain transformers, where documents read each other."""
    positions = torch.tensor([[*range(30), *range(34)]])
    batch = IDS | {"position_ids": positions}
    batch |= {"attention_mask": positions.new_ones(1, 64)} if more == "padding" else {"cu_seq_lens_q": [0, 23, 64]}
    if more == "padding":
        batch["attention_mask"][:, -5:] = 0
    act = torch.no_grad()(lambda mine: mine(**batch))
    with pytest.raises(ValueError, match=r"packs several documents"):
        run_ranks(1, lambda rank, mesh: act(_prepared(tiny.model_of("llama").eval(), mesh)))


def test_positions_without_a_sign() -> None:
    """Differences of uint8 are never negative."""
    for many, mask in ((1, torch.ones(1, 5)), (3, None)):
        positions = torch.tensor([0, 1, 2, 0, 1], dtype=torch.uint8).expand(*(3,)[: many // 2], 1, 5)
        batch = {"input_ids": torch.zeros(1, 5), "position_ids": positions, "attention_mask": mask}
        assert find_documents(batch).cu_seqlens.tolist() == [0, 3, 5]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_classes_of_few_tokens(dtype: torch.dtype) -> None:
    """An added token has no label, and -100 is not of these types."""
    ids, labels = torch.tensor([[5, 6]]), torch.tensor([[1, 0]], dtype=dtype)
    config = tiny.config_of("llama", num_labels=2, classifier_dropout=0.0)
    model = transformers.AutoModelForTokenClassification.from_config(config).train()
    want = tiny.step(copy.deepcopy(model), {"input_ids": ids, "labels": labels.long()})
    models = tiny.copies(model, 3)
    batch = {"input_ids": ids, "labels": labels}
    tiny.check(run_ranks(3, lambda rank, mesh: tiny.step(hf.context_parallel(models[rank], mesh), batch)), want)


def test_another_number_for_ignored_labels() -> None:
    with pytest.raises(ValueError, match=r"ignored at -100, got ignore_index=7"):
        run_ranks(1, lambda rank, mesh: _prepared(tiny.model_of("mamba2"), mesh)(**IDS, ignore_index=7))
