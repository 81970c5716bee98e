"""Losses and labels: shifted inside documents, cut, divided by the labels of all ranks; in trees by the edges."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

import spanwise
from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers.inputs import site_of
from tests.integrations.transformers import tiny

LENGTHS = (23, 41, 7, 30)
DOCUMENTS = tiny.documents_of(LENGTHS)
BATCH = tiny.packed(DOCUMENTS)
NONE = {"labels": torch.full_like(BATCH["labels"], -100)}


def in_form(form: str, documents: tiny.Documents, labels: tiny.Documents) -> dict[str, torch.Tensor]:
    """A batch of documents with labels of their own."""
    batch = tiny.batch_of(documents, form)
    kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return batch | {"labels": torch.full_like(batch["input_ids"], -100).masked_scatter(kept, torch.cat(labels))}


@pytest.mark.parametrize("form", ["position_ids", "left", "right"])
def test_ignored_labels(form: str) -> None:
    """Tokens without a label do not count, also where one rank has no other; labels may be int32."""
    labels = [d.clone() for d in DOCUMENTS]
    labels[0][:] = -100  # all that rank 0 of contiguous halves would score, and more
    labels[1][:30] = -100
    labels[3][5] = -100
    batch, model = in_form(form, DOCUMENTS, labels), tiny.model_of("llama")
    results = tiny.train(model, batch | {"labels": batch["labels"].int()}, balancer="contiguous")
    tiny.check(results, tiny.reference(model, DOCUMENTS, labels=labels))
    for loss, gradients in tiny.train(model, BATCH | NONE):
        assert loss == 0.0 and all(not x.any() for x in gradients.values())


def test_labels_that_are_shifted_already() -> None:
    """They go before labels."""
    shifted = torch.cat([torch.cat([d[1:], d.new_full((1,), -100)]) for d in DOCUMENTS])[None]
    model, wrong = tiny.model_of("llama"), torch.full_like(shifted, 5)
    want = tiny.reference(model, DOCUMENTS)
    for labels in ({}, {"labels": wrong}):
        batch = {n: x for n, x in BATCH.items() if n != "labels"} | {"shift_labels": shifted, **labels}
        tiny.check(tiny.train(model, batch), want)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_accumulated_batches(as_tensor: bool) -> None:
    """Two micro-batches, each divided by the tokens of both, give what one batch gives."""
    model, total = tiny.model_of("gemma3"), sum(LENGTHS) - len(LENGTHS)
    more = {"num_items_in_batch": torch.tensor(total) if as_tensor else total}
    halves: Any = [tiny.packed(DOCUMENTS[:1]) | more, tiny.packed(DOCUMENTS[1:]) | more]

    def steps(mine: Any, batches: Any) -> Any:
        return sum(tiny.step(mine, batch)[0] for batch in batches), tiny.gradients(mine)

    tiny.check(tiny.train(model, halves, act=steps), tiny.reference(model, DOCUMENTS))


@pytest.mark.parametrize("name", ["llama", "mamba2"])  # Mamba passes no positions on
def test_a_loss_without_gradients(name: str) -> None:
    """While the model trains it cuts, also in inference mode; in evaluation it gets prepared batches."""
    model = tiny.model_of(name)

    def losses(mine: Any, batch: Any) -> list[float]:
        trained = [mode()(lambda: mine(**batch).loss.item())() for mode in (torch.no_grad, torch.inference_mode)]
        with torch.no_grad():
            return [*trained, mine.eval()(**hf.prepare(batch, mine)).loss.item()]

    for got in tiny.train(model, BATCH, act=losses):
        assert got == pytest.approx([tiny.reference(model, DOCUMENTS)[0]] * 3, rel=3e-6)


def test_a_models_own_loss() -> None:
    """It gets labels that are shifted and cut, here to this rank's sum, whose mean over ranks is the loss."""
    model, total = tiny.model_of("llama"), sum(len(d) - 1 for d in DOCUMENTS)

    def loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return functional.cross_entropy(logits[0], labels[0], reduction="sum") / total * 2

    def own(mine: Any, batch: Any) -> Any:
        mine.loss_function = loss
        return tiny.step(mine, batch)

    results = tiny.train(model, BATCH, act=own, reduce_loss=False)
    mean = sum(loss for loss, _ in results) / 2
    tiny.check([(mean, gradients) for _, gradients in results], tiny.reference(model, DOCUMENTS))


def _classifier(classes: int) -> Any:
    config = tiny.config_of("llama", num_labels=classes, classifier_dropout=0.0)
    torch.manual_seed(0)
    return transformers.AutoModelForTokenClassification.from_config(config).train()


def test_token_classification() -> None:
    """Labels are those of the tokens themselves; bool and uint8 do not hold -100."""
    model, labels = _classifier(5), torch.cat([torch.randint(5, d.shape) for d in DOCUMENTS])
    labels[3:9] = -100
    alone = copy.deepcopy(model)
    logits = torch.cat([alone(input_ids=d[None]).logits[0] for d in DOCUMENTS])
    want = tiny.differentiated(alone, functional.cross_entropy(logits, labels))
    tiny.check(tiny.train(model, BATCH | {"labels": labels[None]}), want)

    def own(mine: Any, batch: Any) -> Any:
        given = hf.prepare(batch, mine)
        loss = spanwise.cross_entropy(mine(**given).logits, given["labels"], site_of(mine).mesh)
        return tiny.differentiated(mine, loss)

    tiny.check(tiny.train(model, BATCH | {"labels": labels[None]}, act=own, reduce_loss=False), want)
    model, short = _classifier(2), {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[1, 0, 1]])}
    for dtype in (torch.bool, torch.uint8):
        given = short | {"labels": short["labels"].to(dtype)}
        tiny.check(tiny.train(model, given, 3), tiny.step(copy.deepcopy(model), short))


def test_an_auxiliary_loss_that_only_the_call_asks_for() -> None:
    """As an attribute of the output, and in a tuple."""
    name = "mixtral, auxiliary loss"
    want = tiny.reference(tiny.model_of(name), DOCUMENTS)
    silent = tiny.model_of(name, output_router_logits=False)
    tiny.check(tiny.train(silent, BATCH | {"output_router_logits": True}), want)
    of_tuple = tiny.train(
        name, BATCH, act=lambda mine, batch: tiny.differentiated(mine, mine(**batch, return_dict=False)[0])
    )
    tiny.check(of_tuple, want)


def _rollouts(lengths: tuple[int, ...], prompt: int) -> tiny.Documents:
    first = tiny.documents_of((prompt,), seed=5)[0]
    answers = tiny.documents_of(lengths, seed=9)
    turns = [torch.cat([first, answers[0][:5], x]) for x in tiny.documents_of((6, 3), seed=11)]
    return [torch.cat([first, x]) for x in answers] + turns


@pytest.mark.parametrize(("name", "ranks"), [("llama", 3), ("gemma3", 2)])
def test_completions_that_share_a_prompt(name: str, ranks: int) -> None:
    """Loss and gradients are those of the separate sequences; prompts without labels, one sequence twice."""
    sequences = _rollouts((9, 20, 1), 17)
    sequences.append(sequences[0])
    labels = [s.index_fill(0, torch.arange(17), -100) for s in sequences]
    model, tree = tiny.model_of(name), tiny.as_tree(sequences, labels)
    assert tree["input_ids"].shape[1] < sum(len(s) for s in sequences) / 2
    tiny.check(tiny.train(model, tree, ranks), tiny.reference(model, sequences, labels=labels))


def test_trees_count_each_label_once_and_are_verified() -> None:
    found = spanwise.tree_from_sequences(_rollouts((9, 4), 12))
    ids, model = torch.from_numpy(found.ids), tiny.model_of("llama")
    labels, done = [], torch.zeros(len(ids), dtype=torch.bool)
    for path in found.paths:
        labels.append(ids[path].masked_fill(done[path], -100))
        done[path[1:]] = True

    def verified(mine: Any, batch: Any) -> Any:
        assert hf.verify(mine, batch).ok
        return tiny.step(mine, hf.prepare(batch, mine, hf.make_plan(batch, mine.config, 2)))

    results = tiny.train(model, {"input_ids": ids[None], "labels": ids[None], "tree": found.tree}, act=verified)
    tiny.check(results, tiny.reference(model, [ids[path] for path in found.paths], labels=labels))
