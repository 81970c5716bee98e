"""The backend's graphs as Inductor's code has them: order, fusion, caches; ranks that send nothing."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

from spanwise.hardware import H100, H200
from spanwise.overlap import _torch
from spanwise.overlap.backend import Backend, backend
from spanwise.overlap.costs.roofline import node_flops
from spanwise.overlap.fx.operators import STARTS, WAIT
from spanwise.overlap.optimize import Result
from tests.overlap.programs import Cost

RANKS, BATCH = 2, 16
DIMS = (32, 48, 80, 96)  # none twice, so that a shape says which tensor it is

pytestmark = [  # torch's own: Dynamo makes an object of every autograd.Function; Inductor is imported
    pytest.mark.compiles,
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning"),
]

Event = tuple[str, tuple[int, ...]]  # what is called, and the shape of its result


class Gathered(torch.autograd.Function):
    """A parameter of its shards; its gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _torch.wait(_torch.start_all_gather(shard, RANKS, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _torch.wait(_torch.start_reduce_scatter(grad, RANKS, ctx.group)) / RANKS, None


def layers(x: torch.Tensor, shards: list[torch.Tensor], group: str) -> torch.Tensor:
    for shard in shards:
        x = F.silu(x @ Gathered.apply(shard, group).t()) * 2 + 1
    return x.square().sum()


def step(group: str, use: Any, **options: Any) -> None:
    """Compile and run forward and backward."""
    torch._dynamo.reset()
    x = torch.randn(BATCH, DIMS[0], requires_grad=True)
    shards = [torch.randn(out // RANKS, into, requires_grad=True) for into, out in itertools.pairwise(DIMS)]
    torch.compile(layers, backend=use, **options)(x, shards, group).backward()


@pytest.fixture
def group() -> Iterator[str]:
    torch._dynamo.reset()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=_torch.fake_store())
    yield _torch.group_name(dist.group.WORLD)
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture(scope="module", autouse=True)
def inductor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Inductor with caches of this module's own; it generates C++ and compiles none: kernels do nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setattr("torch._inductor.async_compile.AsyncCompile.cpp_pybinding", lambda *args: lambda *given: None)
        patch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)  # which compiles programs to find out
        yield


def called(code: str) -> list[Event]:
    """Collectives, waits and matrix products that generated code calls, in its order."""
    shapes: dict[str, tuple[int, ...]] = {}
    found: list[tuple[str, str]] = []
    for line in code.split("def call(")[1].splitlines():
        buffers = re.findall(r"buf\d+", line)
        if match := re.search(
            r"(?:empty_strided_cpu|reinterpret_tensor|assert_size_stride|assert_tensor_metadata)\((?:\w+, )?(\(.*?\))",
            line,
        ):
            # An allocation, memory used again in another shape, or what comes after a collective.
            if "extern_kernels" not in line and buffers:
                shapes[buffers[0]] = ast.literal_eval(match[1])
        elif match := re.search(r"(buf\d+) = (buf\d+)", line):
            shapes[match[1]] = shapes[match[2]]
        if match := re.search(r"(?:_c10d_functional|extern_kernels)\.(\w+?)(?:\.default)?\(.*?(?:out=(\w+))?\)$", line):
            found.append((match[1], match[2] or buffers[0]))
            if match[2]:
                found[-1] = (match[1], f"{match[2]} {shapes[match[2]]}")
    return [(name, ast.literal_eval(at.split(" ", 1)[1]) if " " in at else shapes[at]) for name, at in found]


def scheduled(result: Result) -> list[Event]:
    """The same for the graphs that Inductor gets."""
    nodes = (n for n in result.graph_module.graph.nodes if n.target in (*STARTS, WAIT) or node_flops(n) > 0)
    return [(node.target._schema.name.split("::")[1], tuple(node.meta["val"].shape)) for node in nodes]


def kernels(code: str) -> int:
    """How many times generated code calls a kernel that was generated too."""
    return len(re.findall(r"^ +cpp_fused\w*\(", code.split("def call(")[1], re.MULTILINE))


def test_order_in_generated_code_is_that_of_the_schedule(group: str) -> None:
    results: list[Result] = []
    use = backend("inductor", cost=Cost(), bucket=False, on_result=results.append)
    codes = run_and_get_code(lambda: step(group, use))[1]
    assert len(codes) == len(results) == 2
    for code, result in zip(codes, results, strict=True):
        assert called(code) == scheduled(result)
        assert result.timeline.makespan < 0.95 * result.before.makespan
        body = code.split("def call(")[1]
        assert body.count("spanwise.agree.default(") == 1
        assert body.index("spanwise.agree.default(") < min(map(body.index, ("_c10d_functional.", "extern_kernels.")))
    assert [len(called(code)) for code in codes] == [9, 12]
    # Left alone, Inductor hides nothing; and to be kept in order costs no kernel.
    plain = run_and_get_code(lambda: step(group, "inductor"))[1]
    for ours, theirs, result in zip(codes, plain, results, strict=True):
        assert sorted(called(theirs)) == sorted(called(ours)) != called(theirs) != scheduled(result)
        assert 0 < kernels(ours) <= kernels(theirs)


def test_compiling_again_hits_the_cache_and_other_options_or_costs_miss(group: str) -> None:
    def misses_and_hits(**options: Any) -> tuple[int, int]:
        counters.clear()
        step(group, backend("inductor", **options))
        return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]

    assert [misses_and_hits(cost=Cost(0.55)) for _ in range(2)] == [(2, 0), (0, 2)]
    assert misses_and_hits(cost=Cost(0.55), multiplier=1.5) == (2, 0)
    assert misses_and_hits(cost=lambda node: 1.0) == (0, 0)  # a function without uuid() is never cached


def test_a_fingerprint_covers_costs_options_groups_and_the_source(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(cost: Any = H100, **options: Any) -> str | None:
        return backend(cost=cost, **options).fingerprint()

    first = fingerprint()
    assert first == fingerprint() and fingerprint(lambda node: 1.0) is None
    assert fingerprint({"mm": 1.0, "add": 2.0}) == fingerprint({"add": 2.0, "mm": 1.0})
    others = [*map(fingerprint, (H200, {"mm": 1.0}, {"mm": 2.0}, Cost()))]
    others += [fingerprint(**of) for of in ({"bucket": False}, {"memory_budget": 1}, {"dynamic_size": 128})]
    dist.new_group([0])
    others.append(fingerprint())
    monkeypatch.setattr(sys.modules[Backend.__module__], "_source", lambda: "of another version")
    assert len({first, *others, fingerprint()}) == 2 + len(others)


def test_what_cannot_be_scheduled_and_wrong_options_are_errors(group: str) -> None:
    for name in ("aot_eager", "inductor"):
        with pytest.raises(Exception, match="GraphError: node '.*': its cost must be finite and not negative, got nan"):
            step(group, backend(name, cost=lambda node: float("nan")))
    wrong: list[dict[str, Any]] = [{"dynamic_size": size} for size in (0, 2.5, "4096", True)]
    for options in (*wrong, {"name": "eager"}, {"sizes": 8}, {"split": 3}):
        with pytest.raises(ValueError, match=re.escape(repr(next(iter(options.values()))))):
            backend(cost=Cost(), **options)
    with pytest.raises(TypeError, match="'budget'"):
        backend(cost=Cost(), budget=1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_result_has_the_numbers_of_symbols_where_there_are_some(group: str, dynamic: bool) -> None:
    results: list[Result] = []
    step(group, backend("aot_eager", cost=Cost(), dynamic_size=64, on_result=results.append), dynamic=dynamic)
    assert [result.sizes for result in results] == [64 if dynamic else None] * 2
    assert all(result.report().startswith("makespan") for result in results)
