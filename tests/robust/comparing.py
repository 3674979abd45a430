"""One outcome against the truth: NaN where the truth has none, inf where it is finite, and anything out of bounds."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from robust.bounds import Truth
from robust.core_runs import TYPES, Outcome

#: one rounding to the dtype of the gradient; below its smallest normal number the steps are of fixed size
UNIT = {name: float(ml_dtypes.finfo(dtype).eps) / 2 for name, dtype in TYPES.items()}
SMALLEST = {name: float(ml_dtypes.finfo(dtype).tiny) for name, dtype in TYPES.items()}
LARGEST = {name: float(ml_dtypes.finfo(dtype).max) for name, dtype in TYPES.items()}


def faults(outcome: Outcome, expected: Truth, dtype: str) -> list[str]:
    """Everything that is wrong with an outcome, in words."""
    found = _scalar("loss", outcome.loss, expected.loss, expected.loss_bound, expected)
    for name, (value, bound) in expected.losses.items():
        found += _scalar(f"losses[{name!r}]", outcome.losses[name], value, bound, expected)
    if not expected.uncertain_metrics:
        for name, (value, bound) in expected.metrics.items():
            if name in outcome.metrics:
                found += _scalar(f"metrics[{name!r}]", outcome.metrics[name], value, bound, expected)
    return found + _gradient(outcome.gradient, expected, dtype)


def _scalar(name: str, got: float, value: float, bound: float, expected: Truth) -> list[str]:
    if np.isnan(value):
        # A NaN in the data of a valid row must stay visible.
        return [] if not np.isfinite(got) else [f"{name}: {got}, but the truth is NaN"]
    if np.isinf(value):
        return [] if got == value or expected.flushed else [f"{name}: {got}, but the truth is {value}"]
    if np.isinf(bound) or (expected.uncertain and not np.isnan(got)):
        return []
    return [] if abs(got - value) <= bound else [f"{name}: {got}, off by {got - value:.3g}, bound {bound:.3g}"]


def _gradient(got: np.ndarray, expected: Truth, dtype: str) -> list[str]:
    value, bound = expected.gradient, expected.gradient_bound
    bound = bound + UNIT[dtype] * (np.abs(value) + bound) + SMALLEST[dtype] * 2 * UNIT[dtype]
    if dtype in ("float32", "bfloat16"):
        bound = bound + SMALLEST[dtype]  # flushed to zero
    found = []
    for row in np.ndindex(value.shape[:-1]):
        if np.isnan(value[row]).any():
            if np.isfinite(got[row]).all():
                found.append(f"gradient{row}: {got[row]}, but the truth has a NaN: {value[row]}")
            continue
        outside = np.abs(value[row]) + bound[row] > LARGEST[dtype]
        wrong = ~(np.abs(got[row] - value[row]) <= bound[row]) & ~(got[row] == value[row]) & ~outside
        if expected.uncertain:
            wrong = np.isnan(got[row]) & ~outside
        for column in np.flatnonzero(wrong)[:3]:
            off = got[row][column] - value[row][column]
            found.append(
                f"gradient{(*row, int(column))}: {got[row][column]}, off by {off:.3g}, "
                f"truth {value[row][column]:.6g}, bound {bound[row][column]:.3g}"
            )
    return found
