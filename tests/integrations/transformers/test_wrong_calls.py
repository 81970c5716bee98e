"""What context parallelism of Hugging Face models refuses; each error names the argument, or the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, BertModel, DynamicCache, FNetConfig, FNetModel, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import spanwise
from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers import mixers
from tests.integrations.transformers import images, tiny
from tests.ranks.harness import run_ranks

DOCUMENTS = tiny.documents_of((23, 41))
BATCH = tiny.packed(DOCUMENTS)
IDS = {"input_ids": BATCH["input_ids"], "labels": BATCH["labels"]}
OFFSETS = tiny.packed(DOCUMENTS, "cu_seq_lens_q")
PADDED = tiny.padded(DOCUMENTS, "left")
ANEW = torch.tensor([[*range(30), *range(34)]])
SPANS = spanwise.SpanMask.documents([0, 23, 64])
TREE: dict[str, Any] = dict.fromkeys(("input_ids", "labels"), torch.arange(5, 10)[None])
TREE["tree"] = spanwise.TokenTree([-1, 0, 0], [2, 1, 2])
PACKS = "packs several documents.*hf.prepare"
Call = Callable[[Any], Any]  # of a mesh


def run(model: Any, batch: Any) -> None:
    model(**batch)


def prepare(model: Any, batch: Any) -> None:
    hf.prepare(batch, model)


def called(
    batch: Any = BATCH, model: Any = "llama", *, before: Any = id, after: Any = id, act: Any = run,
    evaluated: bool = False, **changes: Any,
) -> Call:  # fmt: skip
    """A step of a model, to which something was done before or after `context_parallel`."""

    def call(mesh: Any) -> None:
        made = tiny.model_of(model, **changes) if isinstance(model, str) else model()
        made.train(not evaluated)
        before(made)
        hf.context_parallel(made, mesh)
        after(made)
        with torch.set_grad_enabled(not evaluated):
            act(made, batch)

    return call


def planned(name: str, batch: dict[str, Any] = BATCH, **changes: Any) -> Call:
    """A plan for a small config, or for images or a default one."""
    made = tiny.config_of if changes else AutoConfig.for_model
    return lambda _: hf.make_plan(batch, PALIGEMMA if name == "paligemma" else made(name, **changes), 2)


def prepared(plan: Callable[[], Any], name: str = "llama", batch: dict[str, Any] = BATCH) -> Call:
    return called(batch, name, act=lambda model, batch: hf.prepare(batch, model, plan()))


def other_plan(name: str, lengths: tuple[int, ...] = (23, 41), **changes: Any) -> Call:
    batch = tiny.packed(tiny.documents_of(lengths))
    return prepared(lambda: hf.make_plan(batch, tiny.config_of(name, **changes), 1), name)


def by_hand(mask: Any, batch: dict[str, Any] = BATCH) -> Call:
    return prepared(lambda: spanwise.make_plan({"full_attention": mask}, 1), batch=batch)


def of_images(name: str, left_out: str) -> Call:
    def call(mesh: Any) -> None:
        model = images.model_of(name)
        documents = images.documents_of((29, 31), (True, False), images.tokens_of(name, model))
        batch = images.batch_of(name, documents, "packed", model)
        hf.context_parallel(model, mesh)(**{n: x for n, x in batch.items() if n != left_out})

    return call


def attach(mesh: Any, **options: Any) -> None:
    hf.context_parallel(tiny.model_of("llama"), mesh, **options)(**BATCH)


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
        out.loss = out.loss.add_(term) if self.in_place else out.loss + term
        return out


class OwnMixer(Qwen3NextGatedDeltaNet):
    """A mixer whose forward is not that of transformers."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states.cumsum(dim=1), **kwargs)


def given(place: Callable[[Any], Any] = lambda m: m, **values: Any) -> Callable[[Any], None]:
    """Sets attributes of a model, or of a module in it."""

    def act(model: Any) -> None:
        for name, value in values.items():
            setattr(place(model), name, value)

    return act


def llama(cls: Any) -> Callable[[], Any]:
    return lambda: cls(tiny.config_of("llama"))


def own_attention(model: Any) -> None:
    transformers.AttentionInterface.register("mine", lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs))
    model.set_attn_implementation("mine")


def cached(name: str, argument: str, act: Any = run) -> Call:
    return called(model=name, act=lambda m, batch: act(m, batch | {argument: DynamicCache(config=m.config)}))


def places(condition: torch.Tensor) -> torch.Tensor:
    return condition.long()[None]


AT = torch.arange(64)
PALIGEMMA = images.model_of("paligemma").config
# Steps of a Llama: its batch, and what the error names.
BATCHES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"labels": BATCH["labels"]}, "input_ids or inputs_embeds"),
    (BATCH | dict(attention_mask=places(AT > 0)), "token 23 of row 0"),
    (IDS | dict(attention_mask=torch.ones(1, 1, 64, 64)), r"\[B, S\] = \(1, 64\)"),
    (IDS | dict(attention_mask=torch.zeros(1, 64)), "and a token"),
    (IDS | dict(attention_mask=places(AT != 30)), "token 31"),
    (BATCH | dict(cu_seq_lens_q=torch.tensor([0, 70])), "cu_seq_lens_q .* all 64 tokens"),
    ({"input_ids": IDS["input_ids"].view(2, 32), "cu_seq_lens_q": torch.tensor([0, 23, 64])}, "each row"),
    (BATCH | dict(cu_seq_lens_k=torch.tensor([0, 64])), "cu_seq_lens_k"),
    (OFFSETS | dict(position_ids=AT[None]), "cu_seq_lens_q and position_ids .*token 23 of"),
    (BATCH | dict(position_ids=2 * AT[None]), "skip .*token 1"),
    (PADDED | dict(labels=PADDED["input_ids"]), "18 tokens of padding have labels"),
    (BATCH | dict(use_cache=True), "use_cache=False"),
    (BATCH | dict(logits_to_keep=1), "logits_to_keep"),
    (BATCH | dict(output_attentions=True), "output_attentions"),
    (BATCH | dict(seq_idx=AT[None] // 32), "seq_idx .*token 32 of row 0"),
    (BATCH | dict(pixel_values=torch.randn(1, 3, 28, 28)), "LlamaForCausalLM gets pixel_values"),
    (TREE | dict(tree=spanwise.TokenTree([-1], [4])), "one of 4 tokens"),
    (TREE | dict(shift_labels=torch.zeros(1, 5, dtype=torch.long)), "labels of a tree follow its edges"),
    (TREE | dict(label_weights=torch.ones(1, 5), tree=None), "label_weights"),
)
CALLS: tuple[tuple[Call, str], ...] = (
    # models
    (planned("gemma3_text", use_bidirectional_attention=True), "not causal"),
    (called(model=lambda: BertModel(tiny.config_of("bert"))), "the pooler of BertModel"),
    (called(model=lambda: FNetModel(FNetConfig(num_hidden_layers=1), add_pooling_layer=False)), "Fourier"),
    (called(model=llama(transformers.LlamaForSequenceClassification)), "LlamaForSequenceClassification"),
    (called(model="opt", layerdrop=0.5), "layerdrop"),
    (called(model="qwen3_next", before=given(lambda m: m.model.layers[0].linear_attn, __class__=OwnMixer)), "known"),
    (called(before=given(lambda m: m.model.layers[1], conv=nn.Conv1d(8, 8, 4))), "layers.1.conv"),
    (called(model="bamba", before=given(lambda m: m.model.layers[0].mamba, forward=print)), "BambaMixer"),
    (called(before=own_attention), "attention 'mine' of LlamaForCausalLM"),
    (called(after=lambda m: m.set_attn_implementation("sdpa")), "'sdpa' after hf.context_parallel"),
    (lambda mesh: hf.context_parallel(hf.context_parallel(tiny.model_of("llama"), mesh), mesh), "already"),
    (called(IDS, llama(WithoutKeywords), evaluated=True, act=lambda m, batch: m(**hf.prepare(batch, m))),
     "WithoutKeywords does not pass the plan on"),
    (of_images("qwen2_vl", "position_ids"), "pass position_ids"),
    (of_images("hunyuan_vl", "position_ids"), "pad the batch"),
    # arguments
    (called(IDS | {"ignore_index": 7}, "mamba2"), "ignore_index=7"),
    (called(BATCH | {"encoder_hidden_states": torch.randn(1, 64, 64)}, "gpt2", add_cross_attention=True),
     "encoder_hidden_states"),
    (cached("qwen3_next", "past_key_values", prepare), "past_key_values"),
    (cached("qwen3_next", "past_key_values"), "KV cache, as with prefix tuning"),
    # masks and plans
    (called(attention_dropout=0.1), "attention dropout"),
    (called(model="gemma3", after=lambda m: given(layer_types=3 * ["full_attention"])(m.config)), "asks for"),
    (planned("gemma3", sliding_window=None), "sliding_window=None"),
    (planned("llama4", attention_chunk_size=None), "attention_chunk_size"),
    (planned("paligemma"), "token_type_ids"),
    (other_plan("mistral", sliding_window=9), "'sliding_attention' read up to 9"),
    (other_plan("llama4", attention_chunk_size=8), "'chunked_attention' read up to 8"),
    (other_plan("llama", (23, 40)), r"\(63, 1\) tokens"),
    (other_plan("llama", (24, 40)), "start at"),
    (by_hand(spanwise.SpanMask.causal(64)), "documents start at"),
    (by_hand(spanwise.SpanMask(SPANS.start, SPANS.end, 64)), "pass cu_seqlens"),
    (by_hand(spanwise.SpanMask.tree([-1, 0, 0], [20, 20, 24]), IDS), "pass tree="),
    (prepared(lambda: spanwise.make_plan(SPANS, 1, cu_seqlens=[0, 23, 64])), "full_attention"),
    (called(TREE, "llama4"), "chunked attention"),
    (called(TREE, "minimax"), "cannot follow the branches of a tree"),
    (called(TREE, "mixtral, auxiliary loss"), "shared prefixes once"),
    (called(TREE, "deepseek_v32"), "tree"),
    # losses
    (called(before=given(loss_function=print)), "loss function"),
    (called(after=lambda m: delattr(m, "_loss_function")), "replaced after"),
    (called(model=llama(WithZLoss)), "WithZLoss adds a term"),
    (called(model=llama(WithZLoss), before=given(in_place=True)), "WithZLoss adds a term"),
    # evaluation
    (called(before=nn.Module.eval), "model.train"),
    (called(act=lambda m, batch: m.model(input_ids=batch["input_ids"])), "around it"),
    (called(evaluated=True), PACKS),
    (called(OFFSETS, evaluated=True, act=lambda m, batch: m.model(**batch)), PACKS),
    (called(BATCH | {"attention_mask": torch.ones_like(IDS["labels"])}, evaluated=True), PACKS),
    (called(IDS | {"position_ids": ANEW, "attention_mask": places(AT < 59)}, evaluated=True), PACKS),
    (called(IDS | {"position_ids": ANEW, "cu_seq_lens_q": [0, 23, 64]}, evaluated=True), PACKS),
)  # fmt: skip


@pytest.mark.parametrize(("call", "text"), [*((called(batch), text) for batch, text in BATCHES), *CALLS])
def test_wrong(call: Call, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run_ranks(1, lambda rank, mesh: call(mesh))


def test_a_rank_without_a_token_or_a_mixer_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a token on every rank"):
        tiny.train("llama", {"input_ids": torch.tensor([[5, 6]])}, 3)
    monkeypatch.setattr(mixers, "_BEHIND", ())  # it would compute on a shard as if that were a whole batch
    with pytest.raises(ValueError, match="JambaMambaMixer was called without the plan of its batch"):
        tiny.train("jamba", BATCH)
