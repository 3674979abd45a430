"""Every policy and preference loss, in every reduction, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import to_torch
from policy_inputs import (
    LOSSES,
    assert_same,
    in_every_reduction,
    in_one_reduction,
    make_inputs,
    reductions_of,
    run,
    with_reduction,
)

import duohead_torch
from duohead.reference import reference
from duohead.spec import HeadSpec

POLICY = [name for name, loss in LOSSES.items() if loss["type"] in ("grpo", "gspo")]
ONES = [(name, reduction) for name, loss in LOSSES.items() for reduction in reductions_of(loss)]


@pytest.mark.parametrize(("name", "reduction"), ONES)
def test_each_loss_in_each_reduction(name: str, reduction: str) -> None:
    head = {"losses": {"it": with_reduction(LOSSES[name], reduction)}}
    for seed in (0, 1):
        inputs = make_inputs(seed)
        expected = reference(**inputs, head=head)
        assert expected.loss != 0.0
        assert_same(run("torch eager", head["losses"], inputs), expected, 1e-12)


@pytest.mark.parametrize("implementation", ["torch eager", "torch per_loss"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
def test_all_losses_in_all_reductions_at_once(implementation: str, dtype: str, tolerance: float) -> None:
    inputs = make_inputs(2)
    losses = in_every_reduction()
    expected = reference(**inputs, head={"losses": losses})
    assert_same(run(implementation, losses, inputs, dtype), expected, tolerance)


@pytest.mark.parametrize(
    ("turn", "implementation", "dtype", "tolerance"),
    [
        (0, "jax xla", "float64", 1e-12),
        (0, "jax eager", "float32", 2e-5),
        *((turn, "jax eager", "float64", 1e-12) for turn in range(1, 5)),
    ],
)
def test_all_losses_at_once_in_jax(turn: int, implementation: str, dtype: str, tolerance: float) -> None:
    inputs = make_inputs(3)
    losses = in_one_reduction(turn)
    expected = reference(**inputs, head={"losses": losses})
    assert_same(run(implementation, losses, inputs, dtype), expected, tolerance)


@pytest.mark.parametrize("implementation", ["torch eager", "jax eager"])
def test_advantages_per_segment(implementation: str) -> None:
    inputs = make_inputs(4)
    inputs["advantages"] = np.array([1.0, -0.5, 0.0, 0.7, 9.0])
    losses = {name: LOSSES[name] for name in ("clip", "gspo", "kto")}
    result = run(implementation, losses, inputs)
    assert_same(result, reference(**inputs, head={"losses": losses}), 1e-12)
    ids = inputs["segment_ids"]
    inputs["advantages"] = np.where(ids >= 0, inputs["advantages"][ids], 0.0)
    assert_same(run(implementation, losses, inputs), result, 1e-15)


def test_references_by_name() -> None:
    inputs = make_inputs(5)
    given = inputs["ref_logprobs"]
    other = np.where(np.isnan(given), np.nan, given - 0.3)
    losses = {
        "a": {"type": "dpo", "reference_model": "one"},
        "b": {"type": "dpo", "reference_model": "two"},
        "c": {"type": "grpo", "beta": 0.1, "reference_model": "two"},
        "d": {"type": "kto", "reference_model": "one"},
    }
    inputs["ref_logprobs"] = {"one": given, "two": other}
    result = run("torch eager", losses, inputs)
    assert_same(result, reference(**inputs, head={"losses": losses}), 1e-12)
    for name in losses:
        inputs["ref_logprobs"] = other if name in "bc" else given
        alone = run("torch eager", {name: losses[name]}, inputs)
        assert alone.losses[name] == pytest.approx(result.losses[name], rel=1e-13)
    inputs["ref_logprobs"] = {"one": given, "two": other}
    with pytest.raises(ValueError, match=r"ref_logprobs: loss 'x' \(dpo\) has no reference_model, and several"):
        run("torch eager", {"x": {"type": "dpo"}}, inputs)
    with pytest.raises(ValueError, match=r"loss 'x' \(dpo\) needs the reference 'three', given: one, two"):
        run("torch eager", {"x": {"type": "dpo", "reference_model": "three"}}, inputs)


@pytest.mark.parametrize("name", ["dpo", "hinge", "ipo", "kto"])
def test_without_a_reference(name: str) -> None:
    inputs = make_inputs(6)
    inputs["ref_logprobs"] = None
    head = {"losses": {"it": LOSSES[name]}}
    for implementation in ("torch eager", "jax eager"):
        assert_same(run(implementation, head["losses"], inputs), reference(**inputs, head=head), 1e-12)


def test_a_shared_sequence_gets_the_sum_of_its_pairs() -> None:
    inputs = make_inputs(7)
    losses = {"it": with_reduction(LOSSES["dpo"], "sum")}
    total = 0.0
    for pair in ([0, 1], [2, 1], [1, 3], [0, 4]):
        total = total + run("torch eager", losses, {**inputs, "preference_pairs": np.array([pair])}).gradient
    whole = run("torch eager", losses, inputs).gradient
    np.testing.assert_allclose(whole, total, rtol=1e-12, atol=1e-15)


def test_padding_pairs_and_no_pairs() -> None:
    inputs = make_inputs(8)
    losses = {name: LOSSES[name] for name in ("dpo", "simpo", "orpo")}
    real = run("torch eager", losses, {**inputs, "preference_pairs": np.array([[0, 1]])})
    padded = run("torch eager", losses, {**inputs, "preference_pairs": np.array([[-1, 3], [0, 1], [2, -5]])})
    assert_same(padded, real, 1e-15)
    for pairs in (np.zeros((0, 2), int), np.array([[-1, -1]])):
        nothing = run("torch eager", losses, {**inputs, "preference_pairs": pairs})
        assert nothing.loss == 0.0
        assert not nothing.gradient.any()
        assert not any(nothing.metrics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_no_valid_token(name: str) -> None:
    inputs = make_inputs(9)
    inputs["mask"] = np.zeros_like(inputs["mask"])
    for reduction in reductions_of(LOSSES[name]):
        result = run("torch eager", {"it": with_reduction(LOSSES[name], reduction)}, inputs)
        assert result.loss == 0.0
        assert not result.gradient.any()
        assert not any(result.metrics.values())


@pytest.mark.parametrize("name", POLICY)
def test_batched_tokens(name: str) -> None:
    inputs = make_inputs(10)
    flat = run("torch eager", {"it": LOSSES[name]}, inputs)

    def batched(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {model: batched(key, array) for model, array in value.items()}
        if not isinstance(value, np.ndarray) or key == "preference_pairs":
            return value
        return value.reshape(2, 7, *value.shape[1:])

    folded = run("torch eager", {"it": LOSSES[name]}, {key: batched(key, value) for key, value in inputs.items()})
    assert folded.loss == pytest.approx(flat.loss, rel=1e-14)
    assert folded.metrics == pytest.approx(flat.metrics, rel=1e-13)
    np.testing.assert_allclose(folded.gradient.reshape(flat.gradient.shape), flat.gradient, rtol=1e-13, atol=1e-18)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_results_keep_the_compute_dtype(dtype: str) -> None:
    """``where`` of two numbers must neither lift float32 nor draw float64 down."""
    import torch

    inputs = to_torch(make_inputs(0), dtype)
    logits = inputs.pop("logits")
    head = HeadSpec.from_dict({"losses": LOSSES})
    (loss, aux), _ = duohead_torch.monolithic_loss_and_grad(logits, head, implementation="eager", **inputs)
    wanted = getattr(torch, dtype)
    assert loss.dtype == wanted
    assert {value.dtype for value in (*aux.losses.values(), *aux.metrics.values())} == {wanted}
