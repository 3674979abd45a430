"""No implementation is less accurate than the best of the others by more than rounding."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duohead_torch import namespace


def page() -> Any:
    """benchmarks/accuracy.py, which makes the page."""
    path = Path(__file__).parents[1] / "benchmarks" / "accuracy.py"
    spec = importlib.util.spec_from_file_location("accuracy_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PAGE = page()
OTHERS = ("F.cross_entropy", "optax")
#: half a last place of 1 in float32: what one rounding may move a number by, relative to it
UNIT = 2.0**-24
#: A mean loss is rounded in its rows' sums, in the mean's sum and at its end, up or down by chance: two that are
#: equally good may lie this many apart. Small numbers added to a row's maximum of 1 put it nine apart at p = 0.9999.
LOSS_ROUNDINGS = 4
#: Each entry of a gradient is rounded once at least, and perhaps the other way than the others'.
GRADIENT_ROUNDINGS = 1
#: Two good orders of a sum differ by chance, by less than half; a chain in place of a tree loses ten times as much.
CHANCE = 1.5


@pytest.mark.parametrize("dtype", PAGE.DTYPES)
@pytest.mark.parametrize("title", PAGE.SETS)
def test_beside_the_others(title: str, dtype: str) -> None:
    """On every table of the page, in loss and gradient."""
    inputs = PAGE.SETS[title]
    found = {name: PAGE.errors(run, inputs, dtype) for name, run in PAGE.RUNS.items()}
    # F.cross_entropy's mean of 70,000 rows overflows in float16: it is no measure there.
    loss = np.nanmin([found[other].loss for other in OTHERS])
    rms = min(found[other].rms for other in OTHERS)
    ours = {name: errors for name, errors in found.items() if name.startswith("duohead")}
    assert len(ours) == 4
    for name, errors in ours.items():
        assert errors.loss <= loss + LOSS_ROUNDINGS * UNIT, (name, errors, loss)
        assert errors.rms <= CHANCE * rms + GRADIENT_ROUNDINGS * UNIT, (name, errors, rms)


@pytest.mark.parametrize("columns", [1, 7, 4096, 32000])
@pytest.mark.parametrize("ones", [1, 2, 5])
def test_a_sum_beside_its_maxima(ones: int, columns: int) -> None:
    """Eager on the CPU: numbers too small to move a 1 by themselves are all there; ties count one each."""
    ones = min(ones, columns)
    rng = np.random.default_rng(columns)
    weights = (rng.random((64, columns)) * rng.choice([1e-8, 1e-6, 1e-3, 0.9], (64, 1))).astype(np.float32)
    for row in weights:
        row[rng.choice(columns, ones, replace=False)] = 1.0
    found = namespace.sum_weights(torch.tensor(weights)).double().numpy()
    exact = weights.astype(np.float64).sum(-1)
    rest = (weights * (weights < 1)).astype(np.float64).sum(-1)
    # One rounding for what is added to the ones, and the rest's own, no more of it than a cascade's.
    assert np.all(np.abs(found - exact) <= UNIT * exact * 1.01 + 8 * UNIT * rest)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sum_shows_what_is_not_finite(bad: float) -> None:
    weights = torch.tensor([[1.0, 0.5, bad], [1.0, 0.5, 0.25]])
    found = namespace.sum_weights(weights)
    assert not torch.isfinite(found[0])
    assert found[1] == 1.75
