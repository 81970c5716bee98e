"""Runs of trainers of transformers and trl on ranks of the gloo pool: what they log, and their weights.

accelerate keeps its view of the processes in module state; each run starts from none of it.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny

WORDS = 96  # of the tokenizer, below the vocabulary of the models
Rows = list[dict[str, Any]]
# Names that are logged and compared, by trainer.
LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen", "total_flos", "train_loss")
_OF_PREFERENCES = (*LOGGED, "logps/chosen", "logits/rejected", "num_tokens", "entropy")
NAMES = {
    "": LOGGED,
    "SFT": (*LOGGED, "num_tokens", "entropy", "mean_token_accuracy"),
    "DPO": (*_OF_PREFERENCES, "rewards/margins", "rewards/accuracies", "mean_token_accuracy"),
    "KTO": (*_OF_PREFERENCES, "kl", "rewards/chosen"),
    "GRPO": ("loss", "grad_norm", "reward", "reward_std", "entropy", "num_input_tokens_seen"),
}
OF_EVALUATION = {"SFT": ("eval_loss", "eval_entropy"), "GRPO": ("eval_loss", "eval_reward")}
# 7 is odd: the last batch is not full.
EVALUATED: dict[str, Any] = dict(eval_count=7, eval_strategy="steps", eval_steps=3)
_FSDP_CONFIG = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
_FSDP_CONFIG |= {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


def run(rank: int, mesh: Any, made: Callable[..., Any], cut: bool = True, **options: Any) -> Any:
    """``made(cls, **options)`` on a rank, where ``cls(base)`` is the trainer's class."""

    def cls(base: Any) -> Any:
        base = sharded(base) if options.get("fsdp") else base
        return hf.trainer(base, mesh) if cut else base

    with fresh_process(rank, mesh.size()):
        return made(cls, **options)


def compare(
    pool: Any, made: Any, *names: str, dp: int = 1, cp: int = 2, shard: bool = False, close: float = 1e-5,
    axes: tuple[str, str] = ("dp_shard", "cp"), **options: Any,
) -> list[Any]:  # fmt: skip
    """Every rank under context parallelism, and first a process that is one of as many as there are cp groups."""
    kind = options.get("kind", "")
    names += NAMES[kind] + (OF_EVALUATION.get(kind, ("eval_loss",)) if "eval_count" in options else ())
    want = pool.run(dp, run, made, cut=False, mesh_dim_names=("dp",), **options)[0]
    shape = (dp, cp) if axes[1] == "cp" else (cp, dp)
    options |= dict(fsdp=True, fsdp_config=_FSDP_CONFIG) if shard else {}
    got = pool.run(dp * cp, run, made, mesh_shape=shape, mesh_dim_names=axes, **options)
    for result in got:
        assert result["sharded"] is shard
        check(result, want, *names, close=close)
    return [want, *got]


@contextlib.contextmanager
def fresh_process(rank: int, world: int) -> Iterator[None]:
    """Without what an earlier run left in accelerate, with torchrun's variables, and silent."""
    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world) if world > 1 else {}
    names |= {"OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1, "HF_HUB_DISABLE_TELEMETRY": 1}
    before = dict(os.environ)
    os.environ.update({name: str(x) for name, x in names.items()})
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    try:
        with warnings.catch_warnings(), silent[0], silent[1]:
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()


def sharded(base: Any) -> Any:
    """`base` with accelerate's FSDP2, which accelerate takes for accelerators alone, on the CPU."""

    class Sharded(base):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            state = self.accelerator.state
            state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # a later AcceleratorState() reads it
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    return Sharded


# --- data and models ----------------------------------------------------------------------------------------------


def model_of(name: str, lora: str = "", **changes: Any) -> Any:
    """A tiny model; with adapters, if they are "given" to the trainer."""
    model = tiny.model_of(name, **changes)
    torch.manual_seed(11)
    return peft.get_peft_model(model, adapter()) if lora == "given" else model


def adapter() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def documents(count: int, seed: int = 0) -> Any:
    """A dataset of `input_ids` and `labels`, some of which do not count."""
    draw, rows = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        ids = _words(draw, 8, 41)
        skipped = torch.rand(len(ids), generator=draw) > 0.8
        rows.append({"input_ids": ids.tolist(), "labels": ids.masked_fill(skipped, -100).tolist()})
    return datasets.Dataset.from_list(rows)


def _words(draw: torch.Generator, low: int, high: int) -> torch.Tensor:
    length = int(torch.randint(low, high, (), generator=draw))
    return torch.randint(3, WORDS, (length,), generator=draw)


def preferences(count: int, seed: int = 3) -> Any:
    """Prompts with a chosen and a rejected answer, as words of `tokenizer`."""
    draw, sizes = torch.Generator().manual_seed(seed), {"prompt": (3, 9), "chosen": (4, 20), "rejected": (4, 20)}

    def text(name: str) -> str:
        return " " * (name != "prompt") + " ".join(map(str, _words(draw, *sizes[name]).tolist()))

    return datasets.Dataset.from_list([{name: text(name) for name in sizes} for _ in range(count)])


def completions(count: int) -> Any:
    """Prompts and completions, of which completions are trained."""
    return preferences(count).rename_column("chosen", "completion").remove_columns("rejected")


def tokenizer() -> Any:
    """Words "3", "4", … as tokens; made in code."""
    words = ["<pad>", "<s>", "</s>", *map(str, range(3, WORDS))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **tokens)


def pad(rows: Rows) -> dict[str, torch.Tensor]:
    """A batch padded on the right."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = [torch.tensor(row.get("labels", row["input_ids"])) for row in rows]
    return tiny.padded(ids, "right") | {"labels": tiny.padded(labels, "right")["labels"]}


def pack(rows: Rows) -> dict[str, torch.Tensor]:
    """A batch of one row, in which first tokens of documents have a label, which no token of theirs predicts."""
    return tiny.packed([torch.tensor(row["input_ids"]) for row in rows])


def pack_labelled(rows: Rows) -> dict[str, torch.Tensor]:
    """The same without these labels."""
    batch = pack(rows)
    return batch | {"labels": batch["labels"].masked_fill(batch["position_ids"] == 0, -100)}


def pad_at_random(rows: Rows) -> dict[str, torch.Tensor]:
    """A batch with random tokens, which differ between processes."""
    batch, draw = pad(rows), torch.Generator().manual_seed(os.getpid())
    return batch | {"input_ids": torch.randint(3, WORDS, batch["input_ids"].shape, generator=draw)}


def flattened(rows: Rows) -> Any:
    """A batch of transformers' collator, with offsets for flash attention."""
    return transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)


def digits(completions: list[Any], **_: Any) -> list[float]:
    """A reward."""
    return [sum(map(int, [w for w in c.split() if w.isdigit()])) / 100 for c in completions]


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that depend on prompt and step alone."""
    first = trainer._step * 1000 + trainer.accelerator.process_index * len(prompts)
    drawn = [_words(torch.Generator().manual_seed(first + i), 2, 12).tolist() for i in range(len(prompts))]
    ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    return {"prompt_ids": ids, "completion_ids": drawn, "logprobs": [[0.0] * len(c) for c in drawn]}


# --- trainers -------------------------------------------------------------------------------------------------------


def arguments(kind: Any, **changes: Any) -> Any:
    given: dict[str, Any] = dict(
        output_dir=changes.pop("folder", None) or tempfile.mkdtemp(prefix="trainer-"),
        optim="sgd",  # its steps show the scale of gradients, and do not blow up rounding of small ones as Adam's
        use_cpu=True, max_steps=6, per_device_train_batch_size=2, per_device_eval_batch_size=2, learning_rate=0.2,
        max_grad_norm=0.5, weight_decay=0.01, logging_steps=1, save_strategy="no", report_to="none", bf16=False,
        include_num_input_tokens_seen="all", dataloader_pin_memory=False, seed=3,
    )  # fmt: skip
    return kind(**given | changes)


def train(
    cls: Any, kind: str = "", model: str = "llama", lora: str = "", data: Any = None, collator: Any = None,
    eval_count: int = 0, saved: str | None = None, resume: str | None = None, predict: bool = False, more: Any = None,
    config: Any = None, **changes: Any,
) -> Any:  # fmt: skip
    """`transformers.Trainer`, or trl's trainer of a `kind`: "SFT", "DPO", "KTO" or "GRPO"."""
    more, made, of_documents = dict(more or {}), model_of(model, lora, **(config or {})), documents
    base, arguments_of = transformers.Trainer, transformers.TrainingArguments
    if kind:
        base, arguments_of = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
        more |= {"processing_class": tokenizer(), "peft_config": adapter() if lora == "made" else None}
        changes = {"max_length": 64} | changes if kind != "GRPO" else changes
    if kind in ("DPO", "KTO"):
        of_documents = preferences
        more |= {"ref_model": None if lora else model_of(model, seed=1)}
    elif kind == "GRPO":
        of_documents = preferences
        changes = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=12) | changes
        more |= {"reward_funcs": digits, "rollout_func": None if changes.pop("sampled", False) else rollouts}
    elif not kind:
        more |= {"data_collator": collator or pad}
    trainer = cls(base)(
        model=saved or made,
        args=arguments(arguments_of, **changes),
        train_dataset=(data or of_documents)(22),
        eval_dataset=of_documents(eval_count, seed=5) if eval_count else None,
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    parameters = dict(trainer.model.named_parameters())
    weights = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in parameters.items()}
    sharded = any(isinstance(p, DTensor) for p in parameters.values())  # the root's are whole after an evaluation
    result = {"logs": trainer.state.log_history, "weights": weights, "sharded": sharded}
    if predict:
        out = trainer.predict(documents(5, seed=6))
        result |= {"predictions": out.predictions, "label_ids": out.label_ids}
    return result


def check(got: dict[str, Any], want: dict[str, Any], *names: str, close: float = 1e-5) -> None:
    """Both runs logged the same, and `names` among it; counts are equal, and weights within 10 times `close`."""
    assert len(got["logs"]) == len(want["logs"]) and set(names) <= set().union(*want["logs"])
    apart = []
    for a, b in zip(got["logs"], want["logs"], strict=True):
        for name in (n for n in names if n in b):
            floor = 1.0 if name.startswith(("rewards/", "kl")) else 1e-3  # differences of log-probabilities
            limit = 0 if name.startswith("num_") else close * max(floor, abs(b[name]))
            if not abs(a[name] - b[name]) <= limit:
                apart.append(f"step {b['step']}: {name} is {a[name]} instead of {b[name]}")
    distances = {name: (got["weights"][name] - x).abs().max().item() for name, x in want["weights"].items()}
    apart += [f"{name} is {distance:.1e} apart" for name, distance in distances.items() if distance > 10 * close]
    assert not apart, "\n".join(apart[:20])
