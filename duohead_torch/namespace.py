"""The array functions of the core for torch, and torch as a namespace of terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from duohead.term import add_namespace

name = "torch"
inf = math.inf
nan = math.nan

exp = torch.exp
log = torch.log
sqrt = torch.sqrt
tanh = torch.tanh
sigmoid = torch.sigmoid
abs = torch.abs
zeros_like = torch.zeros_like
ones_like = torch.ones_like
stack = torch.stack
where = torch.where


def minimum(a: Any, b: Any) -> torch.Tensor:
    """Elementwise minimum; torch.minimum refuses Python numbers."""
    if not isinstance(a, torch.Tensor):
        a, b = b, a
    return torch.minimum(a, b) if isinstance(b, torch.Tensor) else torch.clamp(a, max=b)


def maximum(a: Any, b: Any) -> torch.Tensor:
    """Elementwise maximum; torch.maximum refuses Python numbers."""
    if not isinstance(a, torch.Tensor):
        a, b = b, a
    return torch.maximum(a, b) if isinstance(b, torch.Tensor) else torch.clamp(a, min=b)


def concatenate(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins along the last axis."""
    return torch.cat(list(arrays), dim=-1)


def compute_dtype(array: torch.Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if array.dtype == torch.float64 else torch.float32


def cast(array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return array.to(dtype)


def arange(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, device=like.device)


def _sum(array: torch.Tensor, dimension: Any = None) -> torch.Tensor:
    """A sum. Compiled for the CPU it would be a few long chains, so float32 is accumulated in float64 there.

    Eager sums are cascades and kernels sum in trees; at p = 0.9999 a chain loses ten times what a tree does.
    """
    if array.dtype != torch.float32 or array.device.type != "cpu" or not torch.compiler.is_compiling():
        return array.sum(dimension)
    return array.sum(dimension, dtype=torch.float64).to(torch.float32)


def sum_last(array: torch.Tensor) -> torch.Tensor:
    return _sum(array, -1)


def sum_weights(weights: torch.Tensor) -> torch.Tensor:
    """Σ e^(x − max) over the last axis, its ones apart: added to a row's maximum, small numbers lose their digits.

    Eager float32 on the CPU alone: compiled, it is in float64 there, and elsewhere it would be another read.
    """
    total = _sum(weights, -1)
    if weights.dtype != torch.float32 or weights.device.type != "cpu" or torch.compiler.is_compiling():
        return total
    rest = weights.frac().sum(-1)
    count_of_ones = (total - rest).round()
    return rest + count_of_ones


def sum_first(array: torch.Tensor) -> torch.Tensor:
    return array.sum(0)


def max_last(array: torch.Tensor) -> torch.Tensor:
    """The maximum over the last axis, -inf over none (an empty vocabulary shard)."""
    return array.amax(-1) if array.shape[-1] else array.new_full(array.shape[:-1], -inf)


def max_first(array: torch.Tensor) -> torch.Tensor:
    return array.amax(0)


def sum_all(array: torch.Tensor) -> torch.Tensor:
    return _sum(array)


def min_all(array: torch.Tensor) -> torch.Tensor:
    return array.amin() if array.numel() else array.new_full((), inf)


def max_all(array: torch.Tensor) -> torch.Tensor:
    return array.amax() if array.numel() else array.new_full((), -inf)


def _rest(array: torch.Tensor) -> list[int]:
    return list(range(1, array.ndim))


def sum_rows(array: torch.Tensor) -> torch.Tensor:
    """Over all axes but the first."""
    return _sum(array, _rest(array)) if array.ndim > 1 else array


def min_rows(array: torch.Tensor) -> torch.Tensor:
    if array.numel() == 0:
        return array.new_full(array.shape[:1], inf)
    return array.amin(_rest(array)) if array.ndim > 1 else array


def max_rows(array: torch.Tensor) -> torch.Tensor:
    if array.numel() == 0:
        return array.new_full(array.shape[:1], -inf)
    return array.amax(_rest(array)) if array.ndim > 1 else array


def take(array: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``array[ids]`` for a vector and ids of any shape."""
    return array[ids]


def segment_sum(values: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """``[rows, n]`` summed into ``[rows, count]`` by id."""
    out = values.new_zeros((values.shape[0], count))
    return out.index_add(1, ids.to(torch.int64), values)


def value_and_derivatives(
    function: Callable[..., Any], arguments: Sequence[Any], positions: Sequence[int]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """An elementwise function's value and its derivatives with respect to some of its arguments."""

    def of_positions(*chosen: torch.Tensor) -> torch.Tensor:
        filled = list(arguments)
        for position, value in zip(positions, chosen, strict=True):
            filled[position] = value
        return function(*filled)

    value, pull = torch.func.vjp(  # type: ignore[misc]
        of_positions, *[arguments[position] for position in positions]
    )
    return value, pull(torch.ones_like(value))


def term_names(array: torch.Tensor) -> str:
    """The name of the bound copies of terms that compute in this array's dtype."""
    return "torch64" if array.dtype == torch.float64 else name


def _where_in(dtype: torch.dtype) -> Callable[[Any, Any, Any], torch.Tensor]:
    """``where`` of two numbers has no dtype of its own: torch would take its default, and draw float64 down to it."""

    def where_of(condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, bool):  # an operand that is absent stands for the number 1
            return a if condition else b
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            a = torch.full((), a, dtype=dtype, device=condition.device)
        return torch.where(condition, a, b)

    return where_of


TERM_NAMES = {
    "exp": exp,
    "log": log,
    "where": _where_in(torch.float32),
    "minimum": minimum,
    "maximum": maximum,
    "abs": abs,
    "sqrt": sqrt,
    "sigmoid": sigmoid,
}
add_namespace(name, TERM_NAMES)
add_namespace("torch64", {**TERM_NAMES, "where": _where_in(torch.float64)})
