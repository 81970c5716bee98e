"""A collective call in what must be equal on all ranks, and which call is to be expected after others."""

from __future__ import annotations

from typing import Any, NamedTuple

CONTEXTS = (12, 4, 1)  # numbers of calls before a call, from which it is expected
LONGEST_RUN = 1024  # calls of one name in a row that are counted, as of the layers of a model


class Call(NamedTuple):
    """A collective call in all that must be equal on all ranks.

    Attributes:
        plan: fingerprint of the plan; empty for a call without one.
        name: of the function.
        labels: of each of `values`; equal in all calls of a function.
        values: hashable, with a `repr` that is equal in all processes.
        amount: a number that changes from call to call, such as one of tokens. A call with one is never expected.
        forward: number of the call whose backward this is; -1 for others.
    """

    plan: bytes
    name: str
    labels: tuple[str, ...]
    values: tuple[Any, ...]
    amount: float | None = None
    forward: int = -1

    def facts(self) -> dict[str, str]:
        """The parts of the call in words."""
        values = {label: _in_words(value) for label, value in zip(self.labels, self.values, strict=True)}
        amount = {} if self.amount is None else {"amount": str(self.amount)}
        plan = {"plan": self.plan.hex()} if self.plan else {}
        of = {} if self.forward < 0 else {"of call": str(self.forward)}
        return {"call": self.name} | of | plan | values | amount


def _in_words(value: Any) -> str:
    return str(value).removeprefix("torch.")


class _Context:
    """The last calls up to some length; `follows` is the kind of the call that came after them the last time."""

    __slots__ = ("follows",)

    def __init__(self) -> None:
        self.follows: int | None = None


class _State:
    """The calls so far, as far as expectations go.

    Attributes:
        runs: the last two runs of calls of one name: name, calls so far.
        last: kinds of the last calls.
        contexts: those that end here, longest first.
        after: the state after a call of each kind.
    """

    __slots__ = ("after", "contexts", "last", "runs")

    def __init__(self, runs: tuple[tuple[str, int], ...], last: tuple[int, ...], contexts: list[_Context]) -> None:
        self.runs, self.last, self.contexts = runs, last, contexts
        self.after: dict[int, _State] = {}


class Expectation:
    """What the next call will be, from the calls so far: the plan of the last call, and what followed the last calls.

    A model makes one call for each of its layers, then as many backwards. So the first context also has the lengths of
    the last two runs of calls of one name. States are linked, so that a call that came before costs a microsecond.

    Equal histories give equal expectations, which is all that correctness needs.

    >>> expected, a, b = Expectation(), Call(b"1", "f", (), (0,)), Call(b"1", "f", (), (1,))
    >>> [expected.meets(call) for call in (a, b, a, b, a, b)]
    [False, False, False, True, True, True]
    """

    def __init__(self) -> None:
        self._plan = b""
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._contexts: dict[tuple[Any, ...], _Context] = {}
        self._states: dict[tuple[Any, ...], _State] = {}
        self._state = self._at((), ())

    def meets(self, call: Call) -> bool:
        """Whether `call` is the expected one; it then belongs to the calls so far."""
        if max(len(self._kinds), len(self._contexts)) > 4096:  # values that never come back
            for known in (self._kinds, self._contexts, self._states):
                known.clear()
            self._state = self._at((), ())
        kind = self._kinds.setdefault((call.name, call.values), len(self._kinds))
        state, expected = self._state, None
        for context in state.contexts:
            if expected is None:  # the first context that has been seen decides
                expected = context.follows
            context.follows = kind
        met = expected == kind and call.plan in (b"", self._plan) and call.amount is None
        self._plan = call.plan or self._plan
        self._state = state.after.get(kind) or self._after(state, kind, call.name)
        return met

    def _after(self, state: _State, kind: int, name: str) -> _State:
        runs = state.runs
        if runs and runs[-1][0] == name:
            runs = (*runs[:-1], (name, min(runs[-1][1] + 1, LONGEST_RUN)))
        else:
            runs = (*runs, (name, 1))[-2:]
        state.after[kind] = self._at(runs, (*state.last, kind)[-CONTEXTS[0] :])
        return state.after[kind]

    def _at(self, runs: tuple[tuple[str, int], ...], last: tuple[int, ...]) -> _State:
        if (runs, last) not in self._states:
            keys = dict.fromkeys([(runs, last), *[last[-length:] for length in CONTEXTS]])  # short ones may be equal
            contexts = [self._contexts.setdefault(key, _Context()) for key in keys]
            self._states[runs, last] = _State(runs, last, contexts)
        return self._states[runs, last]
