"""Ratios past every bound: finite where the truth is, visible where it is not, and no NaN gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_inputs import LOSSES, assert_close, run

from duohead.reference import reference

OBJECTIVES = ("clip", "cispo", "sapo", "reinforce")
FRAMEWORKS = ("torch eager", "jax eager")
#: e^160 is past float32, and the sum of squared ratios says so
PAST_FLOAT32 = "it/ratio_new_old_squared_sum"


def rows(log_ratios: list[float], advantages: list[float], **more: Any) -> dict[str, Any]:
    """One token a row over three equal logits; ``log_ratios`` are log p − old_logprobs."""
    count = len(log_ratios)
    return {
        "logits": np.zeros((count, 3)),
        "labels": np.zeros(count, int),
        "advantages": np.array(advantages),
        "old_logprobs": -np.log(3.0) - np.array(log_ratios),
        **more,
    }


@pytest.mark.parametrize("implementation", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_ratio_of_e_to_the_300(implementation: str, dtype: str, objective: str, advantage: float) -> None:
    loss = {"it": {"type": "grpo", "objective": objective, "beta": 0.1}}
    for log_ratio in (300.0, -300.0, 1e4, -1e4):
        inputs = rows([log_ratio], [advantage], ref_logprobs=np.array([log_ratio]))
        result = run(implementation, loss, inputs, dtype)
        assert np.isfinite(result.loss)
        assert np.isfinite(result.gradient).all()
        assert all(np.isfinite(value) for name, value in result.metrics.items() if name != PAST_FLOAT32)
        expected = reference(**inputs, head={"losses": loss})
        assert_close(result.loss, expected.loss, 1e-5)
        assert_close(result.gradient, expected.logits_grad, 1e-5)


@pytest.mark.parametrize("implementation", FRAMEWORKS)
def test_the_bound_of_the_ratio(implementation: str) -> None:
    """exp is taken of min(l, 80): past it A < 0 gives −e^80·A, and no clip hides it."""
    result = run(implementation, {"it": {"type": "grpo"}}, rows([300.0], [-1.0]))
    assert result.loss == pytest.approx(np.exp(80.0), rel=1e-12)
    np.testing.assert_allclose(result.gradient, np.exp(80.0) * np.array([[2, -1, -1]]) / 3.0, rtol=1e-12)
    bounded = run(implementation, {"it": {"type": "grpo", "delta": 4.0}}, rows([300.0], [-1.0]))
    assert bounded.loss == pytest.approx(4.0)
    assert not bounded.gradient.any()


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize("beyond", [-400.0, 400.0, np.nan, np.inf])
def test_masked_tokens_far_off_change_nothing(kind: str, beyond: float) -> None:
    inputs = rows([0.1, beyond, -0.2], [1.0, beyond, -1.0], segment_ids=np.array([0, 0, 1]))
    inputs["logits"][1] = beyond
    for masked in ({"labels": np.array([0, -100, 0])}, {"mask": np.array([True, False, True])}):
        alone = rows([0.1, -0.2], [1.0, -1.0], segment_ids=np.array([0, 1]))
        result = run("torch eager", {"it": {"type": kind, "beta": 0.0}}, {**inputs, **masked})
        expected = run("torch eager", {"it": {"type": kind, "beta": 0.0}}, alone)
        assert result.loss == expected.loss
        assert result.metrics == expected.metrics
        np.testing.assert_array_equal(result.gradient, np.insert(expected.gradient, 1, 0.0, axis=0))


@pytest.mark.parametrize("implementation", FRAMEWORKS)
def test_a_label_at_minus_infinity(implementation: str) -> None:
    """Its ratio is 0; an advantage of 0 makes its value 0, another shows where the objective has log p itself."""
    inputs = rows([0.0], [0.0])
    inputs["logits"][0, 0] = -np.inf
    for objective in OBJECTIVES:
        for advantage, finite in (
            (0.0, True),
            (1.0, objective in ("clip", "sapo")),
            (-1.0, objective in ("clip", "sapo")),
        ):
            inputs["advantages"] = np.array([advantage])
            loss = {"it": {"type": "grpo", "objective": objective, "metrics": "none"}}
            result = run(implementation, loss, inputs)
            assert np.isfinite(result.loss) == finite
            assert np.isfinite(result.gradient).all()
    inputs["ref_logprobs"] = np.zeros(1)
    result = run(implementation, {"it": {"type": "grpo", "beta": 1.0, "metrics": "none"}}, inputs)
    assert result.loss >= np.exp(80.0) * 0.99  # k3 is never negative, so its infinity is +
    assert np.isfinite(result.gradient).all()


@pytest.mark.parametrize("implementation", FRAMEWORKS)
def test_an_impossible_rejected_sequence_costs_nothing(implementation: str) -> None:
    """h = +inf: −log σ(h) is 0, and with ε = 0 the infinite L(−h) is not there; an impossible chosen one shows."""
    inputs = rows([0.0, 0.0], [1.0, -1.0], segment_ids=np.array([0, 1]), preference_pairs=np.array([[0, 1]]))
    inputs["logits"][1, 0] = -np.inf
    worse = {**inputs, "preference_pairs": np.array([[1, 0]])}
    for loss in ({"type": "dpo"}, {"type": "dpo", "loss_type": "hinge"}, {"type": "simpo"}, {"type": "kto"}):
        result = run(implementation, {"it": loss}, inputs)
        assert np.isfinite(result.loss)
        assert np.isfinite(result.gradient).all()
        if loss["type"] != "kto":
            assert run(implementation, {"it": loss}, worse).loss == np.inf
    neither = {**inputs, "advantages": np.zeros(2)}
    assert run(implementation, {"it": {"type": "kto"}}, neither).loss == 0.0


numbers = st.sampled_from([0.0, 1e-3, -0.4, 0.7, 5.0, -30.0, 79.9, 80.1, -90.0, 300.0, -400.0, 1e4, -1e4])
advantage = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1e3, -1e3, 1e-30])
logit = st.sampled_from([0.0, 0.3, -1.0, 50.0, -200.0, 3e4, -3e4, -np.inf])
COUNT = 4


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.data())
def test_where_the_truth_is_finite_so_is_the_gradient(data: st.DataObject) -> None:
    def draw(what: st.SearchStrategy[float], count: int = COUNT) -> np.ndarray:
        return np.array(data.draw(st.lists(what, min_size=count, max_size=count)))

    logits = draw(logit, 3 * COUNT).reshape(COUNT, 3)
    logits[:, 2] = np.where(np.isinf(logits).all(-1), 0.0, logits[:, 2])
    inputs = {
        "logits": logits,
        "labels": np.array([0, 1, 2, 0]),
        "teacher_logits": {"teacher": draw(logit, 3 * COUNT).reshape(COUNT, 3).clip(-200.0)},
        "advantages": draw(advantage),
        "old_logprobs": -draw(numbers),
        "ref_logprobs": -draw(numbers),
        "importance_weights": draw(st.sampled_from([0.0, 1.0, 2.5])),
        "segment_ids": np.array([0, 1, 1, 2]),
        "preference_pairs": np.array([[0, 1], [2, 0]]),
        "mask": np.array([True, True, data.draw(st.booleans()), True]),
    }
    for name, loss in LOSSES.items():
        head = {"losses": {"it": loss}}
        expected = reference(**inputs, head=head)
        if not np.isfinite(expected.loss):
            result = run("torch eager", head["losses"], inputs)
            assert not np.isfinite(result.loss), name
            continue
        if not np.isfinite(expected.logits_grad).all():
            continue
        result = run("torch eager", head["losses"], inputs)
        assert_close(result.loss, expected.loss, 1e-9, name)
        assert_close(result.gradient, expected.logits_grad, 1e-9, name)
        narrow = run("torch eager", head["losses"], inputs, "float32")
        assert np.isfinite(narrow.loss), name
        assert np.isfinite(narrow.gradient).all(), name
