"""Losses and labels of Hugging Face models under context parallelism."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

LENGTHS = (23, 41, 7, 30)
DOCUMENTS = tiny.documents_of(LENGTHS)


def _reference(model: Any, labels: list[torch.Tensor], total: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The sum of the losses of labelled tokens over `total`, one document at a time; labels as in the batch."""
    model = tiny.copies(model, 1)[0]
    loss = torch.zeros(())
    for document, wanted in zip(DOCUMENTS, labels, strict=True):
        scores = model(input_ids=document[None], use_cache=False).logits[0, :-1]
        loss = loss + torch.nn.functional.cross_entropy(scores, wanted[1:], reduction="sum", ignore_index=-100) / total
    loss.backward()
    return loss.item(), tiny.gradients(model)


def _train(model: Any, batch: dict[str, Any], ranks: int = 2, **options: Any) -> list[Any]:
    models = tiny.copies(model, ranks)
    return run_ranks(ranks, lambda rank, mesh: tiny.step(hf.context_parallel(models[rank], mesh, **options), batch))


@pytest.mark.parametrize("form", ["packed", "left", "right"])
def test_ignored_labels(form: str) -> None:
    """Tokens without a label do not count, also where one rank has no other."""
    labels = [d.clone() for d in DOCUMENTS]
    labels[0][:] = -100  # all that rank 0 of contiguous halves would score, and more
    labels[1][:30] = -100
    labels[3][5] = -100
    batch = tiny.packed(DOCUMENTS) if form == "packed" else tiny.padded(DOCUMENTS, form)
    kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    batch["labels"] = torch.full_like(batch["input_ids"], -100).masked_scatter(kept, torch.cat(labels))
    total = sum(int((wanted[1:] != -100).sum()) for wanted in labels)
    model = tiny.model_of("llama")
    tiny.check(_train(model, batch, balancer="contiguous"), _reference(model, labels, total))


def test_labels_that_are_shifted_already() -> None:
    batch = tiny.packed(DOCUMENTS)
    shifted = torch.cat([torch.cat([d[1:], d.new_full((1,), -100)]) for d in DOCUMENTS])[None]
    model = tiny.model_of("llama")
    want = _reference(model, DOCUMENTS, sum(LENGTHS) - len(LENGTHS))
    for given in ({"shift_labels": shifted, "labels": batch["labels"]}, {"shift_labels": shifted, "labels": shifted}):
        tiny.check(_train(model, batch | given), want)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_accumulated_batches(as_tensor: bool) -> None:
    """Two micro-batches, each divided by the tokens of both, give what one batch gives."""
    model = tiny.model_of("gemma3")
    total: Any = sum(LENGTHS) - len(LENGTHS)
    number = torch.tensor(total) if as_tensor else total
    halves = [tiny.packed(DOCUMENTS[:1]), tiny.packed(DOCUMENTS[1:])]
    models = tiny.copies(model, 2)

    def on_rank(rank: int, mesh: Any) -> Any:
        mine, loss = hf.context_parallel(models[rank], mesh), 0.0
        for batch in halves:
            part = mine(**batch, num_items_in_batch=number).loss
            part.backward()
            loss += part.item()
        return loss, tiny.gradients(mine)

    tiny.check(run_ranks(2, on_rank), tiny.reference(model, DOCUMENTS))


def test_a_loss_without_gradients() -> None:
    """While the model trains it cuts, also in inference mode."""
    batch, model = tiny.packed(DOCUMENTS), tiny.model_of("llama")
    want, _ = tiny.reference(model, DOCUMENTS)
    models = tiny.copies(model, 2)

    def on_rank(rank: int, mesh: Any) -> list[float]:
        mine, losses = hf.context_parallel(models[rank], mesh), []
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                losses.append(mine(**batch).loss.item())
        return losses

    for losses in run_ranks(2, on_rank):
        assert losses == pytest.approx([want, want], rel=3e-6)


def test_no_label_at_all() -> None:
    batch = tiny.packed(DOCUMENTS)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for loss, gradients in _train(tiny.model_of("llama"), batch):
        assert loss == 0.0 and all(not x.any() for x in gradients.values())


def test_without_labels_logits_are_this_ranks() -> None:
    batch = tiny.packed(DOCUMENTS)
    del batch["labels"]
    model = tiny.model_of("llama")
    with torch.no_grad():
        alone = torch.cat([tiny.copies(model, 1)[0](input_ids=d[None]).logits for d in DOCUMENTS], dim=1)
    models = tiny.copies(model, 3)

    def on_rank(rank: int, mesh: Any) -> Any:
        mine = hf.context_parallel(models[rank], mesh).eval()
        arguments = hf.prepare(batch, mine)
        with torch.no_grad():
            out = mine(**arguments)
        assert out.loss is None
        return out.logits, arguments["spanwise_plan"].plan.tokens

    for logits, tokens in run_ranks(3, on_rank):
        torch.testing.assert_close(logits, alone[:, tokens[0]], atol=2e-5, rtol=1e-4)
