"""Forms of batches, exchanges and balancers of Hugging Face models: exact on threads as ranks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

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


EXCHANGES = ("needed", "all_gather", "ring", "ulysses")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanges(exchange: str) -> None:
    documents = tiny.documents_of(LENGTHS)
    _compare("gemma3", 2, tiny.packed(documents), documents, exchange=exchange)


@pytest.mark.parametrize("balancer", ["contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "local"])
def test_balancers(balancer: str) -> None:
    documents = tiny.documents_of(LENGTHS)
    _compare("qwen2, sliding", 3, tiny.packed(documents), documents, balancer=balancer, block_size=4)
