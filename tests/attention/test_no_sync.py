"""No step waits for the device: the modules that run in one hold no call that reads a tensor's value on the host.

A static check, so that it needs no GPU; `tests/gpu` runs a step under ``torch.cuda.set_sync_debug_mode("error")``.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "spanwise"

# Numpy, host memory or the CPU alone: when plans are made, in comparisons, in the CPU's kernel.
NOT_HOT = {
    "attention/call_log.py", "attention/chunks.py", "attention/verify.py", "attention/kernels/_flops.py",
    "attention/kernels/_segments.py", "attention/kernels/_tiles.py", "attention/kernels/sdpa.py",
    "recurrence/route.py", "recurrence/relayout.py",
}  # fmt: skip
HOT = {
    *(str(path.relative_to(ROOT)) for folder in ("attention", "recurrence") for path in (ROOT / folder).rglob("*.py")),
    *(f"batch/{name}.py" for name in ("loss", "sharding", "token_scores", "trees")),
    "layouts/thd_order.py", "_torch.py",
} - NOT_HOT  # fmt: skip
assert all((ROOT / name).exists() for name in NOT_HOT)
# Functions that run before any step, when plans, rank plans or modules are made, or a step is compiled.
PLAN_TIME = {
    "attention/rank_plan.py": {"build", "local_plan"},
    "attention/context_parallel.py": {"_check_module", "_probe_mask"},
    "attention/ulysses.py": {"trade_of"},
    "attention/kernels/flex.py": {"of"},
    "attention/kernels/varlen.py": {"of"},
    "batch/sharding.py": {"_check_padding"},  # reads an attention mask, which loaders make on the host
}
# What lies in host memory: tensors, numpy arrays and numbers.
ON_HOST = {
    "attention/compare.py": {
        "value.numpy()", "float(number)", "float(value)", "int(forward[0])", "mesh.mesh.flatten().tolist()",
        "torch.tensor(record(call, [*map(_torch.find_group, groups.split())], lambda: ranks, of))",
    },
    "attention/failure.py": {"mesh.mesh.flatten().tolist()"},
    "attention/kernels/varlen.py": {"calls.tolist()"},
    "attention/tokens.py": {"int(plan.kv_layout.tokens_per_rank.max())"},
    "batch/loss.py": {"num_valid.item()", "int((labels != IGNORE_INDEX).sum())"},
    "batch/token_scores.py": {"wrong.nonzero()", "wrong.nonzero()[:1].tolist()"},
    "batch/trees.py": {"torch.tensor(list(digest), dtype=torch.uint8)"},
    "recurrence/layers.py": {"float(factor)"},
    "recurrence/_ops.py": {"counts.tolist()", "read_counts.tolist()"},
    "recurrence/chunkwise.py": {"counts.tolist()"},
}  # fmt: skip

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
    asked = [x.test for x in nodes if isinstance(x, (ast.If, ast.While, ast.IfExp, ast.Assert))]
    for value in [*asked, *[x for node in nodes if isinstance(node, ast.BoolOp) for x in node.values]]:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _TRUTH:
            found.append(ast.unparse(value))
    return found


@pytest.mark.parametrize("name", sorted(HOT))
def test_the_hot_path_never_waits(name: str) -> None:
    assert set(waits((ROOT / name).read_text(), PLAN_TIME.get(name, ()))) == ON_HOST.get(name, set())


def test_what_waits_is_found() -> None:
    for line in ("n = x.sum().item()", "y = x.to('cpu')", "n = int(x.max())", "y = 1 if x.any() else 2"):
        assert waits(line) and not waits(f"def made_before(): {line}", {"made_before"})
    assert not waits("if x.shape[0] > 1: y = x.to(q.device, non_blocking=q.device.type != 'cpu')")
