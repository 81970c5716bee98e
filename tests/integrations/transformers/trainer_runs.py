"""Runs of trainers as ranks of the gloo pool, or as one process: what they log, and the weights they end with.

accelerate keeps its view of the processes in module state; each run starts from none of it.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tests.integrations.transformers import tiny

WORDS = 96  # of the tokenizer, below the vocabulary of the models
LOGGED = (
    "loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen", "total_flos", "train_loss", "eval_loss",
    "num_tokens", "entropy", "mean_token_accuracy",
)  # fmt: skip


@contextlib.contextmanager
def fresh_process(rank: int, world: int) -> Iterator[None]:
    """Without what an earlier run left in accelerate, and with torchrun's variables."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world) if world > 1 else {}
    names |= {"OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1, "HF_HUB_DISABLE_TELEMETRY": 1, "TQDM_DISABLE": 1}
    before = dict(os.environ)
    os.environ.update({name: str(x) for name, x in names.items()})
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()


def documents(count: int, seed: int = 0, shortest: int = 8, longest: int = 40, of_labels: float = 1.0) -> Any:
    """A dataset of ready `input_ids` and `labels`, of which a fraction counts."""
    import datasets

    draw = torch.Generator().manual_seed(seed)
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": []}
    for _ in range(count):
        length = int(torch.randint(shortest, longest + 1, (), generator=draw))
        ids = torch.randint(3, WORDS, (length,), generator=draw)
        skip = torch.rand(length, generator=draw) > of_labels
        rows["input_ids"].append(ids.tolist())
        rows["labels"].append(ids.masked_fill(skip, -100).tolist())
    return datasets.Dataset.from_dict(rows)


def tokenizer() -> Any:
    """Words "0", "1", … as tokens; made in code."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *map(str, range(3, WORDS))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch padded on the right."""
    length = max(len(row["input_ids"]) for row in rows)
    values = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor(
            [(x := row.get(name, [1] * len(row["input_ids"]))) + [fill] * (length - len(x)) for row in rows]
        )
        for name, fill in values.items()
    }


def model_of(name: str, **changes: Any) -> Any:
    torch.manual_seed(7)
    return tiny.model_of(name, **changes)


def arguments(kind: Any, folder: str, **changes: Any) -> Any:
    given: dict[str, Any] = dict(
        output_dir=folder,
        use_cpu=True,
        max_steps=20,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        learning_rate=3e-3,
        lr_scheduler_type="linear",
        max_grad_norm=0.5,
        weight_decay=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        include_num_input_tokens_seen="all",
        dataloader_pin_memory=False,
        seed=3,
    )
    return kind(**given | changes)


def result_of(trainer: Any) -> dict[str, Any]:
    """What a run logged, by step, and its weights."""
    from torch.distributed.tensor import DTensor

    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in trainer.model.named_parameters()
    }
    return {"logs": trainer.state.log_history, "weights": weights, "steps": trainer.state.global_step}


def scratch() -> str:
    return tempfile.mkdtemp(prefix="trainer-")


def run(rank: int, mesh: Any, made: Any, cut: bool = True, **options: Any) -> dict[str, Any]:
    """``made(cls, folder, **options)`` on a rank, where `cls` makes a trainer's class of a base: under context
    parallelism, or without."""
    from spanwise.integrations import transformers as hf

    def cls(base: Any) -> Any:
        return hf.trainer(base, mesh) if cut else base

    with fresh_process(rank, mesh.size()):
        return made(cls, **options)


def plain(
    cls: Any,
    folder: str | None = None,
    model: str = "llama",
    data: Any = None,
    eval_count: int = 0,
    resume: str | None = None,
    predict: bool = False,
    more: Any = None,
    **changes: Any,
) -> Any:
    """`transformers.Trainer` on padded documents."""
    import transformers

    trainer = cls(transformers.Trainer)(
        model_of(model),
        args=arguments(transformers.TrainingArguments, folder or scratch(), **changes),
        train_dataset=(data or documents)(22),
        eval_dataset=documents(eval_count, seed=5) if eval_count else None,
        data_collator=pad,
        **(more or {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    result = result_of(trainer)
    if predict:
        out = trainer.predict(documents(5, seed=6))
        result |= {"predictions": out.predictions, "label_ids": out.label_ids, "metrics": out.metrics}
    return result


def adapted(model: Any, lora: str) -> Any:
    """`model` with adapters, if they are "given" to the trainer."""
    import peft

    torch.manual_seed(11)
    return peft.get_peft_model(model, adapter()) if lora == "given" else model


def adapter() -> Any:
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def squared_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss that is no sum of cross-entropies."""
    scores = outputs.logits[:, :-1].float().log_softmax(-1)
    picked = scores.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    valid = labels[:, 1:] != -100
    return (picked.square() * valid).sum() / (valid.sum() if num_items_in_batch is None else num_items_in_batch)


def accuracy(prediction: Any) -> dict[str, float]:
    """A metric."""
    valid = prediction.label_ids[:, 1:] != -100
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    scores = prediction.predictions[prediction.label_ids != -100]
    return {"accuracy": (hits & valid).sum() / valid.sum(), "scores": float(np.abs(scores).sum())}


def sft(
    cls: Any, folder: str | None = None, model: str = "llama", lora: str = "", data: Any = None, eval_count: int = 0, more: Any = None, **changes: Any
) -> Any:
    """`trl.SFTTrainer` on documents of ready tokens."""
    import trl

    trainer = cls(trl.SFTTrainer)(
        adapted(model_of(model), lora),
        args=arguments(trl.SFTConfig, folder or scratch(), **{"max_length": 64} | changes),
        train_dataset=(data or documents)(22),
        eval_dataset=documents(eval_count, seed=5) if eval_count else None,
        processing_class=tokenizer(),
        peft_config=adapter() if lora == "made" else None,
        **(more or {}),
    )
    trainer.train()
    return result_of(trainer)


def dpo(
    cls: Any, folder: str | None = None, model: str = "llama", lora: str = "", eval_count: int = 0, more: Any = None, **changes: Any
) -> Any:
    """`trl.DPOTrainer` on ready tokens, with a reference model."""
    import trl

    trainer = cls(trl.DPOTrainer)(
        adapted(model_of(model), lora),
        ref_model=None if lora else model_of(model, seed=1),
        args=arguments(trl.DPOConfig, folder or scratch(), **{"max_length": 64} | changes),
        train_dataset=preferences(22),
        eval_dataset=preferences(eval_count) if eval_count else None,
        processing_class=tokenizer(),
        **(more or {}),
    )
    trainer.train()
    return result_of(trainer)


def conversations(count: int) -> Any:
    """Prompts and completions, of which completions are trained."""
    return preferences(count).rename_column("chosen", "completion").remove_columns("rejected")


def streamed(count: int) -> Any:
    return documents(count).to_iterable_dataset()


def preferences(count: int) -> Any:
    """Prompts with a chosen and a rejected answer, as words of `tokenizer`."""
    import datasets

    draw = torch.Generator().manual_seed(3)

    def words(low: int, high: int) -> str:
        length = int(torch.randint(low, high, (), generator=draw))
        return " ".join(map(str, torch.randint(3, WORDS, (length,), generator=draw).tolist()))

    rows = [dict(prompt=words(3, 9), chosen=" " + words(4, 20), rejected=" " + words(4, 20)) for _ in range(count)]
    return datasets.Dataset.from_list(rows)


def of_length(completions: list[Any], **_: Any) -> list[float]:
    """A reward."""
    return [sum(map(int, [w for w in c.split() if w.isdigit()])) / 100 for c in completions]


def grpo(
    cls: Any, folder: str | None = None, model: str = "llama", saved: str | None = None, more: Any = None, **changes: Any
) -> Any:
    """`trl.GRPOTrainer` whose completions are drawn by a generator that depends on the prompt and the step alone."""
    import trl

    class Fixed(trl.GRPOTrainer):
        def _generate(self, prompts: list[str]) -> Any:
            ids = [self.processing_class(p)["input_ids"] for p in prompts]
            first = self.accelerator.process_index * len(prompts)
            completions = []
            for index in range(len(prompts)):
                draw = torch.Generator().manual_seed(self._step * 1000 + first + index)
                length = int(torch.randint(2, 12, (), generator=draw))
                completions.append(torch.randint(3, WORDS, (length,), generator=draw).tolist())
            texts = [self.processing_class.decode(c) for c in completions]
            return ids, completions, None, texts, None, {}, None, None

    trainer = cls(Fixed)(
        saved or model_of(model),
        reward_funcs=of_length,
        args=arguments(
            trl.GRPOConfig,
            folder or scratch(),
            **dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=16) | changes,
        ),
        train_dataset=preferences(22).select_columns(["prompt"]),
        processing_class=tokenizer(),
        **(more or {}),
    )
    trainer.train()
    return result_of(trainer)


def sampled(cls: Any, **changes: Any) -> Any:
    """`trl.GRPOTrainer` with completions of its own."""
    import trl

    trainer = cls(trl.GRPOTrainer)(
        model_of("llama"),
        reward_funcs=of_length,
        args=arguments(
            trl.GRPOConfig,
            scratch(),
            **dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=8) | changes,
        ),
        train_dataset=preferences(22).select_columns(["prompt"]),
        processing_class=tokenizer(),
    )
    trainer.train()
    return result_of(trainer)


def difference(got: dict[str, Any], want: dict[str, Any], names: tuple[str, ...] = LOGGED) -> str:
    """What two runs logged that differs, and by how much; for the reader of a failure."""
    lines = []
    for a, b in zip(got["logs"], want["logs"], strict=True):
        for name in names:
            if name in b and abs(a[name] - b[name]) > 1e-5 * max(1e-3, abs(b[name])):
                lines.append(f"step {b['step']}: {name} {a[name]} instead of {b[name]}")
    for name, x in want["weights"].items():
        apart = (got["weights"][name] - x).abs().max().item()
        if apart > 1e-4:
            lines.append(f"{name} is {apart:.1e} apart")
    return "\n".join(lines[:20])
