"""Every restricted function: its hand-written derivatives against automatic ones, and the same values everywhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import duohead_jax  # binds every term to jax.numpy
import duohead_torch  # and to torch
from duohead.term import _BOUND, Bound, Measure, Term

POINTS = 400
ALL: list[Bound] = [item for item in _BOUND if item.function.__module__.startswith("duohead.")]
TERMS = [item for item in ALL if isinstance(item, Term)]
#: what a parameter means → the range its values come from; anything else is about 0
RANGES = {
    "advantages": (-2.0, 2.0),
    "advantages_mean": (-2.0, 2.0),
    "beta": (0.05, 1.5),
    "d_": (-1.0, 1.0),
    "delta": (1.5, 3.0),
    "desirable_weight": (0.5, 2.0),
    "entropy": (0.0, 4.0),
    "epsilon_high": (0.05, 0.4),
    "epsilon_low": (0.05, 0.4),
    "forward_kl": (0.0, 4.0),
    "importance_weights": (0.2, 2.0),
    "importance_weights_mean": (0.2, 2.0),
    "inverse_vocab": (0.01, 0.5),
    "jsd": (0.0, 0.6),
    "jsd_beta": (-0.3, 1.3),
    "label_smoothing": (0.0, 0.5),
    "logprob": (-4.0, -0.05),
    "lse": (-5.0, 20.0),
    "margin": (0.0, 1.5),
    "mean_logprob": (-6.0, -0.5),
    "reverse_kl": (0.0, 4.0),
    "share": (0.2, 1.0),
    "tau_neg": (0.5, 2.0),
    "tau_pos": (0.5, 2.0),
    "teacher_cross_entropy": (0.0, 6.0),
    "undesirable_weight": (0.5, 2.0),
}


def name_of(item: Bound) -> str:
    kind = "" if isinstance(item, Term) else "measure-" if isinstance(item, Measure) else "fold-"
    operands = getattr(item, "operands", {})
    renamed = [operand for parameter, operand in operands.items() if parameter != operand]
    return f"{kind}{item.name}" + (f"({','.join(renamed)})" if renamed else "")


def parameters_of(item: Bound) -> tuple[str, ...]:
    return item.function.__code__.co_varnames[: item.function.__code__.co_argcount]


def range_of(parameter: str, operand: str) -> tuple[float, float]:
    for name in (parameter, operand, operand.removeprefix("chosen_").removeprefix("rejected_").removesuffix("_mean")):
        if name in RANGES:
            return RANGES[name]
    return RANGES["d_"] if parameter.startswith("d_") else (-2.5, 2.5)


def draw(item: Bound) -> dict[str, np.ndarray]:
    """One value per parameter and point; a random point lies on no kink."""
    r = np.random.default_rng(abs(len(item.name)))
    operands = getattr(item, "operands", {})
    points = {}
    for parameter in parameters_of(item):
        low, high = range_of(parameter, operands.get(parameter, parameter))
        points[parameter] = r.uniform(low, high, POINTS)
    if "jsd_beta" in points:
        points["jsd_beta"] = points["jsd_beta"].clip(0.0, 1.0)  # the ends mean forward and reverse KL
    for old in ("old_logprobs", "ref_logprobs"):
        if old in points:
            points[old] = points["logprob"] - r.normal(size=POINTS) * 0.5
    return points


def as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_all_families_are_here() -> None:
    assert duohead_jax
    assert duohead_torch
    assert len(TERMS) >= 24
    assert all(set(item.bound) >= {"numpy", "torch", "jax"} for item in ALL)
    assert all(term.has_derivatives for term in TERMS)


@pytest.mark.parametrize("term", TERMS, ids=name_of)
def test_hand_written_derivatives(term: Term) -> None:
    points = draw(term)
    parameters = tuple(points)
    values = [jnp.asarray(points[parameter]) for parameter in parameters]
    function = term.bound["jax"]
    by_hand = as_tuple(function(*values))[1:]
    assert len(by_hand) == len(term.differentiable)

    for parameter, derivative in zip(term.differentiable, by_hand, strict=True):
        position = parameters.index(parameter)

        def total(x: jax.Array, position: int = position) -> jax.Array:
            moved = list(values)
            moved[position] = x
            if term.name == "grpo_cispo":
                # CISPO's clipped ratio is a constant: the old policy moves along, so the ratio stays.
                old = parameters.index("old_logprobs")
                moved[old] = moved[old] + (x - jax.lax.stop_gradient(x))
            return jnp.sum(as_tuple(function(*moved))[0])

        automatic = jax.grad(total)(values[position])
        derivative = np.broadcast_to(np.asarray(derivative), (POINTS,))
        np.testing.assert_allclose(derivative, automatic, rtol=1e-12, atol=1e-12, err_msg=parameter)


@pytest.mark.parametrize("item", ALL, ids=name_of)
def test_the_same_values_under_every_namespace(item: Bound) -> None:
    points = draw(item)
    expected = as_tuple(item.bound["numpy"](*points.values()))
    by_torch = as_tuple(item.bound["torch"](*(torch.tensor(value) for value in points.values())))
    by_jax = as_tuple(item.bound["jax"](*(jnp.asarray(value) for value in points.values())))
    assert len(by_torch) == len(by_jax) == len(expected)
    for i, value in enumerate(expected):
        assert np.isfinite(value).all()
        for found in (by_torch[i], by_jax[i]):
            np.testing.assert_allclose(np.asarray(found), value, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("item", TERMS, ids=name_of)
def test_the_points_are_not_all_on_one_side(item: Term) -> None:
    """A derivative that is zero at every point would prove nothing."""
    points = draw(item)
    for derivative in as_tuple(item.bound["numpy"](*points.values()))[1:]:
        assert np.any(np.asarray(derivative) != 0.0)


@pytest.mark.parametrize("scale", [1.0, 80.0, 300.0])
def test_far_tails_are_finite(scale: float) -> None:
    """Ratios far outside of the band, in float32: finite values, finite derivatives."""
    for term in TERMS:
        points = draw(term)
        for parameter in ("logprob", "old_logprobs", "ref_logprobs", "chosen", "rejected", "reward", "log_ratio_mean"):
            if parameter in points:
                points[parameter] = points[parameter] * scale
        single = [torch.tensor(value).float() for value in points.values()]
        for value in as_tuple(term.bound["torch"](*single)):
            assert torch.isfinite(torch.as_tensor(value)).all(), term.name
