"""What must hold between losses, whatever the numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_inputs import LOSSES, assert_close, make_inputs, run, with_reduction

SEEDS = range(4)
EXACT = 1e-12
property_test = settings(deadline=None, derandomize=True, max_examples=60)


def of(loss: dict[str, Any], inputs: dict[str, Any], implementation: str = "torch eager") -> tuple[float, np.ndarray]:
    """Value and gradient of one loss."""
    result = run(implementation, {"it": loss}, inputs)
    return result.loss, result.gradient


def own_logprobs(inputs: dict[str, Any]) -> np.ndarray:
    """log p of the labels under the logits themselves; NaN on the rows that do not exist."""
    logits = inputs["logits"]
    with np.errstate(invalid="ignore"):
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_p[np.arange(len(logits)), np.maximum(inputs["labels"], 0)]


def both_equal(a: dict[str, Any], b: dict[str, Any], inputs: dict[str, Any], tolerance: float = EXACT) -> None:
    for implementation in ("torch eager", "jax eager"):
        value, gradient = of(a, inputs, implementation)
        other_value, other_gradient = of(b, inputs, implementation)
        assert value == pytest.approx(other_value, rel=tolerance, abs=1e-14)
        assert_close(gradient, other_gradient, tolerance)
        assert gradient.any()


# -------------------------------------------------------------------------------------------------------------- policy


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reduction", ["token_mean", "sum", "sequence_mean_token_mean", "constant"])
def test_gspo_with_one_token_segments_is_grpo(seed: int, reduction: str) -> None:
    inputs = make_inputs(seed, segments=14)
    inputs["segment_ids"] = np.random.default_rng(seed).permutation(14)
    inputs["preference_pairs"] = None
    gspo, grpo = ({"type": kind, "epsilon_high": 0.3, "beta": 0.1} for kind in ("gspo", "grpo"))
    both_equal(with_reduction(gspo, reduction), with_reduction(grpo, reduction), inputs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("objective", ["clip", "cispo", "sapo"])
def test_on_policy_gradients_are_reinforces(seed: int, objective: str) -> None:
    """Old = new: the ratio is 1, inside every band and in the middle of SAPO's gate."""
    inputs = make_inputs(seed)
    inputs["old_logprobs"] = own_logprobs(inputs)
    tau = {"tau_neg": 1.7, "tau_pos": 0.6} if objective == "sapo" else {}
    for implementation in ("torch eager", "jax eager"):
        _, gradient = of({"type": "grpo", "objective": objective, **tau}, inputs, implementation)
        _, plain = of({"type": "grpo", "objective": "reinforce"}, inputs, implementation)
        assert_close(gradient, plain, EXACT)
        assert plain.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_token_sum_is_the_length_weighted_form(seed: int) -> None:
    """sequence_mean_token_sum: each sequence's value times its length, over the number of sequences."""
    inputs = make_inputs(seed)
    exists = np.asarray(inputs["mask"]) & (inputs["labels"] >= 0)
    ids = inputs["segment_ids"]
    loss = {"type": "gspo", "epsilon_low": 0.1, "epsilon_high": 0.1}
    present = sorted({int(i) for i in ids[exists] if i >= 0})
    total, slope = 0.0, 0.0
    for segment in present:
        one = {**inputs, "mask": exists & (ids == segment)}
        value, gradient = of({**loss, "reduction": "token_mean"}, one)
        length = (exists & (ids == segment)).sum()
        total += length * value / len(present)
        slope = slope + length * gradient / len(present)
    value, gradient = of({**loss, "reduction": "sequence_mean_token_sum"}, inputs)
    assert value == pytest.approx(total, rel=EXACT)
    assert_close(gradient, slope, EXACT)


@pytest.mark.parametrize("seed", SEEDS)
def test_delta_is_the_dual_clip_constant(seed: int) -> None:
    """Where A < 0 the surrogate never falls below c·A (Ye et al., 2020), and there the gradient ends."""
    inputs = make_inputs(seed, tokens=30)
    r = np.random.default_rng(seed)
    inputs["old_logprobs"] = own_logprobs(inputs) - r.normal(size=30)
    c, low, high = 1.6, 0.2, 0.3
    exists = np.asarray(inputs["mask"]) & (inputs["labels"] >= 0)
    ratio = np.exp(own_logprobs(inputs) - inputs["old_logprobs"])[exists]
    advantage, weight = inputs["advantages"][exists], inputs["importance_weights"][exists]
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
    dual = np.where(advantage < 0, np.maximum(surrogate, c * advantage), surrogate)
    loss = {"type": "grpo", "delta": c, "epsilon_low": low, "epsilon_high": high}
    value, gradient = of(loss, inputs)
    assert value == pytest.approx(-(weight * dual).mean(), rel=EXACT)
    cut = (advantage < 0) & (ratio > c)
    assert cut.any()
    assert not gradient[exists][cut].any()
    # without a constant that binds it is the clipped loss
    both_equal({**loss, "delta": 1e9}, {**loss, "delta": None}, inputs)


@property_test
@given(difference=st.floats(-500.0, 500.0), dtype=st.sampled_from(["float32", "float64"]))
def test_k3_is_never_negative(difference: float, dtype: str) -> None:
    logits = np.array([[0.3, -0.2, 0.1]])
    lp = float(own_logprobs({"logits": logits, "labels": [1]})[0])
    given_arrays = {
        "logits": logits,
        "labels": np.array([1]),
        "advantages": np.zeros(1),
        "old_logprobs": np.array([lp - difference]),
        "ref_logprobs": np.array([lp + difference]),
    }
    result = run("torch eager", {"it": {"type": "grpo", "beta": 1.0}}, given_arrays, dtype)
    assert result.loss >= 0.0
    assert result.metrics["it/kl_ref"] >= 0.0
    assert result.metrics["it/kl_new_old"] >= 0.0


@pytest.mark.parametrize("difference", [1e-2, 1e-3, 1e-4, -3e-3, 0.049, 0.051, -0.05])
def test_k3_keeps_its_digits_near_zero(difference: float) -> None:
    """e^Δ − Δ − 1 in float64 would lose all of them at Δ = 1e-8; the difference itself is exact here."""
    # two equal logits: log p is exactly representable up to one rounding, which the difference shares
    logits = np.zeros((1, 2))
    lp = -math.log(2.0)
    arrays = {"logits": logits, "labels": np.array([0]), "advantages": np.zeros(1), "old_logprobs": np.array([lp])}
    ref = np.array([lp + difference])
    exact = ref[0] - lp
    true = sum(exact**k / math.factorial(k) for k in range(2, 14))
    for implementation in ("torch eager", "jax eager"):
        result = run(implementation, {"it": {"type": "grpo", "beta": 1.0}}, {**arrays, "ref_logprobs": ref})
        assert result.loss == pytest.approx(true, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_expected_k1_and_k3_are_the_kl(seed: int) -> None:
    """Summed over the vocabulary with the policy's own probabilities, both equal KL(policy‖reference)."""
    r = np.random.default_rng(seed)
    vocab = 9
    policy, ref = 2.0 * r.normal(size=vocab), 2.0 * r.normal(size=vocab)
    log_p = policy - np.log(np.exp(policy).sum())
    log_q = ref - np.log(np.exp(ref).sum())
    p = np.exp(log_p)
    # one token per column, whose label is the column
    arrays = {
        "logits": np.tile(policy, (vocab, 1)),
        "labels": np.arange(vocab),
        "advantages": np.zeros(vocab),
        "old_logprobs": log_p,
        "ref_logprobs": log_q,
    }
    kl = float((p * (log_p - log_q)).sum())
    for estimator in ("k1", "k3"):
        loss = {"type": "grpo", "beta": 1.0, "kl_estimator": estimator, "reduction": "sum"}
        values = [of(loss, {key: value[j : j + 1] for key, value in arrays.items()})[0] for j in range(vocab)]
        assert float(p @ np.array(values)) == pytest.approx(kl, rel=1e-12)
    head = run(
        "torch eager",
        {"kl": {"type": "distillation", "loss_type": "reverse_kl"}},
        {"logits": policy[None], "teacher_logits": {"teacher": ref[None]}},
    )
    assert head.loss == pytest.approx(kl, rel=1e-12)


# ---------------------------------------------------------------------------------------------------------- preference


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_at_the_reference_is_log_two(seed: int) -> None:
    """And each label's log-probability has the derivative −β/2 (chosen) or +β/2 (rejected)."""
    inputs = make_inputs(seed)
    inputs["ref_logprobs"] = own_logprobs(inputs)
    inputs["preference_pairs"] = np.array([[0, 1]])
    beta = 0.3
    exists = np.asarray(inputs["mask"]) & (inputs["labels"] >= 0)
    for implementation in ("torch eager", "jax eager"):
        result = run(implementation, {"it": {"type": "dpo", "beta": beta}}, inputs)
        assert result.loss == pytest.approx(math.log(2.0), rel=EXACT)
        assert result.metrics["it/margin"] == pytest.approx(0.0, abs=1e-13)
        for row in np.flatnonzero(exists):
            side = {0: -1.0, 1: 1.0}.get(int(inputs["segment_ids"][row]), 0.0)
            p = np.exp(inputs["logits"][row]) / np.exp(inputs["logits"][row]).sum()
            p[inputs["labels"][row]] -= 1.0
            np.testing.assert_allclose(result.gradient[row], -side * beta / 2.0 * p, rtol=1e-11, atol=1e-16)


@pytest.mark.parametrize("seed", SEEDS)
def test_cdpo_without_smoothing_is_dpo(seed: int) -> None:
    both_equal({"type": "dpo", "label_smoothing": 0.0}, {"type": "dpo"}, make_inputs(seed))
    # and its definition, (1−ε)·L(h) + ε·L(−h), from two plain ones
    inputs = make_inputs(seed)
    value, gradient = of({"type": "dpo", "label_smoothing": 0.2}, inputs)
    kept, kept_gradient = of({"type": "dpo"}, inputs)
    swapped = {**inputs, "preference_pairs": inputs["preference_pairs"][:, ::-1].copy()}
    flipped, flipped_gradient = of({"type": "dpo"}, swapped)
    assert value == pytest.approx(0.8 * kept + 0.2 * flipped, rel=EXACT)
    assert_close(gradient, 0.8 * kept_gradient + 0.2 * flipped_gradient, EXACT)


@pytest.mark.parametrize("seed", SEEDS)
def test_simpo_without_margin_is_reference_free_dpo_on_token_means(seed: int) -> None:
    """With sequences of one length n, DPO's sums are n times SimPO's means, so β_SimPO = n·β_DPO."""
    inputs = make_inputs(seed, tokens=14)
    inputs["segment_ids"] = np.array([0, 1, 2, 3] * 3 + [0, 1])  # the last two rows do not exist: three tokens each
    inputs["ref_logprobs"] = None
    inputs["preference_pairs"] = np.array([[0, 1], [2, 1], [3, 0]])
    both_equal({"type": "simpo", "beta": 0.9, "margin": 0.0}, {"type": "dpo", "beta": 0.3}, inputs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["dpo", "hinge", "ipo", "simpo"])
def test_a_sequence_against_itself_has_no_gradient(seed: int, name: str) -> None:
    """A loss of h alone pulls both sides equally, so on one and the same sequence the pulls cancel."""
    inputs = make_inputs(seed)
    inputs["preference_pairs"] = np.array([[1, 1]])
    loss = {**LOSSES[name], **({"margin": 0.0} if name == "simpo" else {})}
    _, gradient = of(loss, inputs)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-15)


@pytest.mark.parametrize("seed", SEEDS)
def test_kto_flips_with_the_advantage(seed: int) -> None:
    """1 − σ(z) and 1 − σ(−z) add up to 1: desirable plus undesirable is the number of sequences that are either."""
    inputs = make_inputs(seed)
    value, gradient = of({"type": "kto", "reduction": "sum"}, inputs)
    inputs["advantages"] = -inputs["advantages"]
    flipped, flipped_gradient = of({"type": "kto", "reduction": "sum"}, inputs)
    exists = np.asarray(inputs["mask"]) & (inputs["labels"] >= 0)
    present = {int(i) for i in inputs["segment_ids"][exists] if i >= 0}
    assert value + flipped == pytest.approx(len(present), rel=EXACT)
    assert_close(flipped_gradient, -gradient, EXACT)
