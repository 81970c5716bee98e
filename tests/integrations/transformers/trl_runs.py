"""Runs of trl's trainers: what they log, and their weights; see `trainer_runs`."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.transformers import images
from tests.integrations.transformers import trainer_runs as runs

OF_TRL = ("num_tokens", "entropy", "mean_token_accuracy")


def preferences(count: int) -> Any:
    """Prompts with a chosen and a rejected answer, as words of `tokenizer`."""
    import datasets

    draw = torch.Generator().manual_seed(3)

    def words(low: int, high: int) -> str:
        length = int(torch.randint(low, high, (), generator=draw))
        return " ".join(map(str, torch.randint(3, runs.WORDS, (length,), generator=draw).tolist()))

    rows = [dict(prompt=words(3, 9), chosen=" " + words(4, 20), rejected=" " + words(4, 20)) for _ in range(count)]
    return datasets.Dataset.from_list(rows)


def completions(count: int) -> Any:
    """Prompts and completions, of which completions are trained."""
    return preferences(count).rename_column("chosen", "completion").remove_columns("rejected")


def conversations(count: int) -> Any:
    """Messages, of which the assistant's are trained."""
    import datasets

    def messages(row: dict[str, str]) -> list[dict[str, str]]:
        turns = [("user", row["prompt"]), ("assistant", row["chosen"]), ("user", "5 6"), ("assistant", row["rejected"])]
        return [{"role": role, "content": text.strip()} for role, text in turns]

    return datasets.Dataset.from_list([{"messages": messages(row)} for row in preferences(count)])


def digits(completions: list[Any], **_: Any) -> list[float]:
    """A reward."""
    return [sum(map(int, [w for w in c.split() if w.isdigit()])) / 100 for c in completions]


def sft(
    cls: Any,
    model: str = "llama",
    lora: str = "",
    data: Any = runs.documents,
    eval_count: int = 0,
    resume: str | None = None,
    **changes: Any,
) -> Any:
    """`trl.SFTTrainer`."""
    import trl

    trainer = cls(trl.SFTTrainer)(
        runs.model_of(model, lora),
        args=runs.arguments(trl.SFTConfig, **{"max_length": 64} | changes),
        train_dataset=data(22),
        eval_dataset=runs.documents(eval_count, seed=5) if eval_count else None,
        processing_class=runs.tokenizer(),
        peft_config=runs.adapter() if lora == "made" else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    return runs.result_of(trainer)


def behind_images(name: str) -> Any:
    """A collator of preferences that puts an image in front of each prompt."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    collate = DataCollatorForPreference(pad_token_id=0)

    def collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = collate(rows)
        front = images.documents_of((7 + images.TOKENS,), (True,))[0][5:].expand(2 * len(rows), -1)
        for key, x in (("input_ids", front), ("attention_mask", front > 0), ("completion_mask", front < 0)):
            batch[key] = torch.cat([x.to(batch[key]), batch[key]], dim=1)
        return batch | images.marks_of(name, batch["input_ids"]) | images.pixels_of(name, 2 * len(rows))

    return collator


def dpo(
    cls: Any,
    model: str = "llama",
    lora: str = "",
    eval_count: int = 0,
    saved: str | None = None,
    kind: str = "DPO",
    **changes: Any,
) -> Any:
    """`trl.DPOTrainer` or `trl.KTOTrainer`, with a reference model where there are no adapters."""
    import datasets
    import trl

    more, model_of = {}, runs.model_of
    if model in images.MODELS:
        more, model_of = {"data_collator": behind_images(model)}, lambda name, *_, **__: images.model_of(name)
        changes |= {"remove_unused_columns": False, "ddp_find_unused_parameters": True}  # of the encoder
    trainer = cls(getattr(trl, f"{kind}Trainer"))(
        model_of(model, lora),
        ref_model=None if lora else model_of(model, seed=1),
        args=runs.arguments(getattr(trl, f"{kind}Config"), **{"max_length": 64} | changes),
        train_dataset=datasets.load_from_disk(saved) if saved else preferences(22),
        eval_dataset=preferences(eval_count) if eval_count else None,
        processing_class=runs.tokenizer(),
        **more,
    )
    trainer.train()
    return runs.result_of(trainer)


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that depend on prompt and step alone."""
    first = trainer.accelerator.process_index * len(prompts)
    completions = []
    for index in range(first, first + len(prompts)):
        draw = torch.Generator().manual_seed(trainer._step * 1000 + index)
        length = int(torch.randint(2, 12, (), generator=draw))
        completions.append(torch.randint(3, runs.WORDS, (length,), generator=draw).tolist())
    ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[0.0] * len(c) for c in completions]}


def grpo(
    cls: Any,
    model: str = "llama",
    lora: str = "",
    saved: str | None = None,
    sampled: bool = False,
    eval_count: int = 0,
    **changes: Any,
) -> Any:
    """`trl.GRPOTrainer`; unless `sampled`, on `rollouts`."""
    import trl

    shape = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=12)
    trainer = cls(trl.GRPOTrainer)(
        saved or runs.model_of(model, lora),
        reward_funcs=digits,
        args=runs.arguments(trl.GRPOConfig, **shape | changes),
        train_dataset=preferences(22).select_columns(["prompt"]),
        eval_dataset=preferences(eval_count).select_columns(["prompt"]) if eval_count else None,
        processing_class=runs.tokenizer(),
        rollout_func=None if sampled else rollouts,
    )
    trainer.train()
    return runs.result_of(trainer)
