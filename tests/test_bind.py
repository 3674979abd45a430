"""Binding a term to a framework, and the restricted style that every built-in one keeps to."""

from __future__ import annotations

import builtins
import math
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from restricted_style import family_of, faults_of

import duohead_jax  # binds every term to jax.numpy
import duohead_torch  # and to torch
from duohead import namespace
from duohead.bind import BindError, bind
from duohead.namespace import NAMES, abs, exp, log, maximum, minimum, sigmoid, sqrt, where
from duohead.term import _BOUND, NUMPY_NAMES, Term
from duohead.terms.policy import grpo_clip, ratio_of

BUILT_IN = sorted(
    {item.function for item in _BOUND if item.function.__module__.startswith("duohead.")},
    key=lambda function: (function.__module__, function.__name__),
)
OFFSET = 0.25
PATTERN = "a word"
TABLE = {"a": 1.0}


class Pair(NamedTuple):
    first: Any
    second: Any


# These are what the tests bind; their globals are this module's.
def helper(x):  # type: ignore[no-untyped-def]
    return exp(x) + OFFSET


def with_helper(x, y):  # type: ignore[no-untyped-def]
    return Pair(helper(x) * y, helper(y))


def every_name(x):  # type: ignore[no-untyped-def]
    low = minimum(maximum(x, -1.0), 1.0)
    return where(x > 0.0, log(exp(low)), sqrt(abs(x))) * sigmoid(x)


def recursive(x):  # type: ignore[no-untyped-def]
    return where(x > 0.0, x, recursive(x))


def uses_module(x):  # type: ignore[no-untyped-def]
    return math.exp(x)


def uses_text(x):  # type: ignore[no-untyped-def]
    return where(x > 0.0, PATTERN, x)


def uses_table(x):  # type: ignore[no-untyped-def]
    return x * TABLE["a"]


def uses_foreign_helper(x):  # type: ignore[no-untyped-def]
    return uses_module(x)


def make_closure() -> Any:
    factor = 2.0

    def closes_over(x):  # type: ignore[no-untyped-def]
        return x * factor

    return closes_over


# ---------------------------------------------------------------------------------------------------------------- bind


@pytest.mark.parametrize("name", NAMES)
def test_an_unbound_placeholder_computes_nothing(name: str) -> None:
    placeholder = getattr(namespace, name)
    with pytest.raises(RuntimeError, match=rf"duohead\.namespace\.{name} is a placeholder: bind the term"):
        placeholder(1.0)
    assert repr(placeholder) == f"<unbound {name}>"


def test_an_unbound_term_computes_nothing() -> None:
    with pytest.raises(RuntimeError, match="is a placeholder"):
        ratio_of(0.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (make_closure(), r"closes over \('factor',\): pass them as parameters instead"),
        (uses_module, r"uses_module uses 'math', a module: a term may use exp, log, where"),
        (uses_text, r"uses 'PATTERN', a str: a term may use"),
        (uses_table, r"uses 'TABLE', a dict: a term may use"),
        (uses_foreign_helper, r"uses_module uses 'math', a module"),
    ],
)
def test_what_cannot_be_bound(function: types.FunctionType, message: str) -> None:
    with pytest.raises(BindError, match=message):
        bind(function, NUMPY_NAMES)


def test_only_functions_are_terms() -> None:
    with pytest.raises(TypeError, match="a term is a plain function, got"):
        Term(np.exp)


def test_the_same_code_with_globals_of_its_own() -> None:
    copy = bind(with_helper, NUMPY_NAMES)
    assert copy.__code__ is with_helper.__code__
    assert copy.__globals__ is not with_helper.__globals__
    assert set(copy.__globals__) == {"__builtins__", "helper", "Pair"}
    assert copy.__globals__["helper"].__code__ is helper.__code__
    assert copy.__globals__["helper"].__globals__["exp"] is np.exp
    assert "__name__" not in copy.__globals__
    result = copy(np.float64(1.0), 2.0)
    assert isinstance(result, Pair)
    assert result.first == (math.exp(1.0) + 0.25) * 2.0


def test_copies_have_distinct_qualified_names() -> None:
    names = [bind(function, NUMPY_NAMES).__qualname__ for function in (helper, with_helper, *BUILT_IN)]
    assert len(set(names)) == len(names)
    assert all("." not in name for name in names)


def test_a_helper_is_bound_once_and_may_call_itself() -> None:
    copy = bind(recursive, NUMPY_NAMES)
    assert copy.__globals__["recursive"] is copy


def test_wrapping() -> None:
    """What Triton needs: every function wrapped, every number a constant, names added to the globals."""
    wrapped: list[str] = []

    def wrap(function: types.FunctionType) -> types.FunctionType:
        wrapped.append(function.__name__)
        return function

    copy = bind(
        with_helper, NUMPY_NAMES, wrap_function=wrap, wrap_constant=lambda value: value * 4.0, extra={"tl": "language"}
    )
    assert wrapped == ["with_helper", "helper"]
    assert copy.__globals__["tl"] == copy.__globals__["helper"].__globals__["tl"] == "language"
    assert copy.__globals__["helper"].__globals__["OFFSET"] == 1.0


def test_every_name_of_the_namespace_in_every_framework() -> None:
    points = np.linspace(-3.0, 3.0, 13)
    term = Term(every_name, {"x": "logprob"})
    expected = term.bound["numpy"](points)
    sigma = 1.0 / (1.0 + np.exp(-points))
    np.testing.assert_allclose(
        expected, np.where(points > 0, points.clip(-1.0, 1.0), np.sqrt(np.abs(points))) * sigma, rtol=1e-14
    )
    np.testing.assert_allclose(term.bound["torch"](torch.tensor(points)).numpy(), expected, rtol=1e-14)
    np.testing.assert_allclose(term.bound["jax"](points), expected, rtol=1e-14)
    _BOUND.remove(term)


@pytest.mark.parametrize("numbers", [(2.0, -1.0), (-1.0, 2.0)])
def test_torch_takes_numbers_where_torch_itself_would_not(numbers: tuple[float, float]) -> None:
    names = duohead_torch.namespace.TERM_NAMES
    tensor = torch.tensor([-3.0, 0.0, 3.0])
    for number in numbers:
        assert torch.equal(names["minimum"](tensor, number), names["minimum"](number, tensor))
        assert torch.equal(names["maximum"](tensor, number), torch.clamp(tensor, min=number))
    assert duohead_jax


# --------------------------------------------------------------------------------------------------------------- style


def test_there_are_terms() -> None:
    assert grpo_clip in BUILT_IN
    assert len(BUILT_IN) >= 29


@pytest.mark.parametrize("function", BUILT_IN, ids=lambda function: function.__name__)
def test_built_in_terms_keep_to_the_style(function: types.FunctionType) -> None:
    for one in family_of(function):
        assert faults_of(one) == [], one.__qualname__
        assert one.__module__ == function.__module__, "a helper is in the module of its term"


def power(x):  # type: ignore[no-untyped-def]
    return x**2


def builtin_abs(x):  # type: ignore[no-untyped-def]
    return builtins.abs(x)


def chained(x):  # type: ignore[no-untyped-def]
    return where(0.0 < x < 1.0, x, 0.0)


def conjunction(x):  # type: ignore[no-untyped-def]
    return where(x > 0.0 and x < 1.0, x, 0.0)


def negation(x):  # type: ignore[no-untyped-def]
    return where(not x, x, 0.0)


def branches(x):  # type: ignore[no-untyped-def]
    return x if x > 0.0 else -x


def keyword_only(x, *, scale):  # type: ignore[no-untyped-def]
    return x * scale


def annotated(x: float) -> float:
    return x


def indexes(x):  # type: ignore[no-untyped-def]
    return x[0]


def calls_a_builtin(x):  # type: ignore[no-untyped-def]
    return max(x, 0.0)


def keyword_argument(x):  # type: ignore[no-untyped-def]
    return minimum(x, b=0.0)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (power, "Pow"),
        (builtin_abs, "an attribute"),
        (chained, "chained"),
        (conjunction, "`and`/`or`"),
        (negation, "Not"),
        (branches, "an `if`"),
        (keyword_only, "keyword-only"),
        (annotated, "an annotation"),
        (indexes, "indexing"),
        (calls_a_builtin, "a call of max"),
        (keyword_argument, "a keyword argument"),
        (make_closure(), "not at module level"),
    ],
)
def test_the_style_check_finds_what_it_should(function: types.FunctionType, fault: str) -> None:
    assert any(fault in found for found in faults_of(function))
