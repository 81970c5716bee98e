"""No step waits for the device: the modules that run in one hold no call that reads a tensor's value on the host.

A static check, so that it needs no GPU; `tests/gpu` runs a step under ``torch.cuda.set_sync_debug_mode("error")``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "spanwise"

HOT = [
    "attention.py",
    "kv_pieces.py",
    "kernels/__init__.py",
    "kernels/_rounds.py",
    "kernels/flex.py",
    "kernels/merge.py",
    "kernels/varlen.py",
    "exchange/_gradients.py",
    "exchange/again.py",
    "exchange/all_gather.py",
    "exchange/needed.py",
    "exchange/ring.py",
    "exchange/ulysses.py",
]
NOT_HOT = {
    "kernels/_checks.py": "reads shapes and dtypes",
    "kernels/_flex_cpu.py": "CPU",
    "kernels/_segments.py": "numpy, when a plan is made",
    "kernels/_tiles.py": "numpy, CPU",
    "kernels/reference.py": "the oracle",
    "kernels/sdpa.py": "CPU",
    "exchange/__init__.py": "empty",
    "exchange/failure.py": "waits for collectives with a deadline, by their own clock",
}
# Built with the plan, before any step.
PLAN_TIME = {"from_numpy", "from_segments"}
# Tensors that lie in host memory.
ON_HOST = {"kernels/_rounds.py": {"calls.tolist()"}, "kernels/varlen.py": {"tables.calls.tolist()"}}

_READS = {"item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "synchronize"}
_NUMBERS = {"bool", "int", "float"}
_TORCH = {"torch.equal", "torch.allclose", "torch.tensor", "torch.as_tensor", "torch.is_nonzero"}
_TRUTH = {"any", "all", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge"}


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls outside of the functions that make plans."""
    if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)) and tree.name in PLAN_TIME:
        return
    if isinstance(tree, ast.Call):
        yield tree
    for child in ast.iter_child_nodes(tree):
        yield from _calls(child)


def _truth_values(tree: ast.AST) -> Iterator[ast.AST]:
    """Expressions that are asked whether they are true."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand


def waits(source: str) -> list[str]:
    """The expressions of a module that would make the host wait for the device, were their tensors there."""
    tree = ast.parse(source)
    found = []
    for call in _calls(tree):
        name = ast.unparse(call.func)
        reads = isinstance(call.func, ast.Attribute) and call.func.attr in _READS
        number = name in _NUMBERS and not all(isinstance(arg, ast.Constant) for arg in call.args)
        to_cpu = isinstance(call.func, ast.Attribute) and call.func.attr == "to" and "'cpu'" in ast.unparse(call)
        if reads or number or to_cpu or name in _TORCH:
            found.append(ast.unparse(call))
    for value in _truth_values(tree):
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _TRUTH:
            found.append(ast.unparse(value))
    return found


@pytest.mark.parametrize("name", HOT)
def test_the_hot_path_never_waits(name: str) -> None:
    assert set(waits((ROOT / name).read_text())) == ON_HOST.get(name, set())


def test_packed_attention_never_waits() -> None:
    path = ROOT / "packed.py"
    if not path.exists():
        pytest.skip("there is no packed attention yet")
    assert waits(path.read_text()) == []


def test_every_kernel_and_exchange_is_on_a_list() -> None:
    found = {str(path.relative_to(ROOT)) for folder in ("kernels", "exchange") for path in (ROOT / folder).glob("*.py")}
    listed = {name for name in (*HOT, *NOT_HOT) if "/" in name}
    assert found == listed


@pytest.mark.parametrize(
    "line",
    [
        "n = lengths.sum().item()",
        "sizes = x.tolist()",
        "y = x.cpu()",
        "y = x.to('cpu', non_blocking=False)",
        "y = x.detach().numpy()",
        "rows = mask.nonzero()",
        "n = int(x.max())",
        "flag = bool(mask.any())",
        "scale = float(x[0])",
        "if mask.any():\n    pass",
        "assert x.isfinite().all()",
        "y = [z for z in zs if not z.any()]",
        "same = torch.equal(x, y)",
        "x = torch.tensor([1, 2], device=q.device)",
        "torch.cuda.synchronize()",
        "def f(x):\n    def g():\n        return x.item()",
    ],
)
def test_what_waits_is_found(line: str) -> None:
    assert waits(line) != []


@pytest.mark.parametrize(
    "line",
    [
        "top = float('-inf')",
        "y = x.to(q.device)",
        "if x.shape[0] > 1:\n    y = mask.any(1)",
        "def from_numpy(table):\n    return torch.tensor(table)",
    ],
)
def test_what_does_not_wait_is_let_through(line: str) -> None:
    assert waits(line) == []
