"""What a newcomer does first, and what lies beside the documented cases: right, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from torch.nn import functional

import spanwise
from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers.outputs import of_layout
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

DOCUMENTS = tiny.documents_of((23, 41))
BATCH = tiny.packed(DOCUMENTS)
IDS = {"input_ids": BATCH["input_ids"], "labels": BATCH["labels"]}


def _prepared(model: Any, mesh: Any, **options: Any) -> Any:
    return hf.context_parallel(copy.deepcopy(model), mesh, **options)


def _on_one(model: Any, act: Any) -> Any:
    return run_ranks(1, lambda rank, mesh: act(_prepared(model, mesh)))[0]


def test_evaluation_mode_with_gradients() -> None:
    """As `from_pretrained` leaves a model: nothing would be cut."""
    model = tiny.model_of("llama").eval()
    with pytest.raises(ValueError, match=r"evaluation mode.*Call model.train\(\)"):
        _on_one(model, lambda mine: mine(**BATCH))
    with pytest.raises(ValueError, match=r"evaluation mode"):
        _on_one(model, lambda mine: mine(**tiny.padded(DOCUMENTS, "left")))


@pytest.mark.parametrize("name", ["llama", "mamba2"])  # Mamba passes no positions on
@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens_q", "a mask of ones"])
def test_packed_batches_in_evaluation(name: str, by: str) -> None:
    batch = tiny.packed(DOCUMENTS, by if by == "cu_seq_lens_q" else "position_ids")
    if by == "a mask of ones":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    model = tiny.model_of(name).eval()

    @torch.no_grad()
    def whole(mine: Any) -> Any:
        return mine(**batch) if by != "cu_seq_lens_q" or name == "mamba2" else mine.model(**batch)

    with pytest.raises(ValueError, match=r"packs several documents.*hf.prepare"):
        _on_one(model, whole)

    @torch.no_grad()
    def planned(mine: Any) -> float:
        return mine(**hf.prepare(batch, mine)).loss.item()

    assert _on_one(model, planned) == pytest.approx(tiny.reference(model, DOCUMENTS)[0], rel=3e-6)


@pytest.mark.parametrize("reduce_loss", [True, False])
def test_token_classification(reduce_loss: bool) -> None:
    """Labels are those of the tokens themselves."""
    config = tiny.config_of("llama", num_labels=5, classifier_dropout=0.0)
    torch.manual_seed(0)
    model = transformers.AutoModelForTokenClassification.from_config(config).train()
    labels = [torch.randint(5, d.shape) for d in DOCUMENTS]
    labels[0][3:9] = -100
    alone = copy.deepcopy(model)
    scores = torch.cat([alone(input_ids=d[None]).logits[0] for d in DOCUMENTS])
    loss = functional.cross_entropy(scores, torch.cat(labels))
    loss.backward()
    models = tiny.copies(model, 2)
    batch = BATCH | {"labels": torch.cat(labels)[None]}

    def on_rank(rank: int, mesh: Any) -> Any:
        mine = hf.context_parallel(models[rank], mesh, reduce_loss=reduce_loss)
        if reduce_loss:
            return tiny.step(mine, batch)
        arguments = hf.prepare(batch, mine)
        labels = arguments["labels"]
        mean = spanwise.cross_entropy(mine(**arguments).logits, labels, mesh)
        mean.backward()
        return mean.item(), tiny.gradients(mine)

    tiny.check(run_ranks(2, on_rank), (loss.item(), tiny.gradients(alone)))


def test_a_users_own_attention() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def mine(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("mine", mine)
    model = tiny.model_of("llama")
    model.set_attn_implementation("mine")
    with pytest.raises(ValueError, match="attention 'mine' of LlamaForCausalLM is not transformers' own"):
        _on_one(model, lambda mine: None)


def test_three_rows_of_positions_that_start_anew() -> None:
    """Images have tokens with equal times; only where none of three positions grows does a document start."""
    text = torch.arange(5).expand(3, -1)
    image = torch.tensor([[5, 5, 5, 5], [5, 5, 6, 6], [5, 6, 5, 6]])
    document = torch.cat([text, image, torch.arange(7, 10).expand(3, -1)], 1)
    positions = torch.cat([document, torch.zeros(3, 1, dtype=torch.long), document], 1)[:, None]
    ids = torch.zeros(1, positions.shape[-1], dtype=torch.long)
    counts = torch.cat([torch.arange(12), torch.zeros(1), torch.arange(12)]).long()[None, None]
    for given in (positions, torch.cat([counts, positions])):
        plan = hf.make_plan({"input_ids": ids, "position_ids": given}, tiny.config_of("llama"), 1)
        assert plan.cu_seqlens[0].tolist() == [0, 12, 13, 25]
    frames = torch.tensor([[1, 1, 1, 1], [1, 2, 1, 2], [1, 1, 1, 1]])  # of a video, so fast that they share a time
    positions = torch.cat([torch.zeros(3, 1, dtype=torch.long), frames], 1)[:, None]
    plan = hf.make_plan({"input_ids": ids[:, :5], "position_ids": positions}, tiny.config_of("llama"), 1)
    assert plan.cu_seqlens[0].tolist() == [0, 5]


@pytest.mark.parametrize("positions", [torch.arange(64), torch.cat([torch.arange(30), torch.arange(34)])])
def test_offsets_that_contradict_positions(positions: torch.Tensor) -> None:
    batch = tiny.packed(DOCUMENTS, "cu_seq_lens_q") | {"position_ids": positions[None]}
    with pytest.raises(ValueError, match="cu_seq_lens_q and position_ids tell different documents.*token 23 of"):
        hf.make_plan(batch, tiny.config_of("llama"), 2)


def test_a_plan_for_another_window() -> None:
    model = tiny.model_of("mistral, sliding")
    plan = hf.make_plan(BATCH, tiny.config_of("mistral, sliding", sliding_window=9), 1)
    with pytest.raises(ValueError, match="'sliding_attention' read up to 9 tokens in the plan"):
        _on_one(model, lambda mine: hf.prepare(BATCH, mine, plan))
    chunked = tiny.model_of("llama4")
    plan = hf.make_plan(BATCH, tiny.config_of("llama4", attention_chunk_size=8), 1)
    with pytest.raises(ValueError, match="'chunked_attention' read up to 8 tokens in the plan"):
        _on_one(chunked, lambda mine: hf.prepare(BATCH, mine, plan))


def test_plans_made_by_hand() -> None:
    """They must know the documents, as far as their masks do not tell; masks of one's own stay as they are."""
    documents = spanwise.SpanMask.documents([0, 23, 64])
    model = tiny.model_of("llama")
    models = tiny.copies(model, 2)
    plan = spanwise.make_plan({"full_attention": documents}, 2)

    def on_rank(rank: int, mesh: Any) -> Any:
        mine = hf.context_parallel(models[rank], mesh)
        return tiny.step(mine, hf.prepare(BATCH, mine, plan))

    tiny.check(run_ranks(2, on_rank), tiny.reference(model, DOCUMENTS))
    across = spanwise.make_plan({"full_attention": spanwise.SpanMask.causal(64)}, 1)
    with pytest.raises(ValueError, match="the plan's documents start at"):
        _on_one(model, lambda mine: hf.prepare(BATCH, mine, across))
    tree = spanwise.make_plan({"full_attention": spanwise.SpanMask.tree([-1, 0, 0], [20, 20, 24])}, 1)
    untold = spanwise.make_plan({"full_attention": spanwise.SpanMask(documents.start, documents.end, 64)}, 1)
    with pytest.raises(ValueError, match="pass cu_seqlens"):
        _on_one(model, lambda mine: hf.prepare(BATCH, mine, untold))
    with pytest.raises(ValueError, match="do not read each other.*pass tree="):
        _on_one(model, lambda mine: hf.prepare(IDS, mine, tree))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(mesh=None), "mesh must be a DeviceMesh of one axis"),
        (dict(mesh=2), "got 2"),
        (dict(loss_mesh=2), "loss_mesh must be a DeviceMesh"),
        (dict(exchange="fast"), "fast"),
        (dict(balancer="best"), "best"),
        (dict(block_size=0), "block_size"),
    ],
)
def test_arguments(options: dict[str, Any], text: str) -> None:
    def on_rank(rank: int, mesh: Any) -> None:
        hf.context_parallel(tiny.model_of("llama"), **{"mesh": mesh, **options})

    with pytest.raises(ValueError, match=text):
        run_ranks(1, on_rank)


@pytest.mark.parametrize("name", ["llama, dynamic NTK", "mixtral, auxiliary loss", "qwen3_next"])
@pytest.mark.parametrize("lengths", [(3,), (2, 3)])
def test_fewer_tokens_than_ranks(name: str, lengths: tuple[int, ...]) -> None:
    documents, model = tiny.documents_of(lengths), tiny.model_of(name)
    forms = [tiny.packed(documents), tiny.padded(documents, "right")]
    for batch in forms[: len(lengths)]:
        models = tiny.copies(model, 6)
        results = run_ranks(6, lambda rank, mesh, m=models, b=batch: tiny.step(hf.context_parallel(m[rank], mesh), b))
        tiny.check(results, tiny.reference(model, documents))


def test_packed_beside_a_mask_of_ones_and_short_labels() -> None:
    batch = BATCH | {"attention_mask": torch.ones(1, 64, dtype=torch.long), "labels": BATCH["labels"].int()}
    model = tiny.model_of("llama")
    models = tiny.copies(model, 2)
    results = run_ranks(2, lambda rank, mesh: tiny.step(hf.context_parallel(models[rank], mesh), batch))
    tiny.check(results, tiny.reference(model, DOCUMENTS))


def _pair() -> tuple[Any, Any]:
    """A student of full attention and a teacher of windows, whose layouts differ."""
    return tiny.model_of("llama"), tiny.model_of("gemma3", seed=3, sliding_window=5)


def _divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return functional.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum")


LONG = tiny.documents_of((150, 11, 90))


def test_two_models_on_one_batch() -> None:
    student, teacher = _pair()
    batch = {name: x for name, x in tiny.packed(LONG).items() if name != "labels"}
    alone = copy.deepcopy(student)
    loss = torch.zeros(())
    for d in LONG:
        with torch.no_grad():
            wanted = copy.deepcopy(teacher)(input_ids=d[None], use_cache=False).logits
        loss = loss + _divergence(alone(input_ids=d[None]).logits, wanted)
    loss.backward()
    pairs = [(copy.deepcopy(student), copy.deepcopy(teacher)) for _ in range(2)]

    def on_rank(rank: int, mesh: Any) -> Any:
        mine = [hf.context_parallel(one, mesh, balancer="head_tail") for one in pairs[rank]]
        for_student, for_teacher = hf.prepare(batch, mine)
        with torch.no_grad():
            wanted = mine[1](**for_teacher).logits
        part = _divergence(mine[0](**for_student).logits, wanted)
        (part * 2).backward()
        total = part.detach().clone()
        torch.distributed.all_reduce(total, group=mesh.get_group())
        return total.item(), tiny.gradients(mine[0])

    tiny.check(run_ranks(2, on_rank), (loss.item(), tiny.gradients(alone)))


def test_windows_that_differ_between_models() -> None:
    models = [tiny.model_of("mistral, sliding", sliding_window=n) for n in (16, 5)]
    batch = {name: x for name, x in BATCH.items() if name != "labels"}

    def on_rank(rank: int, mesh: Any) -> Any:
        mine = [_prepared(one, mesh).eval() for one in models]
        prepared = hf.prepare(batch, mine)
        with torch.no_grad():
            logits = [one(**given).logits for one, given in zip(mine, prepared, strict=True)]
        return [x.as_subclass(torch.Tensor) for x in logits], prepared[0]["spanwise_plan"].plan.tokens[0]

    for results, tokens in run_ranks(2, on_rank):
        for got, model in zip(results, models, strict=True):
            with torch.no_grad():
                want = torch.cat([model(input_ids=d[None], use_cache=False).logits for d in DOCUMENTS], 1)
            torch.testing.assert_close(got, want[:, tokens], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "act",
    [lambda x: x, lambda x: x[0], lambda x: x.view(-1, tiny.VOCAB), lambda x: x.topk(3).values.squeeze(0)],
    ids=["as they are", "[0]", "view", "topk"],
)
def test_outputs_of_two_layouts(act: Any) -> None:
    batch = tiny.packed(LONG)
    pairs = [_pair() for _ in range(2)]

    def on_rank(rank: int, mesh: Any) -> Any:
        layouts = ("head_tail", "contiguous")
        mine = [hf.context_parallel(one, mesh, balancer=x) for one, x in zip(pairs[rank], layouts, strict=True)]
        return _divergence(*(act(one(**batch).logits) for one in mine))

    with pytest.raises(ValueError, match=r"hold other tokens on each rank.*hf.prepare\(batch, \[student, teacher\]\)"):
        run_ranks(2, on_rank)


def test_places_in_the_outputs_of_a_rank() -> None:
    model = transformers.AutoModel.from_config(tiny.config_of("llama")).train()

    def on_rank(rank: int, mesh: Any) -> None:
        hidden = _prepared(model, mesh)(input_ids=BATCH["input_ids"]).last_hidden_state
        places = (slice(None), -1), (slice(None), slice(-3, None)), (torch.tensor([0]), torch.tensor([5]))
        for index in (*places, (..., slice(None, -1), slice(None)), (0, 5), (None, slice(None), 0)):
            with pytest.raises(ValueError, match=r"names places in the sequence.*spanwise.unshard"):
                hidden[index]
        assert type(hidden[0, torch.arange(3)]) is torch.Tensor
        assert hidden[..., :4].shape == hidden[:, :, :4].shape == (1, hidden.shape[1], 4)
        assert type(hidden.as_subclass(torch.Tensor)[:, -1]) is type(copy.deepcopy(hidden.detach())) is torch.Tensor
        valid = torch.ones(hidden.shape[:2], dtype=torch.bool)
        assert hidden[valid].shape == hidden.shape[1:]
        hidden.sum().backward()

    run_ranks(2, on_rank)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")  # of inductor
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functions_of_a_ranks_outputs(backend: str) -> None:
    torch._dynamo.reset()
    plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 20, 64]), 2)
    weight, labels = torch.randn(1, 32, 50, dtype=torch.float64), torch.arange(32)

    def loss(logits: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
        logits /= 3  # in place: gradients flow through what the caller has
        rest = torch.stack([logits, *more]).sum(0)[:, :, :40] * 2 + logits.mean(-1, keepdim=True)
        return torch.nn.functional.cross_entropy(rest.flatten(0, 1), labels) + logits[:, -1].square().sum()

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


def test_pooling_over_the_tokens_of_a_rank() -> None:
    """Two rows on two ranks: a shard has as many tokens as a row, so that the batch's mask would fit."""
    model = tiny.model_of("llama")
    batch = {"input_ids": torch.stack(tiny.documents_of((12, 12)))}

    def on_rank(rank: int, mesh: Any) -> None:
        out = _prepared(model, mesh)(**batch, output_hidden_states=True)
        hidden = out.hidden_states[-1]
        with pytest.raises(ValueError, match=r"names places in the sequence.*spanwise.unshard"):
            hidden[:, -1]
        mask = torch.ones(2, 12, 1)
        for pool in (lambda: (hidden * mask).sum(1), lambda: mask * hidden, lambda: out.logits.mean(1)):
            with pytest.raises(ValueError, match=r"of a shard.*several places and rows.*spanwise.unshard"):
                pool()
        weights = torch.ones(1, 12, 1)
        assert (hidden * weights * torch.ones(64)).mean(-1, keepdim=True).mean().dim() == 0
        assert hidden[0].mean(-1).shape == (12,)

    run_ranks(2, on_rank)


def _rollouts(lengths: tuple[int, ...], prompt: int) -> tiny.Documents:
    first = tiny.documents_of((prompt,), seed=5)[0]
    answers = tiny.documents_of(lengths, seed=9)
    turns = [torch.cat([first, answers[0][:5], x]) for x in tiny.documents_of((6, 3), seed=11)]
    return [torch.cat([first, x]) for x in answers] + turns


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("lengths", "ranks"), [((9, 20, 1), 2), ((9, 20, 1), 3)])
def test_completions_that_share_a_prompt(name: str, lengths: tuple[int, ...], ranks: int) -> None:
    """Loss and gradients are those of the separate sequences; prompts without labels, one sequence twice."""
    sequences = _rollouts(lengths, 17)
    sequences.append(sequences[0])
    batch = tiny.padded(sequences, "left")
    for row, sequence in zip(batch["labels"], sequences, strict=True):
        row[row.shape[0] - len(sequence) :][:17] = -100
    model = tiny.model_of(name)
    alone, losses = copy.deepcopy(model), []
    for sequence in sequences:
        scores = alone(input_ids=sequence[None], use_cache=False).logits[0, 16:-1].float()
        losses.append(functional.cross_entropy(scores, sequence[17:], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    models, tree = tiny.copies(model, ranks), hf.share_prefixes(batch)
    assert tree["input_ids"].shape[1] < sum(len(s) for s in sequences) / 2
    results = run_ranks(ranks, lambda rank, mesh: tiny.step(hf.context_parallel(models[rank], mesh), tree))
    tiny.check(results, (loss.item(), tiny.gradients(alone)))


def test_trees_count_each_label_once_and_are_verified() -> None:
    found = spanwise.tree_from_sequences(_rollouts((9, 4), 12))
    ids, model = torch.from_numpy(found.ids)[None], tiny.model_of("llama")
    batch = {"input_ids": ids, "labels": ids, "tree": found.tree}
    models, alone, done = tiny.copies(model, 2), copy.deepcopy(model), torch.zeros(ids.shape[1], dtype=torch.bool)
    losses = []
    for path in found.paths:
        scores = alone(input_ids=ids[:, path]).logits[0, :-1]
        fresh = ~done[path[1:]]
        losses.append(functional.cross_entropy(scores[fresh], ids[0, path[1:]][fresh], reduction="none"))
        done[path[1:]] = True
    loss = torch.cat(losses).mean()
    loss.backward()

    def on_rank(rank: int, mesh: Any) -> Any:
        mine = hf.context_parallel(models[rank], mesh)
        plan = hf.make_plan(batch, mine.config, 2)
        assert hf.verify(mine, batch).ok
        return tiny.step(mine, hf.prepare(batch, mine, plan))

    tiny.check(run_ranks(2, on_rank), (loss.item(), tiny.gradients(alone)))


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("llama", {"position_ids": torch.arange(5)[None]}, "the tree alone tells positions"),
        ("llama", {"tree": spanwise.TokenTree([-1], [4])}, "the tree has 4 tokens, the batch 1 rows of 5"),
        ("llama", {"tree": [-1, 0, 0]}, "must be a spanwise.TokenTree, got a list"),
        ("llama", {"shift_labels": torch.zeros(1, 5, dtype=torch.long)}, "labels of a tree follow its edges"),
        ("llama", {"tree": None, "label_weights": torch.ones(1, 5)}, "label_weights go with a tree"),
        ("llama4", {}, "chunked attention, which a tree"),
        ("qwen3_next", {}, "cannot follow the branches of a tree"),
    ],
)
def test_trees_that_are_refused(name: str, changes: dict[str, Any], text: str) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    batch = {"input_ids": ids, "labels": ids, "tree": spanwise.TokenTree([-1, 0, 0], [2, 1, 2])}
    with pytest.raises(ValueError, match=text):
        _on_one(tiny.model_of(name), lambda mine: mine(**batch | changes))


def test_a_short_tree_on_many_ranks() -> None:
    ids = torch.tensor([[5, 6, 7], [5, 6, 8]])
    model = tiny.model_of("llama")
    models, batch = tiny.copies(model, 6), hf.share_prefixes({"input_ids": ids, "labels": ids})
    results = run_ranks(6, lambda rank, mesh: tiny.step(hf.context_parallel(models[rank], mesh), batch))
    tiny.check(results, tiny.reference(model, list(ids)))
