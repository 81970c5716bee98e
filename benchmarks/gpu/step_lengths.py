"""What grows with the batch: `varlen` with more sequences, and compiled `flex` with other lengths."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch._dynamo.utils import counters

from benchmarks.gpu.calls import allocated, call_of_a_rank
from benchmarks.gpu.clock import device_of, masks, medians
from benchmarks.gpu.rows import Context, attempt
from spanwise import SpanMask


def run(context: Context) -> None:
    device = device_of(context.device)
    dtype = torch.float32 if context.dry else torch.bfloat16
    tokens, many, few = (2048, "sdpa", "sdpa") if context.dry else (65_536, "varlen", "flex")
    for sequences in (10, 30, 100) if context.dry else (10, 300, 3000):
        with attempt(context.rows, what="sequences", kernel=many, tokens=tokens, sequences=sequences) as found:
            cuts = np.linspace(0, tokens, sequences + 1).astype(int)
            mask = SpanMask.documents(cuts)
            with call_of_a_rank(mask, 8, many, device, dtype, exchange="needed", stages=1) as call:
                found["ms"] = 1e3 * medians({"": call.step}, device, 1 if context.dry else 5)[""]
                found["peak"] = allocated(call.step, device)
    for length in (tokens, tokens - 512, tokens // 2, tokens // 2 + 256, tokens // 4):
        mask, row = masks(length)["documents"], {"what": "lengths", "kernel": few, "tokens": length}
        with (
            attempt(context.rows, **row) as found,
            call_of_a_rank(mask, 8, few, device, dtype, exchange="needed") as call,
        ):
            before, begin = counters["stats"]["unique_graphs"], time.perf_counter()
            call.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found["first call s"] = time.perf_counter() - begin
            found["graphs"] = counters["stats"]["unique_graphs"] - before
            found["ms"] = 1e3 * medians({"": call.step}, device, 1 if context.dry else 5)[""]
