"""Low precision at a confident label, and rows without a softmax."""

from __future__ import annotations

import numpy as np
import pytest
from robust.bounds import truth
from robust.implementations import IMPLEMENTATIONS, TRITON

COLUMNS = 64
NAMES = [name for name in IMPLEMENTATIONS if not name.startswith("numpy")]


def confident_row(p: float, dtype: str = "bfloat16") -> np.ndarray:
    """A row that is exact in bfloat16 and whose label, column 5, has about this probability."""
    row = np.zeros(COLUMNS)
    row[5] = np.round(np.log(p / (1.0 - p) * (COLUMNS - 1)) * 16) / 16
    return row


@pytest.mark.parametrize("p", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_gradient_at_the_label(name: str, p: float) -> None:
    """Within 0.4 %: one rounding to bfloat16 is 2⁻⁸; p − 1 in bfloat16 would be up to 100 % off."""
    head = {"losses": {"ce": {"type": "label"}, "z": {"type": "z_loss", "weight": 1e-4}}}
    inputs = {"logits": np.stack([confident_row(p), confident_row(p)]), "labels": np.array([5, 7])}
    expected = truth(head, inputs, "float32").gradient
    got = IMPLEMENTATIONS[name](head, inputs, "bfloat16").gradient
    for row, label in enumerate(inputs["labels"]):
        assert abs(got[row, label] / expected[row, label] - 1.0) <= 0.004


@pytest.mark.parametrize("name", [*NAMES, "numpy", "numpy_4_shards"])
def test_a_row_of_minus_infinity(name: str) -> None:
    """It has no softmax: the loss is NaN, never a number; the other rows keep their gradient."""
    r = np.random.default_rng(0)
    logits = r.normal(size=(3, 8)).astype(np.float32).astype(np.float64)
    inputs = {"logits": logits.copy(), "labels": np.array([1, 2, 3])}
    head = {"losses": {"ce": {"type": "label"}, "h": {"type": "entropy"}, "z": {"type": "z_loss"}}}
    expected = IMPLEMENTATIONS[name](head, inputs, "float32")
    inputs["logits"][1] = -np.inf
    got = IMPLEMENTATIONS[name](head, inputs, "float32")
    assert not np.isfinite(got.loss)
    for value in got.losses.values():
        assert not np.isfinite(value)
    np.testing.assert_allclose(got.gradient[[0, 2]], expected.gradient[[0, 2]], rtol=1e-6)


@pytest.mark.parametrize("name", [*NAMES, "numpy", "numpy_4_shards"])
def test_padding_beside_a_row_of_minus_infinity(name: str) -> None:
    """Padding gets zeros whatever it holds; the row's real columns show their NaN, the other rows are untouched."""
    r = np.random.default_rng(0)
    logits = r.normal(size=(3, 8)).astype(np.float32).astype(np.float64)
    logits[:, 5:] = [np.nan, np.inf, 50.0]
    inputs = {"logits": logits.copy(), "labels": np.array([1, 2, 3]), "vocab_size": 5}
    losses = {"ce": {"type": "label", "label_smoothing": 0.1}, "h": {"type": "entropy"}, "z": {"type": "z_loss"}}
    expected = IMPLEMENTATIONS[name]({"losses": losses}, inputs, "float32")
    inputs["logits"][1, :5] = -np.inf
    got = IMPLEMENTATIONS[name]({"losses": losses}, inputs, "float32")
    assert not np.isfinite(got.loss)
    assert np.all(got.gradient[:, 5:] == 0.0)
    assert np.isnan(got.gradient[1, :5]).any()
    np.testing.assert_allclose(got.gradient[[0, 2]], expected.gradient[[0, 2]], rtol=1e-6)


@pytest.mark.parametrize("name", [*NAMES, "numpy", "numpy_4_shards"])
def test_padding_under_a_cap(name: str) -> None:
    """The cap has no slope at NaN; padding gets zeros all the same."""
    r = np.random.default_rng(0)
    logits = r.normal(size=(2, 8)).astype(np.float32).astype(np.float64)
    head = {"final_logit_softcap": 3.0, "losses": {"ce": {"type": "label"}, "z": {"type": "z_loss"}}}
    inputs = {"logits": logits[:, :5], "labels": np.array([1, 2])}
    expected = truth(head, inputs, "float32")
    logits[:, 5:] = [np.nan, np.inf, 50.0]
    got = IMPLEMENTATIONS[name](head, {**inputs, "logits": logits, "vocab_size": 5}, "float32")
    assert np.all(got.gradient[:, 5:] == 0.0)
    np.testing.assert_allclose(got.gradient[:, :5], expected.gradient, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", [*NAMES, "numpy", "numpy_4_shards"])
def test_nan_in_a_valid_row_is_seen(name: str, bad: float) -> None:
    """In the loss, in every loss that reads the row, in the row's gradient, and in no other row's."""
    r = np.random.default_rng(0)
    logits = r.normal(size=(3, 8)).astype(np.float32).astype(np.float64)
    inputs = {"logits": logits.copy(), "labels": np.array([1, 2, 3])}
    head = {"losses": {"ce": {"type": "label"}, "h": {"type": "entropy"}, "z": {"type": "z_loss"}}}
    expected = IMPLEMENTATIONS[name](head, inputs, "float32")
    inputs["logits"][1, 6] = bad
    got = IMPLEMENTATIONS[name](head, inputs, "float32")
    assert np.isnan(got.loss)
    for value in (got.losses["ce"], got.losses["h"]):
        assert np.isnan(value)
    assert not np.isfinite(got.losses["z"])
    assert np.isnan(got.gradient[1]).any()
    np.testing.assert_allclose(got.gradient[[0, 2]], expected.gradient[[0, 2]], rtol=1e-6)


def test_the_interpreter_is_covered_where_it_runs() -> None:
    assert set(TRITON) <= set(NAMES)
