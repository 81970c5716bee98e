"""PlannedForward: the forward of one mixer, whose functions know of ranks while a batch is planned.

Mixers of transformers compute everything that crosses tokens in a few functions of their modeling file. The forward of
an instance becomes its class's own forward, rebuilt with other globals: those functions are replaced, everything else
is transformers' code. No class and no module changes.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import spanwise
from spanwise.integrations.transformers.planned import ARGUMENT, PlannedBatch, planned_of

WHOLE = "forward"  # in place of a name of a function: the forward itself


class PlannedForward:
    """Instance attribute `forward` of a mixer.

    Attributes:
        module: the mixer.
        functions: what its forward calls in place of functions of its file, each with a route in front; or what
            replaces its forward, under the name `WHOLE`.
        expected: whether the decoder runs a planned batch, so that a call without a plan is an error.
    """

    module: nn.Module
    functions: Mapping[str, Callable[..., Any]]
    expected: bool
    _current: PlannedBatch | None  # of the call that runs
    _planned: Callable[..., Any]  # the forward of planned batches

    def __init__(self, module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.__setstate__({"module": module, "functions": functions})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        planned = mask if isinstance(mask, PlannedBatch) else kwargs.pop(ARGUMENT, None) or planned_of(mask)
        if planned is None:
            if self.expected:
                name = type(self.module).__name__
                raise ValueError(f"{name} was called without the plan of its batch; its model must pass keywords on")
            return type(self.module).forward(self.module, *args, **kwargs)
        kwargs["attention_mask"] = None  # there is no padding
        tokens = (args[0] if args else kwargs["hidden_states"]).shape[1]
        if planned.there is not None:
            assert planned.route is not None
            move = functools.partial(_moved, planned.there, planned.route.tokens.shape[0])
            args = (*(move(x) for x in args[:1]), *args[1:])
            kwargs |= {n: move(x) for n in ("hidden_states", "position_ids") if (x := kwargs.get(n)) is not None}
        self._current = planned
        try:
            output = self._planned(self.module, *args, **kwargs)
        finally:
            self._current = None
        if planned.back is None:
            return output
        if isinstance(output, tuple):
            return _moved(planned.back, tokens, output[0]), *output[1:]
        return _moved(planned.back, tokens, output)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._current is not None
        kwargs.pop(ARGUMENT, None)
        return function(self._current.route, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:  # for copies and pickles: the rest belongs to this instance
        return {"module": self.module, "functions": self.functions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module, self.functions = state["module"], state["functions"]
        self.expected, self._current = False, None
        calls = {name: functools.partial(self._call, f) for name, f in self.functions.items()}
        self._planned = calls[WHOLE] if WHOLE in calls else with_globals(type(self.module).forward, calls)


def _moved(way: spanwise.RelayoutRoute, tokens: int, x: torch.Tensor) -> torch.Tensor:
    """`x` ``[1, T, …]`` in the other layout, of which compiled code then knows that it has `tokens` tokens."""
    x = spanwise.relayout(x, way)
    torch._check(x.shape[1] == tokens)
    return x


def plan_for_mask(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook of layers that give their mixer a mask and no keyword arguments: the plan in place of the mask."""
    planned = kwargs.get(ARGUMENT)
    return None if planned is None else (args, kwargs | {"attention_mask": planned})


def with_globals(function: Callable[..., Any], replaced: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of `function`, without its decorators, that sees `replaced` among its globals.

    >>> length = with_globals(lambda x: len(x) + 1, {"len": lambda x: 41})
    >>> length([])
    42
    """
    inner = inspect.unwrap(function)
    names = inner.__globals__ | dict(replaced)
    del names["__name__"]  # torch.compile looks up globals in the module of this name, where there is one
    copy = types.FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__, copy.__module__ = inner.__kwdefaults__, inner.__module__
    return copy
