"""The backend's graphs as Inductor's code has them: order, fusion, caches; ranks that send nothing."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

from spanwise import _compat
from spanwise.overlap import operators
from spanwise.overlap.backend import backend
from spanwise.overlap.costs import node_flops
from spanwise.overlap.optimize import Result

RANKS, BATCH = 2, 16
DIMS = (32, 48, 80, 96)  # none twice, so that a shape says which tensor it is

pytestmark = [  # torch's own: Dynamo makes an object of every autograd.Function; Inductor is imported
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning"),
]

Event = tuple[str, tuple[int, ...]]  # what is called, and the shape of its result


class Cost:
    """A collective takes `ratio` of a matrix product, and anything else nearly nothing."""

    def __init__(self, ratio: float = 0.6) -> None:
        self.ratio = ratio

    def uuid(self) -> str:
        return f"{self.ratio}"

    def __call__(self, node: fx.Node) -> float:
        if node.target in operators.STARTS:
            return self.ratio
        return 1.0 if node_flops(node) else 0.01


class Gathered(torch.autograd.Function):
    """A parameter of its shards; its gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _compat.wait(_compat.start_all_gather(shard, RANKS, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _compat.wait(_compat.start_reduce_scatter(grad, RANKS, ctx.group)) / RANKS, None


def layers(x: torch.Tensor, shards: list[torch.Tensor], group: str) -> torch.Tensor:
    for shard in shards:
        x = F.silu(x @ Gathered.apply(shard, group).t()) * 2 + 1
    return x.square().sum()


def inputs() -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = torch.randn(BATCH, DIMS[0], requires_grad=True)
    pairs = itertools.pairwise(DIMS)
    return x, [torch.randn(out // RANKS, into, requires_grad=True) for into, out in pairs]


@pytest.fixture
def group() -> Iterator[str]:
    torch._dynamo.reset()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=_compat.fake_store())
    yield _compat.group_name(dist.group.WORLD)
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


def compiled(group: str, use: Any, **options: Any) -> list[str]:
    """The code that Inductor generates for a step: forward and backward."""
    x, shards = inputs()
    step = torch.compile(layers, backend=use, **options)
    return run_and_get_code(lambda: step(x, shards, group).backward())[1]


def called(code: str) -> list[Event]:
    """Collectives, waits and matrix products that generated code calls, in its order."""
    shapes: dict[str, tuple[int, ...]] = {}
    found: list[tuple[str, str]] = []
    for line in code.split("def call(")[1].splitlines():
        buffers = re.findall(r"buf\d+", line)
        if match := re.search(
            r"(?:empty_strided_cpu|reinterpret_tensor|assert_size_stride)\((?:\w+, )?(\(.*?\))", line
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
    """The same of what was handed to Inductor."""
    found = []
    for node in result.graph_module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and (
            node.target in operators.STARTS or node.target is operators.WAIT or node_flops(node)
        ):
            found.append((node.target._schema.name.split("::")[1], tuple(node.meta["val"].shape)))
    return found


def kernels(code: str) -> int:
    """How many times generated code calls a kernel that was generated too."""
    return len(re.findall(r"^ +cpp_fused\w*\(", code.split("def call(")[1], re.MULTILINE))


def test_order_in_generated_code_is_that_of_the_schedule(group: str) -> None:
    results: list[Result] = []
    codes = compiled(group, backend("inductor", cost=Cost(), bucket=False, on_result=results.append))
    assert len(codes) == len(results) == 2
    for code, result in zip(codes, results, strict=True):
        assert called(code) == scheduled(result)
        assert result.timeline.makespan < 0.95 * result.before.makespan
    assert [len(called(code)) for code in codes] == [9, 12]
    # Left alone, Inductor hides nothing; and to be kept in order costs no kernel.
    plain = compiled(group, "inductor")
    for ours, theirs, result in zip(codes, plain, results, strict=True):
        assert sorted(called(theirs)) == sorted(called(ours)) != called(theirs) != scheduled(result)
        assert 0 < kernels(ours) <= kernels(theirs)
