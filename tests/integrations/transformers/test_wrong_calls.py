"""What context parallelism of Hugging Face models refuses; each error names the argument, or the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BertModel, DynamicCache, FNetModel, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import spanwise
from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers import mixers
from tests.integrations.transformers import images, tiny
from tests.ranks.harness import run_ranks

DOCUMENTS = tiny.documents_of((23, 41))
BATCH = tiny.packed(DOCUMENTS)
TOKENS = {"input_ids": BATCH["input_ids"]}
IDS = {"input_ids": BATCH["input_ids"], "labels": BATCH["labels"]}
OFFSETS = tiny.packed(DOCUMENTS, "cu_seq_lens_q")
PADDED = tiny.padded(DOCUMENTS, "left")
SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=160)
ANEW = torch.tensor([[*range(30), *range(34)]])
SPANS = spanwise.SpanMask.documents([0, 23, 64])
TREE = {"input_ids": torch.arange(5, 10)[None], "labels": torch.arange(5, 10)[None]}
TREE["tree"] = spanwise.TokenTree([-1, 0, 0], [2, 1, 2])
PACKS = "packs several documents.*hf.prepare"
Call = Callable[[Any], Any]  # of a mesh


def attached(make: Callable[[], Any]) -> Call:
    return lambda mesh: hf.context_parallel(make(), mesh)


def meta(kind: str, **values: Any) -> Call:
    def make() -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))

    return attached(make)


def called(batch: dict[str, Any], name: str = "llama", before: Any = None, after: Any = None, **changes: Any) -> Call:
    """A step of a model, to which something was done before or after `context_parallel`."""

    def call(mesh: Any) -> None:
        model = tiny.model_of(name, **changes)
        if before:
            before(model)
        hf.context_parallel(model, mesh)
        if after:
            after(model)
        model(**batch)

    return call


def evaluated(batch: dict[str, Any], name: str = "llama", act: Any = lambda model, batch: model(**batch)) -> Call:
    return torch.no_grad()(lambda mesh: act(hf.context_parallel(tiny.model_of(name).eval(), mesh), batch))


def planned(batch: dict[str, Any], config: Any) -> Call:
    return lambda mesh: hf.make_plan(batch, config() if callable(config) else config, 2)


def prepared(plan: Callable[[], Any], name: str = "llama", batch: dict[str, Any] = BATCH) -> Call:
    return lambda mesh: hf.prepare(batch, hf.context_parallel(tiny.model_of(name), mesh), plan())


def by_hand(mask: Any, **options: Any) -> Callable[[], Any]:
    return lambda: spanwise.make_plan({"full_attention": mask}, 1, **options)


def of_others(lengths: tuple[int, ...]) -> Callable[[], Any]:
    return lambda: hf.make_plan(tiny.packed(tiny.documents_of(lengths)), tiny.config_of("llama"), 1)


class WithoutKeywords(LlamaForCausalLM):
    """A model that keeps keyword arguments for itself."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids)


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


class OwnMixer(Qwen3NextGatedDeltaNet):
    """A mixer whose forward is not that of transformers."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states.cumsum(dim=1), **kwargs)


def with_z_loss(in_place: bool) -> Call:
    def call(mesh: Any) -> None:
        model = WithZLoss(tiny.config_of("llama")).train()
        model.in_place = in_place
        hf.context_parallel(model, mesh)(**BATCH)

    return call


def _set(module: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(module, name, value)


def prepare(model: Any, batch: Any) -> None:
    hf.prepare(batch, model)


def own_attention(model: Any) -> None:
    transformers.AttentionInterface.register("mine", lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs))
    model.set_attn_implementation("mine")


def cached(name: str, argument: str, act: Any = lambda model, batch: model(**batch)) -> Call:
    def call(mesh: Any) -> None:
        model = tiny.model_of(name)
        act(hf.context_parallel(model, mesh), BATCH | {argument: DynamicCache(config=model.config)})

    return call


@torch.no_grad()
def no_plan(mesh: Any) -> None:
    model = hf.context_parallel(WithoutKeywords(tiny.config_of("llama")).eval(), mesh)
    model(**hf.prepare({"input_ids": BATCH["input_ids"]}, model))


def of_hunyuan(left_out: str) -> Call:
    def call(mesh: Any) -> None:
        model = images.model_of("hunyuan_vl")
        documents = images.documents_of((29, 31), (True, False), images.tokens_of("hunyuan_vl", model))
        batch = images.batch_of("hunyuan_vl", documents, "packed", model)
        hf.context_parallel(model, mesh)(**{n: x for n, x in batch.items() if n != left_out})

    return call


def of_qwen2_vl(mesh: Any) -> None:
    model = images.model_of("qwen2_vl")
    batch = images.batch_of("qwen2_vl", images.documents_of((23, 41), (True, False)), "packed", model)
    hf.context_parallel(model, mesh)(**{n: x for n, x in batch.items() if n != "position_ids"})


WRONG: dict[str, tuple[Call, str]] = {
    # models
    "bloom": (meta("bloom", hidden_size=64, n_layer=2, n_head=4), "position_ids"),
    "gptj": (meta("gptj", n_embd=64, n_layer=2, n_head=4, rotary_dim=8), "AttentionInterface"),
    "rwkv": (meta("rwkv", hidden_size=64, num_hidden_layers=2, attention_hidden_size=64), "RwkvSelfAttention"),
    "inkling": (meta("inkling_text", **SMALL), "hybrid_sliding"),
    "bart": (meta("bart", d_model=64, decoder_layers=1, encoder_layers=1), "encoder|position_ids"),
    "xmod": (meta("xmod", **SMALL | dict(is_decoder=True)), "behind padding"),
    "deepseek_v4": (planned(BATCH, lambda: AutoConfig.for_model("deepseek_v4")), "compressed_sparse_attention"),
    "neomme": (planned(BATCH, lambda: AutoConfig.for_model("neomme")), "differ in sliding_window"),
    "perceiver": (planned(BATCH, lambda: AutoConfig.for_model("perceiver")), "layer_types nor num_hidden_layers"),
    "pooler": (attached(lambda: BertModel(tiny.config_of("bert"))), "the pooler of BertModel"),
    "fnet": (attached(lambda: FNetModel(AutoConfig.for_model("fnet", **SMALL), add_pooling_layer=False)), "Fourier"),
    **{
        head: (attached(lambda h=head: getattr(transformers, h)(tiny.config_of("llama"))), head)
        for head in ("LlamaForSequenceClassification", "LlamaForQuestionAnswering")
    },
    "layerdrop": (attached(lambda: tiny.model_of("opt", layerdrop=0.5)), "layerdrop"),
    "no model": (attached(lambda: nn.Linear(2, 2)), "got Linear"),
    "own mixer": (
        called(BATCH, "qwen3_next", lambda m: _set(m.model.layers[0].linear_attn, __class__=OwnMixer)), "not known",
    ),
    "convolution": (called(BATCH, before=lambda m: _set(m.model.layers[1], conv=nn.Conv1d(8, 8, 4))), "layers.1.conv"),
    "own forward": (called(BATCH, "bamba", lambda m: _set(m.model.layers[0].mamba, forward=print)), "BambaMixer"),
    "own attention": (called(BATCH, before=own_attention), "attention 'mine' of LlamaForCausalLM"),
    "set back": (called(BATCH, after=lambda m: m.set_attn_implementation("sdpa")), "'sdpa' after hf.context_parallel"),
    "twice": (lambda mesh: hf.context_parallel(attached(lambda: tiny.model_of("llama"))(mesh), mesh), "already"),
    "no plan passed on": (no_plan, "WithoutKeywords does not pass the plan on"),
    # arguments
    "mesh": (lambda mesh: hf.context_parallel(tiny.model_of("llama"), None), "mesh must be"),
    "a number as mesh": (lambda mesh: hf.context_parallel(tiny.model_of("llama"), 2), "got 2"),  # type: ignore[arg-type]
    "no loss mesh": (lambda mesh: hf.context_parallel(tiny.model_of("llama"), mesh, loss_mesh=2), "loss_mesh"),
    "options": (lambda mesh: hf.context_parallel(tiny.model_of("llama"), mesh, exchange="fast")(**BATCH), "fast"),
    # batches
    "no tokens": (called({"labels": BATCH["labels"]}), "input_ids or inputs_embeds"),
    "padding in packs": (called(BATCH | dict(attention_mask=(torch.arange(64) > 0).long()[None])), "token 23 of row 0"),
    "four dims": (called(TOKENS | dict(attention_mask=torch.ones(1, 1, 64, 64))), r"\[B, S\] = \(1, 64\)"),
    "weights as mask": (called(TOKENS | dict(attention_mask=2 * torch.ones(1, 64))), "0 and 1"),
    "no token in the mask": (called(TOKENS | dict(attention_mask=torch.zeros(1, 64))), "and a token"),
    "masks by kind": (called(TOKENS | dict(attention_mask={"full_attention": None})), "got a dict"),
    "padding between tokens": (called(TOKENS | dict(attention_mask=(torch.arange(64) != 30).long()[None])), "token 31"),
    "offsets beyond": (called(BATCH | dict(cu_seq_lens_q=torch.tensor([0, 70]))), "cu_seq_lens_q .* all 64 tokens"),
    "offsets across rows": (
        called({"input_ids": BATCH["input_ids"].view(2, 32), "cu_seq_lens_q": torch.tensor([0, 23, 64])}), "each row",
    ),
    "other offsets of keys": (called(BATCH | dict(cu_seq_lens_k=torch.tensor([0, 64]))), "cu_seq_lens_k"),
    "short positions": (called(BATCH | dict(position_ids=torch.arange(63)[None])), r"position_ids .*\(1, 63\)"),
    "positions that skip": (called(BATCH | dict(position_ids=2 * torch.arange(64)[None])), "skip .*token 1"),
    "short labels": (called(BATCH | dict(labels=BATCH["labels"][:, 1:])), r"labels must be \[B, S\]"),
    "labels as array": (called(BATCH | dict(labels=BATCH["labels"].numpy())), "labels must be a tensor"),
    "lists": (called({name: x.tolist() for name, x in BATCH.items()}), "input_ids must be a tensor"),
    "use_cache": (called(BATCH | dict(use_cache=True)), "use_cache=False"),
    "logits_to_keep": (called(BATCH | dict(logits_to_keep=1)), "logits_to_keep"),
    "output_attentions": (called(BATCH | dict(output_attentions=True)), "output_attentions"),
    "seq_idx": (called(BATCH | dict(seq_idx=torch.arange(64)[None] // 32)), "seq_idx .*token 32 of row 0"),
    "flat seq_idx": (called(BATCH | dict(seq_idx=torch.zeros(64))), r"seq_idx must be \[B, S\]"),
    "pixels": (called(BATCH | dict(pixel_values=torch.randn(1, 3, 28, 28))), "LlamaForCausalLM gets pixel_values"),
    "text": (called(BATCH | dict(text=["a", "b"])), r"\['text'\]"),
    "ignore_index": (called(IDS | {"ignore_index": 7}, "mamba2"), "ignore_index=7"),
    "offsets and other positions": (
        planned(OFFSETS | {"position_ids": torch.arange(64)[None]},
                lambda: tiny.config_of("llama")), "cu_seq_lens_q and position_ids .*token 23 of",
    ),
    "cross attention, gpt2": (
        called(BATCH | {"encoder_hidden_states": torch.randn(1, 64, 64)}, "gpt2", add_cross_attention=True),
        "encoder_hidden_states",
    ),
    "labels of padding": (called(PADDED | {"labels": PADDED["input_ids"]}), "18 tokens of padding have labels"),
    "RG-LRU": (attached(lambda: tiny.model_of("recurrent_gemma")), "not known to carry a state"),
    "qwen2_vl": (of_qwen2_vl, "pass position_ids"),
    "hunyuan_vl, offsets": (of_hunyuan("position_ids"), "pad the batch"),
    "hunyuan_vl, positions": (of_hunyuan("cu_seq_lens_q"), "pad the batch"),
    # masks and plans
    "dropout": (called(BATCH, attention_dropout=0.1), "attention dropout"),
    "layers": (called(BATCH, "gemma3", after=lambda m: _set(m.config, layer_types=3 * ["full_attention"])), "asks for"),
    "no window": (planned(BATCH, lambda: tiny.config_of("gemma3", sliding_window=None)), "sliding_window=None"),
    "window of 0": (planned(BATCH, lambda: tiny.config_of("mistral", sliding_window=0)), "sliding_window=0"),
    "no chunk": (planned(BATCH, lambda: tiny.config_of("llama4", attention_chunk_size=None)), "attention_chunk_size"),
    "bidirectional": (
        planned(BATCH, lambda: AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True)), "not causal",
    ),
    "no marks": (planned(BATCH, lambda: images.model_of("paligemma").config), "token_type_ids"),
    "few marks": (
        planned(BATCH | {"token_type_ids": torch.zeros(1, 7)}, lambda: images.model_of("paligemma").config),
        r"token_type_ids must be \[B, S\] = \(1, 64\)",
    ),
    "another window": (
        prepared(lambda: hf.make_plan(BATCH, tiny.config_of("mistral", sliding_window=9), 1), "mistral"),
        "'sliding_attention' read up to 9",
    ),
    "another chunk": (
        prepared(lambda: hf.make_plan(BATCH, tiny.config_of("llama4", attention_chunk_size=8), 1), "llama4"),
        "'chunked_attention' read up to 8",
    ),
    "fewer tokens": (
        prepared(of_others((23, 40))), r"\(63, 1\) tokens",
    ),
    "other documents": (
        prepared(of_others((24, 40))), "start at",
    ),
    "one document": (prepared(by_hand(spanwise.SpanMask.causal(64))), "documents start at"),
    "no documents": (prepared(by_hand(spanwise.SpanMask(SPANS.start, SPANS.end, 64))), "pass cu_seqlens"),
    "tree as documents": (
        prepared(by_hand(spanwise.SpanMask.tree([-1, 0, 0], [20, 20, 24])), batch=IDS), "pass tree=",
    ),
    "no mask of the model": (
        prepared(lambda: spanwise.make_plan(SPANS, 1, cu_seqlens=[0, 23, 64])), "full_attention",
    ),
    # losses
    "own loss": (called(BATCH, before=lambda m: _set(m, loss_function=print)), "loss function"),
    "loss replaced": (called(BATCH, after=lambda m: delattr(m, "_loss_function")), "replaced after"),
    "z-loss": (with_z_loss(False), "WithZLoss adds a term"),
    "z-loss in place": (with_z_loss(True), "WithZLoss adds a term"),
    # modes and caches
    "evaluation, packed": (lambda mesh: attached(lambda: tiny.model_of("llama").eval())(mesh)(**BATCH), "model.train"),
    "evaluation, padded": (lambda mesh: attached(lambda: tiny.model_of("llama").eval())(mesh)(**PADDED), "model.train"),
    "decoder alone": (
        lambda mesh: attached(lambda: tiny.model_of("llama"))(mesh).model(input_ids=BATCH["input_ids"]), "around it",
    ),
    "packed, no gradients": (evaluated(BATCH), PACKS),
    "packed, mamba2": (evaluated(BATCH, "mamba2"), PACKS),
    "offsets, decoder": (
        evaluated(OFFSETS, act=lambda m, batch: m.model(**batch)), PACKS,
    ),
    "packed, mask of ones": (evaluated(BATCH | {"attention_mask": torch.ones_like(IDS["labels"])}), PACKS),
    "packed and padded": (
        evaluated(IDS | {"position_ids": ANEW, "attention_mask": (torch.arange(64) < 59).long()[None]}), PACKS,
    ),
    "positions and other offsets": (
        evaluated(IDS | {"position_ids": ANEW, "cu_seq_lens_q": [0, 23, 64]}), PACKS,
    ),
    **{
        f"{name}, {argument}": (cached(name, argument, act), text)
        for name, argument in (("qwen3_next", "past_key_values"), ("mamba2", "cache_params"))
        for act, text in ((prepare, argument), (lambda model, batch: model(**batch), "KV cache, as with prefix tuning"))
    },
    # trees
    **{
        f"tree, {name}, {next(iter(changes), '')}": (called(TREE | changes, name), text)
        for name, changes, text in (
            ("llama", {"position_ids": torch.arange(5)[None]}, "the tree alone tells positions"),
            ("llama", {"tree": spanwise.TokenTree([-1], [4])}, "one of 4 tokens"),
            ("llama", {"tree": [-1, 0, 0]}, "spanwise.TokenTree"),
            ("llama", {"shift_labels": torch.zeros(1, 5, dtype=torch.long)}, "labels of a tree follow its edges"),
            ("llama", {"label_weights": torch.ones(1, 5), "tree": None}, "label_weights"),
            ("llama4", {}, "chunked attention"),
            ("qwen3_next", {}, "cannot follow the branches of a tree"),
            ("minimax", {}, "cannot follow the branches of a tree"),
            ("mixtral, auxiliary loss", {}, "shared prefixes once"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(ValueError, match=text):
        run_ranks(1, lambda rank, mesh: call(mesh))


def test_fewer_tokens_than_ranks() -> None:
    with pytest.raises(ValueError, match="a token on every rank"):
        tiny.train("llama", {"input_ids": torch.tensor([[5, 6]])}, 3)


def test_blocks_longer_than_the_batch() -> None:
    class First:
        def assign(self, problem: Any, num_ranks: int) -> list[int]:
            return [0] * problem.num_blocks

    with pytest.raises(ValueError, match="a token on every rank"):
        tiny.train("llama", BATCH, balancer=First())


def test_a_mixer_that_no_plan_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compute on a shard as if that were a whole batch."""
    monkeypatch.setattr(mixers, "_BEHIND", ())
    with pytest.raises(ValueError, match="JambaMambaMixer was called without the plan of its batch"):
        tiny.train("jamba", BATCH)


def test_no_pooler() -> None:
    model = BertModel(tiny.config_of("bert"), add_pooling_layer=False)
    run_ranks(1, lambda rank, mesh: hf.context_parallel(copy.deepcopy(model), mesh))
