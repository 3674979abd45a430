"""The array functions of the core for jax.numpy, and jax.numpy as a namespace of terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from duohead.term import add_namespace

name = "jax"
inf = math.inf
nan = math.nan

exp = jnp.exp
log = jnp.log
sqrt = jnp.sqrt
tanh = jnp.tanh
sigmoid = jax.nn.sigmoid
abs = jnp.abs
where = jnp.where
minimum = jnp.minimum
maximum = jnp.maximum
zeros_like = jnp.zeros_like
ones_like = jnp.ones_like
stack = jnp.stack


def concatenate(arrays: Sequence[jax.Array]) -> jax.Array:
    """Joins along the last axis."""
    return jnp.concatenate(list(arrays), axis=-1)


def term_names(array: jax.Array) -> str:
    """The name of the bound copies of terms that compute in this array's dtype."""
    return name


def compute_dtype(array: jax.Array) -> Any:
    """float64 for float64, else float32."""
    return jnp.float64 if array.dtype == jnp.float64 else jnp.float32


def cast(array: jax.Array, dtype: Any) -> jax.Array:
    return array.astype(dtype)


def arange(count: int, like: jax.Array) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)


def sum_last(array: jax.Array) -> jax.Array:
    return jnp.sum(array, axis=-1)


def sum_weights(weights: jax.Array) -> jax.Array:
    """Σ e^(x − max) over the last axis."""
    return jnp.sum(weights, axis=-1)


def sum_first(array: jax.Array) -> jax.Array:
    return jnp.sum(array, axis=0)


def max_last(array: jax.Array) -> jax.Array:
    return jnp.max(array, axis=-1)


def max_first(array: jax.Array) -> jax.Array:
    return jnp.max(array, axis=0)


def sum_all(array: jax.Array) -> jax.Array:
    return jnp.sum(array)


def min_all(array: jax.Array) -> jax.Array:
    return jnp.min(array, initial=inf)


def max_all(array: jax.Array) -> jax.Array:
    return jnp.max(array, initial=-inf)


def sum_rows(array: jax.Array) -> jax.Array:
    """Over all axes but the first."""
    return jnp.sum(array, axis=tuple(range(1, array.ndim)))


def min_rows(array: jax.Array) -> jax.Array:
    return jnp.min(array, axis=tuple(range(1, array.ndim)), initial=inf)


def max_rows(array: jax.Array) -> jax.Array:
    return jnp.max(array, axis=tuple(range(1, array.ndim)), initial=-inf)


def take(array: jax.Array, ids: jax.Array) -> jax.Array:
    """``array[ids]`` for a vector and ids of any shape."""
    return array[ids]


def segment_sum(values: jax.Array, ids: jax.Array, count: int) -> jax.Array:
    """``[rows, n]`` summed into ``[rows, count]`` by id."""
    return jnp.zeros((values.shape[0], count), values.dtype).at[:, ids].add(values)


def value_and_derivatives(
    function: Callable[..., Any], arguments: Sequence[Any], positions: Sequence[int]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """An elementwise function's value and its derivatives with respect to some of its arguments."""

    def of_positions(*chosen: jax.Array) -> jax.Array:
        filled = list(arguments)
        for position, value in zip(positions, chosen, strict=True):
            filled[position] = value
        return function(*filled)

    value, pull = jax.vjp(of_positions, *[arguments[position] for position in positions])
    return value, pull(jnp.ones_like(value))


TERM_NAMES = {
    "exp": exp,
    "log": log,
    "where": where,
    "minimum": minimum,
    "maximum": maximum,
    "abs": abs,
    "sqrt": sqrt,
    "sigmoid": sigmoid,
}
add_namespace(name, TERM_NAMES)
