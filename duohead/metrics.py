"""Metrics as (numerator, denominator) parts, so that micro-batches and ranks combine exactly.

A mean of means is wrong when the parts differ in size; these add numerators and denominators and divide once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Mean(NamedTuple):
    """Σ value / Σ weight; 0 where nothing was counted."""

    value: Any
    weight: Any


class ExpMean(NamedTuple):
    """exp(Σ value / Σ weight), a perplexity; 1 where nothing was counted."""

    value: Any
    weight: Any


class Minimum(NamedTuple):
    """The smallest value; 0 where nothing was counted."""

    value: Any
    weight: Any


class Maximum(NamedTuple):
    """The largest value; 0 where nothing was counted."""

    value: Any
    weight: Any


class Total(NamedTuple):
    """Σ value."""

    value: Any
    weight: Any


Part = Mean | ExpMean | Minimum | Maximum | Total
KINDS: dict[str, type[Any]] = {
    "mean": Mean,
    "exp_mean": ExpMean,
    "min": Minimum,
    "max": Maximum,
    "sum": Total,
}


def finish(xp: Any, part: Part) -> Any:
    """The metric's value from its part, with the array functions of ``xp``."""
    counted = part.weight != 0  # NaN counts, and shows
    if isinstance(part, (Mean, ExpMean)):
        mean = part.value / xp.where(counted, part.weight, xp.ones_like(part.weight))
        mean = xp.where(counted, mean, xp.zeros_like(mean))
        return xp.exp(mean) if isinstance(part, ExpMean) else mean
    return xp.where(counted, part.value, xp.zeros_like(part.value))


def combine(parts: Sequence[Mapping[str, Part]]) -> dict[str, Part]:
    """Joins ``aux.parts`` of several micro-batches or ranks into those of the whole batch.

    Works on NumPy, torch and JAX scalars alike; ``finish_all`` turns the result into numbers.

    >>> whole = combine([{"m": Mean(1.0, 1.0)}, {"m": Mean(5.0, 3.0)}])
    >>> finish_all(whole)
    {'m': 1.5}
    """
    if not parts:
        return {}
    joined = dict(parts[0])
    for other in parts[1:]:
        if set(other) != set(joined):
            raise ValueError(f"parts: all must hold the same metrics, got {sorted(joined)} and {sorted(other)}")
        for name, part in other.items():
            joined[name] = _join(joined[name], part)
    return joined


def _array(value: Any) -> Any:
    return value if hasattr(value, "clip") else np.float64(value)


def _join(a: Part, b: Part) -> Part:
    weight = a.weight + b.weight
    # clip, an array's own method: no framework is named, nothing is synchronised, it traces, and a NaN stays.
    if isinstance(a, Minimum):
        return Minimum(_array(a.value).clip(None, b.value), weight)
    if isinstance(a, Maximum):
        return Maximum(_array(a.value).clip(b.value, None), weight)
    return type(a)(a.value + b.value, weight)


def pack(xp: Any, parts: Mapping[str, Part]) -> Any:
    """All parts as one array ``[2, parts]`` of values and weights: what travels in one collective."""
    return xp.stack([xp.stack([part[i] for part in parts.values()]) for i in (0, 1)])


def combine_packed(xp: Any, parts: Mapping[str, Part], packed: Any) -> dict[str, Part]:
    """The whole batch's parts from every rank's ``pack`` in an array ``[ranks, 2, parts]``."""
    joins = {Minimum: xp.min_all, Maximum: xp.max_all}
    return {
        name: type(part)(joins.get(type(part), xp.sum_all)(packed[:, 0, i]), xp.sum_all(packed[:, 1, i]))
        for i, (name, part) in enumerate(parts.items())
    }


def finish_all(parts: Mapping[str, Part]) -> dict[str, float]:
    """Python numbers from (combined) parts."""
    found: dict[str, float] = {}
    for name, part in parts.items():
        value, weight = float(part.value), float(part.weight)
        if isinstance(part, (Mean, ExpMean)):
            mean = value / weight if weight != 0 else 0.0
            found[name] = _exp(mean) if isinstance(part, ExpMean) else mean
        else:
            found[name] = value if weight != 0 else 0.0
    return found


def _exp(x: float) -> float:
    """e^x, and inf past the largest float, as arrays have it."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
