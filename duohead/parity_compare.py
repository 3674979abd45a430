"""How far two outcomes lie apart, and whether that is too far."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from duohead.parity_inputs import HALF, round_to
from duohead.parity_runs import Outcome

Array = np.ndarray

#: nats: below it a scalar's difference is taken relative to this, since a mean of values of both signs may be near 0
SMALL = 0.1
#: share of a row's largest gradient: what float32 arithmetic may leave in an entry whose parts cancel
ROUNDING = 1e-6
DIGITS = {"bfloat16": (8, -133), "float16": (11, -24)}  # of the significand; log2 of the smallest step


class Tolerances(NamedTuple):
    """``reference`` and ``between``: relative differences of values and, unless half, rms of gradients.

    Metrics have ``reference`` in both comparisons: the exponential of one token's log-ratio, say, is not averaged.
    """

    reference: float
    between: float
    places: int


DEFAULTS = {
    "float64": Tolerances(1e-12, 1e-13, 0),
    "float32": Tolerances(1e-5, 1e-6, 0),
    "bfloat16": Tolerances(1e-5, 1e-6, 1),
    "float16": Tolerances(1e-5, 1e-6, 1),
}


class Difference(NamedTuple):
    """Two outcomes apart: scalars relative to the reference, the gradient's relative rms and largest difference.

    ``differing`` counts entries that are not equal, ``beyond`` those further apart than the last places allowed (half
    precision only).
    """

    first: str
    second: str
    scalars: dict[str, float]
    metrics: dict[str, float]
    gradient_rms: float
    gradient_max: float
    differing: int
    beyond: int

    @property
    def worst_scalar(self) -> float:
        return max(self.scalars.values())

    @property
    def worst_metric(self) -> float:
        return max(self.metrics.values(), default=0.0)


def relative(a: float, b: float, scale: float) -> float:
    """|a − b| relative to a scale; 0 where both are the same, NaN or infinity too."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    difference = abs(a - b) / max(abs(scale), SMALL)
    return math.inf if math.isnan(difference) else difference


def compare(first: Outcome, second: Outcome, scale: Outcome, dtype: str, places: int) -> Difference:
    """``first`` beside ``second``; ``scale`` (the reference) is what differences are relative to."""
    a, b = first.gradient, second.gradient
    if dtype in HALF:
        a, b = round_to(a, dtype), round_to(b, dtype)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    apart = np.where(same, 0.0, np.abs(np.subtract(a, b, where=~same, out=np.zeros_like(a))))
    apart = np.where(np.isnan(apart), np.inf, apart)
    scalars = {"total": relative(first.loss, second.loss, scale.loss)}
    for name, value in scale.losses.items():
        scalars[name] = relative(first.losses[name], second.losses[name], value)
    return Difference(
        first.name,
        second.name,
        scalars,
        _compare_metrics(first, second, scale),
        _relative_rms(apart, scale.gradient),
        float(apart.max(initial=0.0)),
        int((~same).sum()),
        _beyond(apart, a, b, scale.gradient, dtype, places) if dtype in HALF else 0,
    )


def _compare_metrics(first: Outcome, second: Outcome, scale: Outcome) -> dict[str, float]:
    """The metrics that an implementation reports; the reference may know more than that."""
    names = dict.fromkeys(first.metrics if second is scale else (*first.metrics, *second.metrics))
    return {
        name: relative(first.metrics[name], second.metrics[name], scale.metrics.get(name, 0.0))
        if name in first.metrics and name in second.metrics
        else math.inf
        for name in names
    }


def _relative_rms(apart: Array, scale: Array) -> float:
    finite = scale[np.isfinite(scale)]
    size = math.sqrt(float((finite**2).mean())) if finite.size else 0.0
    rms = math.sqrt(float((apart**2).mean())) if apart.size else 0.0
    if rms == 0.0:
        return 0.0
    return rms / size if size > 0.0 else math.inf


def _beyond(apart: Array, a: Array, b: Array, scale: Array, dtype: str, places: int) -> int:
    """How many entries are further apart than ``places`` last places and float32's own rounding."""
    digits, smallest = DIGITS[dtype]
    larger = np.maximum(np.abs(a), np.abs(b))
    exponent = np.frexp(np.where(np.isfinite(larger), larger, 1.0))[1]
    place = np.exp2(np.maximum(exponent - digits, smallest).astype(np.float64))
    rows = np.abs(np.where(np.isfinite(scale), scale, 0.0)).max(axis=-1, keepdims=True, initial=0.0)
    return int((apart > places * place + ROUNDING * rows).sum())


def compare_all(
    reference: Outcome, outcomes: list[Outcome], dtype: str, places: int
) -> tuple[list[Difference], list[Difference]]:
    """(each against the reference, each pair)."""
    against = [compare(outcome, reference, reference, dtype, places) for outcome in outcomes]
    pairs = [compare(a, b, reference, dtype, places) for a, b in itertools.combinations(outcomes, 2)]
    return against, pairs


def faults(difference: Difference, tolerance: float, metrics: float, dtype: str, places: int) -> list[str]:
    """What is too far apart, in words."""
    pair = f"{difference.first} and {difference.second}"
    found = [
        f"{pair}: {kind} {name} differs by {value:.1e} of the reference's, allowed {allowed:.0e}"
        for kind, values, allowed in (
            ("the value of", difference.scalars, tolerance),
            ("the metric", difference.metrics, metrics),
        )
        for name, value in values.items()
        if not value <= allowed
    ]
    if dtype in HALF and difference.beyond:
        found.append(
            f"{pair}: {difference.beyond} gradient entries are more than {places} last place(s) of {dtype} apart, the "
            f"largest difference is {difference.gradient_max:.1e}"
        )
    if dtype not in HALF and not difference.gradient_rms <= tolerance:
        found.append(
            f"{pair}: gradients differ by a relative rms of {difference.gradient_rms:.1e}, allowed {tolerance:.0e}"
        )
    return found
