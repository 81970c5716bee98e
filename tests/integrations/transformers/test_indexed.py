"""Models whose indexers pick the keys of each query; see also `test_parallel` and `test_unchanged`."""

from __future__ import annotations

import pytest

from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers import indexed
from tests.integrations.transformers import tiny

DOCUMENTS = tiny.documents_of((23, 41, 7, 3, 30))
# Six keys a query; layers that share a selection (hy_v4), and sliding layers beside (dots3_note_text).
KINDS = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "dots3_note_text"]


@pytest.mark.parametrize(
    ("kind", "ranks", "form"),
    [*((kind, 2 + i % 3, "packed") for i, kind in enumerate(KINDS)), (KINDS[0], 3, "left"), (KINDS[2], 2, "right")],
)
def test_exact(kind: str, ranks: int, form: str) -> None:
    batch = tiny.packed(DOCUMENTS) if form == "packed" else tiny.padded(DOCUMENTS, form)
    tiny.check(tiny.train(kind, batch, ranks), tiny.reference(tiny.model_of(kind), DOCUMENTS))


def test_a_rank_that_computes_all_queries_of_its_heads() -> None:
    """Ulysses; layers share a selection."""
    for kind in ("deepseek_v32", "hy_v4"):
        results = tiny.train(kind, tiny.packed(DOCUMENTS), exchange="ulysses", balancer="head_tail", block_size=4)
        tiny.check(results, tiny.reference(tiny.model_of(kind), DOCUMENTS))


def test_selections_matter() -> None:
    """Or the tests above would show nothing."""
    all_keys = tiny.reference(tiny.model_of("deepseek_v32", index_topk=64), DOCUMENTS)
    with pytest.raises(AssertionError, match="differs"):
        tiny.check(tiny.train("deepseek_v32", tiny.packed(DOCUMENTS)), all_keys)


def test_queries_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_SCORES", 100)
    batch = tiny.packed(DOCUMENTS)
    tiny.check(tiny.train("deepseek_v32", batch), tiny.reference(tiny.model_of("deepseek_v32"), DOCUMENTS))


def test_trees_are_refused() -> None:
    with pytest.raises(ValueError, match="tree"):
        tiny.train("deepseek_v32", hf.share_prefixes(tiny.packed(DOCUMENTS)))
