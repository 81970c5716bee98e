"""Options of the commands: every field is an option, and its line under "Attributes" is the option's help.

No torch is imported here, so that ``--help`` is quick. A command's module checks what a type cannot say.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from tyro.conf import arg

# A default that is nothing is not shown: the help's sentence says what happens then.
_named = functools.partial(
    arg, help_behavior_hint=lambda shown: f"(default: {shown})" if shown not in ("", "None") else ""
)

Balancer: TypeAlias = Literal[
    "auto", "contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local"
]
Exchange: TypeAlias = Literal["auto", "all_gather", "needed", "hierarchical", "ring", "ulysses"]
Dtype: TypeAlias = Literal["bfloat16", "float16", "float32", "float64"]
Device: TypeAlias = Literal["cpu", "cuda"]
Preset: TypeAlias = Annotated[str, _named(metavar="{h100,h200,b200,cpu}|FILE")]
Output: TypeAlias = Annotated[str | None, _named(metavar="FILE")]
Bytes: TypeAlias = Annotated[int | None, _named(metavar="BYTES")]
Count: TypeAlias = Annotated[int | None, _named(metavar="INT")]


@dataclass(frozen=True)
class PlanOptions:
    """Plan one sequence and predict its step. Shows who computes and receives what, and why. Runs anywhere.

    Attributes:
        documents: JSON or CSV file of document lengths, or of cu_seqlens; a sequence's documents.
        seq_len: tokens at which packed documents are cut; alone: one document of that length.
        sequence: which of the packed sequences to plan, from 0.
        window: tokens that a row reads before itself, and after itself with --bidirectional.
        window_layers: layers that use --window; the others read whole documents. Default: all.
        bidirectional: rows read later tokens, too.
        heads: query heads.
        kv_heads: heads of K and V.
        head_dim: width of a head.
        dtype: of K and V.
        layers: attention layers of a step.
        ranks: size of the cp axis. Default: 8.
        inner: ranks that trade heads for tokens (Ulysses); --exchange works between groups of so many.
        memory_budget: most that a rank may hold for exchanges, all layers; brings in the ring.
        hardware: a preset, or a file that calibrate wrote.
        balancer: how blocks are assigned to ranks.
        exchange: how K/V travel.
        block_size: tokens that are assigned together.
        advise: a model's config.json: say which CP × DP × TP degrees of --ranks suit it and these documents, a global
            batch, with seconds and memory of a step. No other plan is made; --memory-budget is a device's memory.
        html: file for the report: drawings and all figures, one page.
        json: file for all figures.
    """

    documents: Annotated[str | None, _named(metavar="FILE")] = None
    seq_len: Count = None
    sequence: int = 0
    window: Annotated[tuple[int] | tuple[int, int] | None, _named(metavar="LEFT [RIGHT]")] = None
    window_layers: Count = None
    bidirectional: bool = False
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: Dtype = "bfloat16"
    layers: int = 1
    ranks: Count = None
    inner: int = 1
    memory_budget: Bytes = None
    hardware: Preset = "h100"
    balancer: Balancer = "auto"
    exchange: Exchange = "auto"
    block_size: int = 128
    advise: Annotated[str | None, _named(metavar="CONFIG")] = None
    html: Output = None
    json: Output = None


@dataclass(frozen=True)
class OverlapOptions:
    """Hide the communication of a training step. Schedules a captured graph; says what is exposed, and why.

    Attributes:
        layers: decoder layers.
        dim: width of the hidden states.
        heads: query heads.
        kv_heads: heads of K and V.
        ffn: width inside the feed-forward layers.
        vocab: rows of the embedding; 0: layers alone, without embedding and loss.
        seq_len: tokens of a sequence.
        batch: sequences of a data-parallel rank.
        dp: data-parallel ranks; parameters are sharded over dp and cp.
        cp: ranks that share a sequence: K/V are exchanged.
        tp: tensor-parallel ranks, neighbours of one another.
        exchange: of K/V over cp.
        device: whose operators the graph has; none is needed.
        graph: graphs to schedule: forward, backward or both; with --load, the name of a graph.
        load: file of graphs, by --save or save_graphs, or a .pt2 of torch.export; nothing is captured. Needs --trust:
            such a file may run code as it is read.
        trust: read the file of --load, whose author you trust.
        group: ranks of process groups of --load, if the file has none: 1=0-7 or 2=0,8.
        dynamic_size: the value of each size that a loaded graph leaves open.
        hardware: a preset, or a file that calibrate wrote.
        budget: most that a graph may hold. Default: its own peak and 1 GiB or 5 % more.
        no_bucket: do not merge collectives.
        split: cut collectives of activations, and the compute beside them, into pieces where that gains; slow.
        torch: compare with PyTorch's own overlap pass, and with ours without buckets.
        trace: file for Chrome's trace events, for ui.perfetto.dev.
        html: file for the report: timelines and figures, one page.
        json: file for all figures.
        save: file for the graphs; --load takes it.
    """

    layers: int = 8
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128_256
    seq_len: int = 8192
    batch: int = 1
    dp: int = 8
    cp: int = 1
    tp: int = 8
    exchange: Literal["needed", "all_gather"] = "needed"
    device: Device = "cuda"
    graph: str = "both"
    load: Annotated[str | None, _named(metavar="FILE")] = None
    trust: bool = False
    group: Annotated[tuple[str, ...], _named(metavar="NAME=RANKS ...")] = ()
    dynamic_size: int = 4096
    hardware: Preset = "h100"
    budget: Bytes = None
    no_bucket: bool = False
    split: bool = False
    torch: bool = False
    trace: Output = None
    html: Output = None
    json: Output = None
    save: Output = None


@dataclass(frozen=True)
class CalibrateOptions:
    """Measure this machine and its links. Plans are priced with the figures.

    Starts --ranks local processes, or takes part in those that torchrun started, on one host or several: torchrun
    --nnodes 2 --nproc-per-node 8 ... -m spanwise calibrate --device cuda --out cluster.json

    Attributes:
        ranks: local processes to start. Default: 2, or what torchrun started.
        out: file for the figures; plan takes it as --hardware.
        device: of the ranks: cpu (gloo) or cuda (NCCL).
        kernel: as context_parallel_attention takes it.
        heads: query heads.
        kv_heads: heads of K and V. Default: as --heads.
        head_dim: width of a head.
        dtype: of q, K and V.
        host_size: ranks of a host, where host names do not tell them apart.
    """

    ranks: Count = None
    out: Output = None
    device: Device = "cpu"
    kernel: Literal["auto", "reference", "sdpa", "flex", "varlen"] = "auto"
    heads: int = 8
    kv_heads: Count = None
    head_dim: int = 64
    dtype: Dtype = "float32"
    host_size: Count = None


@dataclass(frozen=True)
class VerifyOptions:
    """Compare attention with one device, on local ranks. Probes it for leaks across the mask, too.

    Attributes:
        ranks: local processes to start.
        seq_len: tokens, at most 4,096: every rank computes a dense reference.
        heads: query heads.
        kv_heads: heads of K and V.
        head_dim: width of a head.
        dtype: of the inputs.
        balancer: how blocks are assigned to ranks.
        exchange: how K/V travel.
        inner: ranks that trade heads for tokens (Ulysses); --exchange works between groups of so many.
    """

    ranks: int = 4
    seq_len: int = 1000
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    dtype: Literal["float32", "float64"] = "float32"
    balancer: Balancer = "auto"
    exchange: Exchange = "auto"
    inner: int = 1
