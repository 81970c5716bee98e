"""Runs of trainers on ranks of the gloo pool, under context parallelism or without: what they log, and their weights.

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

import numpy as np
import torch

from tests.integrations.transformers import images, tiny

WORDS = 96  # of the tokenizer, below the vocabulary of the models
LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen", "total_flos", "train_loss")
FSDP: dict[str, Any] = dict(
    fsdp=True,
    fsdp_config={
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "FULL_STATE_DICT",
    },
)


def run(rank: int, mesh: Any, made: Callable[..., Any], cut: bool = True, **options: Any) -> Any:
    """``made(cls, **options)`` on a rank, where ``cls(base)`` is the trainer's class."""
    from spanwise.integrations import transformers as hf

    def cls(base: Any) -> Any:
        base = sharded(base) if options.get("fsdp") else base
        return hf.trainer(base, mesh) if cut else base

    with fresh_process(rank, mesh.size()):
        return made(cls, **options)


@contextlib.contextmanager
def fresh_process(rank: int, world: int) -> Iterator[None]:
    """Without what an earlier run left in accelerate, with torchrun's variables, and silent."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world) if world > 1 else {}
    names |= {"OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1, "HF_HUB_DISABLE_TELEMETRY": 1}
    before = dict(os.environ)
    os.environ.update({name: str(x) for name, x in names.items()})
    try:
        with warnings.catch_warnings(), _silent():
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
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    class Sharded(base):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            state = self.accelerator.state
            state.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # a later AcceleratorState() reads it
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    return Sharded


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# --- data and models ----------------------------------------------------------------------------------------------


def model_of(name: str, lora: str = "", **changes: Any) -> Any:
    """A tiny model; with adapters, if they are "given" to the trainer."""
    model = tiny.model_of(name, **changes)
    if lora != "given":
        return model
    import peft

    torch.manual_seed(11)
    return peft.get_peft_model(model, adapter())


def adapter() -> Any:
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def documents(count: int, seed: int = 0) -> Any:
    """A dataset of `input_ids` and `labels`, some of which do not count."""
    import datasets

    draw = torch.Generator().manual_seed(seed)
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": []}
    for _ in range(count):
        length = int(torch.randint(8, 41, (), generator=draw))
        ids = torch.randint(3, WORDS, (length,), generator=draw)
        skip = torch.rand(length, generator=draw) > 0.8
        rows["input_ids"].append(ids.tolist())
        rows["labels"].append(ids.masked_fill(skip, -100).tolist())
    return datasets.Dataset.from_dict(rows)


def streamed(count: int) -> Any:
    return documents(count).to_iterable_dataset()


_CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}3 {{ m.content }} {% else %}4 {% generation %}{{ m.content }} "
    "</s> {% endgeneration %}{% endif %}{% endfor %}"
)


def tokenizer() -> Any:
    """Words "3", "4", … as tokens; made in code."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *map(str, range(3, WORDS))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = _CHAT
    return made


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch padded on the right."""
    length = max(len(row["input_ids"]) for row in rows)
    batch = {}
    for name, fill in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
        values = [row.get(name, [1] * len(row["input_ids"])) for row in rows]
        batch[name] = torch.tensor([x + [fill] * (length - len(x)) for x in values])
    return batch


def pack(rows: list[dict[str, Any]], first: bool = True) -> dict[str, torch.Tensor]:
    """A batch of one row; `first` tokens of documents have a label, which no token of theirs predicts."""
    positions = [torch.arange(len(row["input_ids"])) for row in rows]
    labels = [torch.tensor(row["input_ids"]) for row in rows]
    if not first:
        labels = [x.index_fill(0, torch.tensor([0]), -100) for x in labels]
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {n: torch.cat(x)[None] for n, x in (("input_ids", ids), ("labels", labels), ("position_ids", positions))}


def pack_without_first(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return pack(rows, first=False)


def pad_at_random(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch with random tokens, which differ between processes."""
    batch = pad(rows)
    random = torch.randint(3, WORDS, batch["input_ids"].shape, generator=torch.Generator().manual_seed(os.getpid()))
    return batch | {"input_ids": random}


def flattened(rows: list[dict[str, Any]]) -> Any:
    """A batch of transformers' collator, with offsets for flash attention."""
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)


def squared_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss that is no sum of cross-entropies."""
    scores = outputs.logits[:, :-1].float().log_softmax(-1)
    picked = scores.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    valid = labels[:, 1:] != -100
    return (picked.square() * valid).sum() / (valid.sum() if num_items_in_batch is None else num_items_in_batch)


def accuracy(prediction: Any) -> dict[str, float]:
    """A metric of labels and logits; logits at padding are not compared."""
    valid = prediction.label_ids[:, 1:] != -100
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    scores = np.abs(prediction.predictions[prediction.label_ids != -100])
    return {"accuracy": (hits & valid).sum() / valid.sum(), "scores": float(scores.sum())}


def of_inputs(prediction: Any) -> dict[str, float]:
    """Metrics of the inputs and the losses of batches."""
    return {"ids": float((prediction.inputs > 0).sum()), "losses": float(prediction.losses.sum())}


class Batched:
    """`accuracy`, batch by batch."""

    def __init__(self) -> None:
        self.hits = self.count = 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        valid = prediction.label_ids[:, 1:] != -100
        hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        self.hits, self.count = self.hits + int((hits & valid).sum()), self.count + int(valid.sum())
        result = {"accuracy": self.hits / self.count, "count": float(self.count)}
        if compute_result:
            self.hits = self.count = 0
        return result


# --- trainers -------------------------------------------------------------------------------------------------------


def arguments(kind: Any, **changes: Any) -> Any:
    given: dict[str, Any] = dict(
        output_dir=changes.pop("folder", None) or tempfile.mkdtemp(prefix="trainer-"),
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        optim="sgd",  # its steps show the scale of gradients, and do not blow up rounding of small ones as Adam's
        learning_rate=0.2,
        max_grad_norm=0.5,
        weight_decay=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        include_num_input_tokens_seen="all",
        dataloader_pin_memory=False,
        seed=3,
    )
    return kind(**given | changes)


def plain(
    cls: Any,
    model: str = "llama",
    data: Any = documents,
    collator: Any = pad,
    eval_count: int = 0,
    resume: str | None = None,
    predict: bool = False,
    stop: int = 0,
    more: Any = None,
    config: Any = None,
    **changes: Any,
) -> Any:
    """`transformers.Trainer` on documents; after `stop` evaluations that are no better it stops."""
    import transformers

    trainer = cls(transformers.Trainer)(
        model_of(model, **(config or {})),
        args=arguments(transformers.TrainingArguments, **changes),
        train_dataset=data(22),
        eval_dataset=documents(eval_count, seed=5) if eval_count else None,
        data_collator=collator,
        callbacks=[transformers.EarlyStoppingCallback(stop)] if stop else None,
        **(more or {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    result = result_of(trainer)
    if predict:
        out = trainer.predict(documents(5, seed=6))
        result |= {"predictions": out.predictions, "label_ids": out.label_ids}
    return result


def with_images(cls: Any, model: str, eval_count: int = 0, trl: bool = False, **changes: Any) -> Any:
    """`transformers.Trainer`, or trl's `SFTTrainer`, on documents of which some hold an image."""
    import datasets
    import transformers

    def data(count: int, seed: int) -> list[dict[str, Any]]:
        lengths = torch.randint(14, 40, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        ids = images.documents_of(tuple(lengths), tuple(index % 3 != 1 for index in range(count)))
        return [{"input_ids": x.tolist()} for x in ids]

    def collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pad([row | {"labels": row["input_ids"]} for row in rows])
        held = sum(images.holds_image(torch.tensor(row["input_ids"])) for row in rows)
        marks = images.marks_of(model, batch["input_ids"])
        return batch | marks | (images.pixels_of(model, held, seed=len(rows[0]["input_ids"])) if held else {})

    base, kind, more = transformers.Trainer, transformers.TrainingArguments, {}
    if trl:
        from trl import SFTConfig, SFTTrainer

        base, kind, more = SFTTrainer, SFTConfig, {"processing_class": tokenizer()}
        changes |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "ddp_find_unused_parameters": True}
    trainer = cls(base)(
        images.model_of(model),
        args=arguments(kind, remove_unused_columns=False, **changes),
        train_dataset=datasets.Dataset.from_list(data(12, 0)),
        eval_dataset=datasets.Dataset.from_list(data(eval_count, 5)) if eval_count else None,
        data_collator=collator,
        **more,
    )
    trainer.train()
    return result_of(trainer)


def made_twice(cls: Any, **changes: Any) -> Any:
    """A trainer that makes its model, trained two times."""
    import transformers

    trainer = cls(transformers.Trainer)(
        args=arguments(transformers.TrainingArguments, **changes),
        model_init=lambda: model_of("llama"),
        train_dataset=documents(22),
        data_collator=pad,
    )
    trainer.train()
    logs = list(trainer.state.log_history)
    trainer.train()
    result = result_of(trainer)
    return result | {"logs": logs + result["logs"]}


def result_of(trainer: Any) -> dict[str, Any]:
    """What a run logged, its weights, and whether they are sharded."""
    from torch.distributed.tensor import DTensor

    parameters = dict(trainer.model.named_parameters())
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in parameters.items()
    }
    sharded = any(isinstance(p, DTensor) for p in parameters.values())  # the root's are whole after an evaluation
    return {"logs": trainer.state.log_history, "weights": weights, "sharded": sharded}


# --- comparison -----------------------------------------------------------------------------------------------------


def check(got: dict[str, Any], want: dict[str, Any], *names: str, close: float = 1e-5) -> None:
    """Both runs logged the same, and `names` among it; counts are equal, and weights within 10 times `close`."""
    assert len(got["logs"]) == len(want["logs"])
    missing = set(names) - set().union(*want["logs"])
    assert not missing, f"nothing logged {missing}"
    apart = []
    for a, b in zip(got["logs"], want["logs"], strict=True):
        for name in names:
            floor = 1.0 if name.startswith(("rewards/", "kl")) else 1e-3  # differences of log-probabilities
            limit = 0 if name.startswith("num_") else close * max(floor, abs(b.get(name, 0)))
            if name in b and not abs(a[name] - b[name]) <= limit:
                apart.append(f"step {b['step']}: {name} is {a[name]} instead of {b[name]}")
    for name, x in want["weights"].items():
        distance = (got["weights"][name] - x).abs().max().item()
        if distance > 10 * close:
            apart.append(f"{name} is {distance:.1e} apart")
    assert not apart, "\n".join(apart[:20])
