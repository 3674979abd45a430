"""The array functions of the core for NumPy: the terms themselves in float64, with no framework at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

name = "numpy"
inf = math.inf
nan = math.nan

exp = np.exp
log = np.log
tanh = np.tanh
where = np.where
zeros_like = np.zeros_like
ones_like = np.ones_like
stack = np.stack


def concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(list(arrays), axis=-1)


def term_names(array: np.ndarray) -> str:
    """The name of the bound copies of terms that compute in this array's dtype."""
    return name


def compute_dtype(array: np.ndarray) -> Any:
    return np.float64


def cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    return np.asarray(array).astype(dtype)


def arange(count: int, like: np.ndarray) -> np.ndarray:
    return np.arange(count)


def sum_last(array: np.ndarray) -> np.ndarray:
    return np.sum(array, axis=-1)


def sum_weights(weights: np.ndarray) -> np.ndarray:
    """Σ e^(x − max) over the last axis."""
    return np.sum(weights, axis=-1)


def sum_first(array: np.ndarray) -> np.ndarray:
    return np.sum(array, axis=0)


def max_last(array: np.ndarray) -> np.ndarray:
    return np.max(array, axis=-1)


def max_first(array: np.ndarray) -> np.ndarray:
    return np.max(array, axis=0)


def sum_all(array: np.ndarray) -> np.ndarray:
    return np.sum(array)


def min_all(array: np.ndarray) -> np.ndarray:
    return np.min(array, initial=inf)


def max_all(array: np.ndarray) -> np.ndarray:
    return np.max(array, initial=-inf)


def minimum(a: Any, b: Any) -> Any:
    return np.minimum(a, b)


def sum_rows(array: np.ndarray) -> np.ndarray:
    """Over all axes but the first."""
    return np.sum(array, axis=tuple(range(1, array.ndim)))


def min_rows(array: np.ndarray) -> np.ndarray:
    return np.min(array, axis=tuple(range(1, array.ndim)), initial=inf)


def max_rows(array: np.ndarray) -> np.ndarray:
    return np.max(array, axis=tuple(range(1, array.ndim)), initial=-inf)


def take(array: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return array[ids]


def segment_sum(values: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    out = np.zeros((values.shape[0], count), values.dtype)
    np.add.at(out, (slice(None), ids), values)  # type: ignore[arg-type]
    return out


def value_and_derivatives(
    function: Callable[..., Any], arguments: Sequence[Any], positions: Sequence[int]
) -> tuple[Any, tuple[Any, ...]]:
    raise NotImplementedError(
        "NumPy has no automatic differentiation: a term without derivatives runs in torch and JAX only"
    )
