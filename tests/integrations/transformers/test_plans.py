"""Forms of batches, exchanges and balancers of Hugging Face models: exact on threads as ranks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

LENGTHS = (23, 41, 7, 30, 1)


def _train(rank: int, mesh: Any, models: list[Any], batch: dict[str, Any], **options: Any) -> Any:
    return tiny.step(hf.context_parallel(models[rank], mesh, **options), batch)


def _compare(name: str, ranks: int, batch: dict[str, Any], documents: tiny.Documents, **options: Any) -> None:
    model = tiny.model_of(name)
    results = run_ranks(ranks, _train, tiny.copies(model, ranks), batch, **options)
    tiny.check(results, tiny.reference(model, documents))


@pytest.mark.parametrize("name", ["llama", pytest.param("opt", marks=pytest.mark.slow), "gemma3"])
def test_forms_of_a_batch(name: str) -> None:
    documents = tiny.documents_of(LENGTHS)
    forms = [tiny.packed(documents, "cu_seq_lens_q"), tiny.padded(documents, "left"), tiny.padded(documents, "right")]
    for batch in forms:
        _compare(name, 2, batch, documents)


def test_documents_by_seq_idx() -> None:
    """As `DataCollatorWithFlattening` makes it for layers that carry a state; beside position_ids or alone."""
    documents = tiny.documents_of(LENGTHS)
    whole = tiny.packed(documents)
    whole["seq_idx"] = torch.arange(len(documents)).repeat_interleave(torch.tensor(LENGTHS))[None]
    for batch in (whole, {name: x for name, x in whole.items() if name != "position_ids"}):
        _compare("lfm2", 2, batch, documents)


@pytest.mark.parametrize("by", ["attention_mask", "cu_seq_lens_q"])
def test_positions_that_skip_numbers(by: str) -> None:
    """As training for long contexts on short documents makes them."""
    (document,) = tiny.documents_of((40,))
    positions = torch.cat([torch.arange(25), torch.arange(60, 75)])[None]
    batch = tiny.packed([document], "cu_seq_lens_q") | {"position_ids": positions}
    if by == "attention_mask":
        batch = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
        batch["attention_mask"] = torch.ones_like(document)[None]
    model = tiny.model_of("llama")
    results = run_ranks(2, _train, tiny.copies(model, 2), batch)
    tiny.check(
        results,
        tiny.reference(
            model, [document], [{"position_ids": positions, "attention_mask": torch.ones_like(document)[None]}]
        ),
    )


EXCHANGES = ("needed", "all_gather", "ring", "ulysses")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanges(exchange: str) -> None:
    documents = tiny.documents_of(LENGTHS)
    _compare("gemma3", 2, tiny.packed(documents), documents, exchange=exchange)


@pytest.mark.parametrize("balancer", ["contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "local"])
def test_balancers(balancer: str) -> None:
    documents = tiny.documents_of(LENGTHS)
    _compare("qwen2, sliding", 3, tiny.packed(documents), documents, balancer=balancer, block_size=4)
