"""The command line: ``spanwise train``, ``plan``, ``verify``, ``calibrate``, ``overlap`` and ``bench``.

Options are parsed here and nothing else happens here; torch is imported by what a command starts, so that ``--help``
answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    help="Context parallelism for PyTorch, planned from the attention mask.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _commands() -> None:
    """Context parallelism for PyTorch, planned from the attention mask."""


_MODEL, _RUN, _CHECK, _KEEP = "Model", "Steps", "Proof and evaluation", "Output"


@app.command()
def train(
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="Files and folders, every file one document; several may follow. "
            "Default: the Python standard library's sources.",
        ),
    ] = None,
    more_data: Annotated[list[str] | None, typer.Argument(metavar="[PATH]...", help="More paths for --data.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for metrics.json and checkpoints.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Local processes to start; ranks = dp × cp. Default: 1, or what torchrun started."),
    ] = None,
    dp: Annotated[int, typer.Option(help="Ranks that take different sequences; the others share one.")] = 1,
    inner: Annotated[
        int, typer.Option(help="Ranks that trade heads (Ulysses); --exchange works between groups of so many.")
    ] = 1,
    steps: Annotated[int, typer.Option(help="Optimizer steps, counted from the start of the run.")] = 30,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence; any number from 2.")] = 8192,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Sequences of a step over all ranks; past dp they accumulate. Default: dp."),
    ] = None,
    max_document: Annotated[
        int | None, typer.Option(help="Tokens; longer documents become several. Default: --seq-len.")
    ] = None,
    dim: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 128,
    layers: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 4,
    heads: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 4,
    kv_heads: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 2,
    hidden_dim: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 384,
    tie_embeddings: Annotated[bool, typer.Option(rich_help_panel=_MODEL)] = True,
    learning_rate: Annotated[float, typer.Option(rich_help_panel=_RUN)] = 3e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.", rich_help_panel=_RUN)] = 10,
    weight_decay: Annotated[float, typer.Option(rich_help_panel=_RUN)] = 0.1,
    max_grad_norm: Annotated[float, typer.Option(rich_help_panel=_RUN)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of weights and document order.", rich_help_panel=_RUN)] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or float64.", rich_help_panel=_RUN)] = "float32",
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL).", rich_help_panel=_RUN)] = "cpu",
    balancer: Annotated[str, typer.Option(help="As make_plan takes it.", rich_help_panel=_RUN)] = "auto",
    exchange: Annotated[str, typer.Option(help="As make_plan takes it.", rich_help_panel=_RUN)] = "auto",
    prove: Annotated[
        int, typer.Option(help="Steps that one device repeats and is compared with.", rich_help_panel=_CHECK)
    ] = 0,
    held_out: Annotated[float, typer.Option(help="Share of documents for evaluation.", rich_help_panel=_CHECK)] = 0.02,
    eval_every: Annotated[
        int, typer.Option(help="Steps between evaluations; 0: only after the last.", rich_help_panel=_CHECK)
    ] = 0,
    eval_sequences: Annotated[int, typer.Option(help="Most sequences evaluated.", rich_help_panel=_CHECK)] = 4,
    save_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0: only after the last.", rich_help_panel=_KEEP)
    ] = 0,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.", rich_help_panel=_KEEP)] = 2,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.", rich_help_panel=_KEEP)
    ] = False,
) -> None:
    """Train a decoder on packed documents, the sequence cut over the ranks.

    Starts --ranks local processes, or takes part in those that torchrun started:
    torchrun --nproc-per-node 4 -m spanwise train ...
    """
    from spanwise.train.launch import RankFailure, torchrun_rank

    mine = torchrun_rank()
    try:
        from spanwise.train.config import TrainConfig
        from spanwise.train.model import ModelConfig
        from spanwise.train.start import start

        if mine is not None and ranks not in (None, mine.size):
            raise ValueError(f"torchrun started {mine.size} processes, and --ranks says {ranks}; leave --ranks out")
        config = TrainConfig(
            data=(*(data or ()), *(more_data or ())),
            out=out,
            ranks=mine.size if mine else ranks if ranks is not None else 1,
            dp=dp,
            inner=inner,
            steps=steps,
            seq_len=seq_len,
            batch_size=batch_size,
            max_document=max_document,
            model=ModelConfig(
                dim=dim,
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=kv_heads,
                hidden_dim=hidden_dim,
                tie_embeddings=tie_embeddings,
            ),
            learning_rate=learning_rate,
            warmup=warmup,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            dtype=dtype,
            device=device,
            balancer=balancer,
            exchange=exchange,
            seed=seed,
            held_out=held_out,
            eval_every=eval_every,
            eval_sequences=eval_sequences,
            save_every=save_every,
            keep=keep,
            prove=prove,
            resume=resume,
        )
        status = start(config, mine)
    except (ValueError, NotImplementedError) as error:  # the latter: a plan option that is to come
        if mine is not None:
            raise
        _fail(str(error), 2)
    except RankFailure as error:
        _fail(str(error), 1)
    raise typer.Exit(status)


@app.command()
def verify(
    ranks: Annotated[int, typer.Option(help="Local processes to start.")] = 4,
    seq_len: Annotated[int, typer.Option(help="Tokens; any number.")] = 1000,
    mask: Annotated[
        str,
        typer.Option(
            help="documents, causal, full, sliding_window, prefix_lm, shared_prefix or block_causal, of sizes that "
            "follow from --seq-len."
        ),
    ] = "documents",
    heads: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 4,
    kv_heads: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 2,
    head_dim: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 32,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    balancer: Annotated[str, typer.Option(help="As make_plan takes it.")] = "auto",
    exchange: Annotated[str, typer.Option(help="As make_plan takes it.")] = "auto",
    inner: Annotated[
        int, typer.Option(help="Ranks that trade heads (Ulysses); --exchange works between groups of so many.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of documents, weights and inputs.")] = 0,
) -> None:
    """Compare attention and a small decoder with one device, and probe them for leaks across the mask."""
    from spanwise.train.launch import RankFailure

    try:
        from spanwise.train import verify as job

        status = job.verify(
            job.VerifyConfig(
                ranks=ranks,
                seq_len=seq_len,
                mask=mask,
                balancer=balancer,
                exchange=exchange,
                inner=inner,
                dtype=dtype,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                seed=seed,
            )
        )
    except (ValueError, NotImplementedError) as error:
        _fail(str(error), 2)
    except RankFailure as error:
        _fail(str(error), 1)
    raise typer.Exit(status)


@app.command()
def plan(
    documents: Annotated[
        str | None, typer.Option(help="JSON or CSV file of document lengths, or of cu_seqlens; a sequence's documents.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="Key or column of --documents that holds the lengths.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Files and folders, every file one document; several may follow.")
    ] = None,
    more_data: Annotated[list[str] | None, typer.Argument(metavar="[PATH]...", help="More paths for --data.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens at which packed documents are cut; alone: one document of that length.")
    ] = None,
    sequence: Annotated[int, typer.Option(help="Which of the packed sequences to plan, from 0.")] = 0,
    window: Annotated[
        str | None, typer.Option(metavar="LEFT[,RIGHT]", help="Tokens that a row reads to each side.")
    ] = None,
    window_layers: Annotated[
        int | None, typer.Option(help="Layers that use --window; the others read whole documents. Default: all.")
    ] = None,
    bidirectional: Annotated[bool, typer.Option("--bidirectional", help="Rows read what follows them, too.")] = False,
    heads: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 32,
    kv_heads: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 8,
    head_dim: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 128,
    dtype: Annotated[str, typer.Option(help="Of K and V.", rich_help_panel=_MODEL)] = "bfloat16",
    layers: Annotated[int, typer.Option(help="Attention layers of a step.", rich_help_panel=_MODEL)] = 1,
    ranks: Annotated[
        int | None, typer.Option(help="Size of the cp axis. Default: what --compare-ranks recommends, else 8.")
    ] = None,
    inner: Annotated[
        int, typer.Option(help="Ranks that trade heads (Ulysses); --exchange works between groups of so many.")
    ] = 1,
    memory_budget: Annotated[
        int | None,
        typer.Option(metavar="BYTES", help="Most that a rank may hold for exchanges, all layers; brings in the ring."),
    ] = None,
    hardware: Annotated[str, typer.Option(help="h100, h200, b200, cpu, or a file that calibrate wrote.")] = "h100",
    balancer: Annotated[str, typer.Option(help="As make_plan takes it.")] = "auto",
    exchange: Annotated[str, typer.Option(help="As make_plan takes it.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens that are dealt out together.")] = 128,
    compare_ranks: Annotated[
        str | None, typer.Option(metavar="2,4,8,…", help="Also compare sizes of the cp axis, and recommend one.")
    ] = None,
    html: Annotated[str | None, typer.Option(help="File for the report: drawings and all figures, one page.")] = None,
    json: Annotated[str | None, typer.Option(help="File for all figures.")] = None,
) -> None:
    """Plan one sequence: who computes and receives what, predicted seconds, and why this way. Runs anywhere."""
    options = {**locals(), "data": (*(data or ()), *(more_data or ()))}
    del options["more_data"]
    from spanwise.cli import plan as plan_command

    try:
        plan_command.run(plan_command.PlanOptions(**options))
    except (ValueError, NotImplementedError) as error:
        _fail(str(error), 2)


@app.command()
def calibrate(
    ranks: Annotated[
        int | None, typer.Option(help="Local processes to start. Default: 2, or what torchrun started.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="File for what was measured; plan takes it as --hardware.")] = None,
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL).")] = "cpu",
    kernel: Annotated[str, typer.Option(help="As context_parallel_attention takes it.")] = "auto",
    heads: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Default: as --heads.", rich_help_panel=_MODEL)] = None,
    head_dim: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 64,
    dtype: Annotated[str, typer.Option(help="Of q, K and V.", rich_help_panel=_MODEL)] = "float32",
    host_size: Annotated[
        int | None, typer.Option(help="Ranks of a host, where host names do not tell them apart.")
    ] = None,
) -> None:
    """Measure this machine and the links between its ranks: what plans are priced with.

    Starts --ranks local processes, or takes part in those that torchrun started, on one host or several:
    torchrun --nnodes 2 --nproc-per-node 8 ... -m spanwise calibrate --device cuda --out cluster.json
    """
    from spanwise.train.launch import RankFailure, torchrun_rank

    mine = torchrun_rank()
    given = {**locals()}
    try:
        from spanwise.cli import calibrate as calibrate_command

        if mine is not None and ranks not in (None, mine.size):
            raise ValueError(f"torchrun started {mine.size} processes, and --ranks says {ranks}; leave --ranks out")
        names = ("out", "device", "kernel", "heads", "kv_heads", "head_dim", "dtype", "host_size")
        options = calibrate_command.CalibrateOptions(
            ranks=mine.size if mine else 2 if ranks is None else ranks, **{name: given[name] for name in names}
        )
        status = calibrate_command.run(options, mine)
    except (ValueError, NotImplementedError) as error:
        if mine is not None:
            raise
        _fail(str(error), 2)
    except RankFailure as error:
        _fail(str(error), 1)
    raise typer.Exit(status)


@app.command()
def overlap(
    layers: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 8,
    dim: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 4096,
    heads: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 32,
    kv_heads: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 8,
    ffn: Annotated[int, typer.Option(rich_help_panel=_MODEL)] = 14336,
    vocab: Annotated[
        int, typer.Option(help="0: layers alone, without embedding and loss.", rich_help_panel=_MODEL)
    ] = 128_256,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", rich_help_panel=_MODEL)] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences of a data-parallel rank.", rich_help_panel=_MODEL)] = 1,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks; parameters are sharded over dp and cp.")] = 8,
    cp: Annotated[int, typer.Option(help="Ranks that share a sequence: K/V are exchanged.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks, neighbours of one another.")] = 8,
    exchange: Annotated[str, typer.Option(help="Of K/V over cp: needed or all_gather.")] = "needed",
    device: Annotated[str, typer.Option(help="Whose operators the graph has: cuda or cpu. None is needed.")] = "cuda",
    graph: Annotated[str, typer.Option(help="forward, backward or both; with --load, the name of a graph.")] = "both",
    load: Annotated[
        str | None,
        typer.Option(help="File of graphs, by --save or save_graphs, or a .pt2 of torch.export; nothing is captured."),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=RANKS", help="Ranks of a process group of --load, if the file has none: 1=0-7 or 2=0,8."
        ),
    ] = None,
    dynamic_size: Annotated[int, typer.Option(help="What a size is taken for that a loaded graph leaves open.")] = 4096,
    hardware: Annotated[str, typer.Option(help="h100, h200, b200, cpu, or a file that calibrate wrote.")] = "h100",
    costs: Annotated[
        str,
        typer.Option(help="Of operators: roofline, of --hardware, or measured, on --device; collectives: --hardware."),
    ] = "roofline",
    measurements: Annotated[
        str | None, typer.Option(help="File of what --costs measured has measured, read first and added to.")
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(metavar="BYTES", help="Most that a graph may hold. Default: its own peak and 1 GiB or 5 % more."),
    ] = None,
    bucket: Annotated[bool, typer.Option("--bucket/--no-bucket", help="Merge collectives where that gains.")] = True,
    multiplier: Annotated[
        float, typer.Option(help="Schedule as if collectives took so many times as long; costs are guesses.")
    ] = 1.0,
    in_flight: Annotated[
        int | None, typer.Option(help="Collectives of a group that may be started and not yet waited for.")
    ] = None,
    effort: Annotated[
        int | None, typer.Option(help="How many orders are tried; more find better ones, as a rule.")
    ] = None,
    torch: Annotated[
        bool, typer.Option("--torch", help="Beside: PyTorch's own overlap pass, and ours without buckets.")
    ] = False,
    trace: Annotated[str | None, typer.Option(help="File for Chrome's trace events, for ui.perfetto.dev.")] = None,
    html: Annotated[str | None, typer.Option(help="File for the report: timelines and figures, one page.")] = None,
    json: Annotated[str | None, typer.Option(help="File for all figures.")] = None,
    save: Annotated[str | None, typer.Option(help="File for the graphs; --load takes it.")] = None,
) -> None:
    """Hide the communication of a training step: schedule a captured graph, and say what is exposed and why."""
    options = {**locals(), "group": tuple(group or ())}
    from spanwise.cli import overlap as overlap_command

    try:
        overlap_command.run(overlap_command.OverlapOptions(**options))
    except (ValueError, NotImplementedError) as error:
        _fail(str(error), 2)


bench = typer.Typer(help="Measure, print a table, and write JSON.", rich_markup_mode=None)
app.add_typer(bench, name="bench")

_OUT = Annotated[
    Path | None, typer.Option(help="File for the JSON; of all benchmarks together, a folder.", show_default="none")
]
_QUICK = Annotated[bool, typer.Option("--quick", help="Smaller sizes and fewer repeats.")]


@bench.callback(invoke_without_command=True)
def _bench_all(context: typer.Context, out: _OUT = None, quick: _QUICK = False) -> None:
    """Measure, print a table, and write JSON; without a name, everything there is."""
    if context.invoked_subcommand is None:
        bench_kernels(out and out / "kernels.json", quick)
        bench_plan(out and out / "plan.json", quick)
        bench_layout(out and out / "layout.json", quick)
        bench_memory(out and out / "memory.json", quick)
        bench_packed(out and out / "packed.json", quick)
    elif out is not None or quick:
        raise typer.BadParameter("--out and --quick go after the benchmark's name")


@bench.command("kernels")
def bench_kernels(out: _OUT = None, quick: _QUICK = False) -> None:
    """Attention on the CPU against torch's own: time forward and backward, and memory."""
    from spanwise.cli.bench import kernels

    kernels.run(out, quick)


@bench.command("plan")
def bench_plan(out: _OUT = None, quick: _QUICK = False) -> None:
    """Planning times, and each balancer's work and traffic."""
    from spanwise.cli.bench import plan

    plan.run(out, quick)


@bench.command("layout")
def bench_layout(out: _OUT = None, quick: _QUICK = False) -> None:
    """Balance and traffic of every balancer on documents, windows, prefixes and video."""
    from spanwise.cli.bench import layout

    layout.run(out, quick)


@bench.command("packed")
def bench_packed(out: _OUT = None, quick: _QUICK = False) -> None:
    """Packed documents as they are against documents padded to twice the ranks: time, padding and traffic."""
    from spanwise.cli.bench import packed

    packed.run(out, quick)


@bench.command("memory")
def bench_memory(out: _OUT = None, quick: _QUICK = False) -> None:
    """K/V that each exchange holds and keeps, against the length of the sequence: planned, and measured beside it."""
    from spanwise.cli.bench import memory

    memory.run(out, quick)


def _fail(text: str, status: int) -> NoReturn:
    sys.stdout.flush()
    print(f"spanwise: {text}", file=sys.stderr)
    raise typer.Exit(status)


def main() -> None:
    """The ``spanwise`` command."""
    app()


if __name__ == "__main__":
    main()
