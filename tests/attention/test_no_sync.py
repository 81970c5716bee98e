"""No step waits for the device: the modules that run in one hold no call that reads a tensor's value on the host.

A static check, so that it needs no GPU; `tests/gpu` runs a step under ``torch.cuda.set_sync_debug_mode("error")``.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "spanwise"

# What a step calls; everything else is reached from here.
DOORS = {
    *(f"attention/{name}.py" for name in ("attention", "packed", "context_parallel")),
    *(f"batch/{name}.py" for name in ("loss", "sharding", "token_scores", "trees")),
    *(f"recurrence/{name}.py" for name in ("conv", "layers")), "layouts/thd_order.py",
}  # fmt: skip
NOT_HOT = {
    "batch/contents.py": "reads attention masks, which loaders make in host memory",
    "masks/flex.py": "masks from and to torch, when a plan is made",
    "layouts/layout.py": "numpy, when a plan is made; index tensors in host memory",
    "attention/chunks.py": "numpy, when a rank plan is built",
    "recurrence/route.py": "numpy, when a route is built",
    "attention/kernels/_flops.py": "asked by torch's FLOP counters alone",
    "attention/kernels/_segments.py": "numpy, when a plan is made",
    "attention/call_log.py": "digests of calls, tensors in host memory",
    "attention/kernels/_tiles.py": "numpy, CPU",
    "attention/kernels/sdpa.py": "CPU",
}
# Functions that run before any step, when plans, rank plans or modules are made, or a step is compiled.
PLAN_TIME = {
    "attention/rank_plan.py": {"build", "local_plan"},
    "attention/context_parallel.py": {"_check_module", "_probe_mask"},
    "attention/ulysses.py": {"trade_of"},
    "attention/kernels/flex.py": {"of"},
    "attention/kernels/varlen.py": {"of"},
}
# What lies in host memory: tensors, numpy arrays and numbers.
ON_HOST = {
    "attention/compare.py": {
        "value.numpy()",
        "float(number)",
        "float(value)",
        "int(forward[0])",
        "mesh.mesh.flatten().tolist()",
        "torch.tensor(record(call, [*map(_torch.find_group, groups.split())], lambda: ranks, of))",
    },
    "attention/failure.py": {"mesh.mesh.flatten().tolist()"},
    "recurrence/passing.py": {"float(scale)"},
    "recurrence/_ops.py": {"counts.tolist()", "read_counts.tolist()"},
    "recurrence/slabs.py": {"counts.tolist()"},
    "attention/tokens.py": {"int(plan.kv_layout.tokens_per_rank.max())"},
    "batch/trees.py": {"torch.tensor(list(digest), dtype=torch.uint8)"},
    "batch/loss.py": {
        "num_valid.item()",
        "int((labels != IGNORE_INDEX).sum())",
    },
    "batch/token_scores.py": {"wrong.nonzero()", "wrong.nonzero()[:1].tolist()"},
    "attention/kernels/varlen.py": {"calls.tolist()"},
}

_READS = {"item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "synchronize"}
_NUMBERS = {"bool", "int", "float"}
_TORCH = {"torch.equal", "torch.allclose", "torch.tensor", "torch.as_tensor", "torch.is_nonzero"}
_TRUTH = {"any", "all", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge"}


def _nodes(tree: ast.AST, plan_time: Collection[str]) -> Iterator[ast.AST]:
    """All nodes outside of the functions called `plan_time`, and of what is there for type checkers alone."""
    if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)) and tree.name in plan_time:
        return
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from _nodes(child, plan_time)


def _truth_values(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """Expressions that are asked whether they are true."""
    for node in nodes:
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand


def waits(source: str, plan_time: Collection[str] = ()) -> list[str]:
    """The expressions of a module that would make the host wait for the device, were their tensors there."""
    nodes = list(_nodes(ast.parse(source), plan_time))
    found = []
    for call in nodes:
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        arguments = [ast.unparse(x) for x in (*call.args, *(keyword.value for keyword in call.keywords))]
        reads = isinstance(call.func, ast.Attribute) and call.func.attr in _READS
        number = name in _NUMBERS and not all(isinstance(arg, ast.Constant) for arg in call.args)
        to_cpu = name.endswith(".to") and not {"'cpu'", "torch.device('cpu')"}.isdisjoint(arguments)
        if reads or number or to_cpu or name in _TORCH:
            found.append(ast.unparse(call))
    for value in _truth_values(nodes):
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _TRUTH:
            found.append(ast.unparse(value))
    return found


def _imports(name: str) -> tuple[set[str], bool]:
    """Modules of ours that a module imports, anywhere in it, and whether it imports torch."""
    found, with_torch = set(), False
    for node in _nodes(ast.parse((ROOT / name).read_text()), ()):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        with_torch |= any(x.split(".")[0] == "torch" for x in names)
        for path in (x.removeprefix("spanwise.").replace(".", "/") for x in names if x.startswith("spanwise.")):
            found |= {file for file in (f"{path}.py", f"{path}/__init__.py") if (ROOT / file).exists()}
    return found, with_torch


def _reached() -> set[str]:
    """All kernels, and whatever knows torch among the modules that a step's doors lead to."""
    reached, left = set[str](), set(DOORS)
    while left:
        name = left.pop()
        reached.add(name)
        left |= _imports(name)[0] - reached
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "attention/kernels").glob("*.py")}
    return kernels | {name for name in reached if _imports(name)[1]}


@pytest.mark.parametrize("name", sorted(_reached() - NOT_HOT.keys()))
def test_the_hot_path_never_waits(name: str) -> None:
    assert set(waits((ROOT / name).read_text(), PLAN_TIME.get(name, ()))) == ON_HOST.get(name, set())


def test_what_the_lists_name_exists() -> None:
    """A function that was renamed would otherwise take its place on the list with it, unseen."""
    assert NOT_HOT.keys() | PLAN_TIME.keys() | ON_HOST.keys() <= _reached()
    for name, functions in PLAN_TIME.items():
        defined = {x.name for x in ast.walk(ast.parse((ROOT / name).read_text())) if isinstance(x, ast.FunctionDef)}
        assert functions <= defined, name


FOUND = """n = lengths.sum().item()
sizes = x.tolist()
y = x.cpu()
y = x.to('cpu', non_blocking=False)
y = x.to(device=torch.device('cpu'))
y = x.detach().numpy()
rows = mask.nonzero()
n = int(x.max())
flag = bool(mask.any())
scale = float(x[0])
if mask.any(): pass
assert x.isfinite().all()
y = [z for z in zs if not z.any()]
same = torch.equal(x, y)
x = torch.tensor([1, 2], device=q.device)
torch.cuda.synchronize()
def f(x): return lambda: x.item()
def from_numpy(table): return torch.tensor(table)""".splitlines()
PASSED = """top = float('-inf')
y = x.to(q.device)
y = x.to(q.device, non_blocking=q.device.type != 'cpu')
if x.shape[0] > 1: y = mask.any(1)
def made_before(table): return torch.tensor(table)""".splitlines()


def test_what_waits_is_found_and_nothing_else() -> None:
    assert all(waits(line) for line in FOUND)
    assert not any(waits(line, {"made_before"}) for line in PASSED)
    assert waits("if TYPE_CHECKING:\n    n = x.item()") == []
