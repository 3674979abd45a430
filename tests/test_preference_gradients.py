"""Sequence and pair losses against jax.grad of the same losses written out in jax.numpy, logits to scalar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_inputs import assert_close, make_inputs, run

CLIP = {"type": "gspo", "epsilon_low": 0.1, "epsilon_high": 0.15}
Sums = Callable[[jax.Array], jax.Array]


def sigmoid_loss(h: jax.Array) -> jax.Array:
    return jnp.logaddexp(0.0, -h)


def hinge_loss(h: jax.Array) -> jax.Array:
    return jnp.maximum(0.0, 1.0 - h)


def gspo(lp: jax.Array, given: dict[str, Any], mean: Sums, total: Sums, lengths: jax.Array) -> jax.Array:
    s = jnp.exp(mean(lp - given["old_logprobs"]))
    a, w = mean(given["advantages"]), mean(given["importance_weights"])
    value = -w * jnp.minimum(s * a, jnp.clip(s, 0.9, 1.15) * a)
    return (lengths * value).sum() / len(lp)


def dpo(beta: float, smoothing: float, loss: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    def value(lp: jax.Array, given: dict[str, Any], mean: Sums, total: Sums, lengths: jax.Array) -> jax.Array:
        rewards = total(lp - given["ref_logprobs"])
        h = beta * (rewards[given["chosen"]] - rewards[given["rejected"]])
        return ((1.0 - smoothing) * loss(h) + smoothing * loss(-h)).mean()

    return value


def ipo(lp: jax.Array, given: dict[str, Any], mean: Sums, total: Sums, lengths: jax.Array) -> jax.Array:
    rewards = mean(lp - given["ref_logprobs"])
    return ((rewards[given["chosen"]] - rewards[given["rejected"]] - 1.0 / (2.0 * 0.4)) ** 2).mean()


def simpo(lp: jax.Array, given: dict[str, Any], mean: Sums, total: Sums, lengths: jax.Array) -> jax.Array:
    means = mean(lp)
    return sigmoid_loss(1.5 * (means[given["chosen"]] - means[given["rejected"]]) - 0.3).mean()


def orpo(lp: jax.Array, given: dict[str, Any], mean: Sums, total: Sums, lengths: jax.Array) -> jax.Array:
    means = mean(lp)
    chosen, rejected = means[given["chosen"]], means[given["rejected"]]

    def odds(m: jax.Array) -> jax.Array:
        return m - jnp.log1p(-jnp.exp(m))

    return (0.2 * sigmoid_loss(odds(chosen) - odds(rejected)) - chosen).mean()


def kto(lp: jax.Array, given: dict[str, Any], mean: Sums, total: Sums, lengths: jax.Array) -> jax.Array:
    reward, a = total(lp - given["ref_logprobs"]), mean(given["advantages"])
    value = jnp.where(
        a > 0,
        1.2 * (1.0 - jax.nn.sigmoid(0.5 * (reward - 0.1))),
        0.8 * (1.0 - jax.nn.sigmoid(0.5 * (0.1 - reward))),
    )
    return jnp.where(lengths > 0, value, 0.0).sum() / (lengths > 0).sum()


CASES: dict[str, tuple[dict[str, Any], Callable[..., jax.Array]]] = {
    "gspo": (CLIP, gspo),
    "dpo": ({"type": "dpo", "beta": 0.5}, dpo(0.5, 0.0, sigmoid_loss)),
    "cdpo": ({"type": "dpo", "beta": 0.5, "label_smoothing": 0.2}, dpo(0.5, 0.2, sigmoid_loss)),
    "hinge": ({"type": "dpo", "beta": 0.7, "loss_type": "hinge", "label_smoothing": 0.1}, dpo(0.7, 0.1, hinge_loss)),
    "ipo": ({"type": "dpo", "loss_type": "ipo", "beta": 0.4}, ipo),
    "simpo": ({"type": "simpo", "beta": 1.5, "margin": 0.3}, simpo),
    "orpo": ({"type": "orpo", "beta": 0.2}, orpo),
    "kto": (
        {"type": "kto", "beta": 0.5, "desirable_weight": 1.2, "undesirable_weight": 0.8, "reference_point": 0.1},
        kto,
    ),
}


def whole(function: Callable[..., jax.Array], inputs: dict[str, Any]) -> Callable[[jax.Array], jax.Array]:
    """The loss as a function of the logits of the rows that exist."""
    rows = np.flatnonzero(inputs["mask"] & (inputs["labels"] >= 0))
    given = {
        name: jnp.asarray(inputs[name][rows])
        for name in ("advantages", "old_logprobs", "ref_logprobs", "importance_weights")
    }
    pairs = inputs["preference_pairs"]
    pairs = pairs[(pairs >= 0).all(-1)]
    given |= {"chosen": pairs[:, 0], "rejected": pairs[:, 1]}
    member = jnp.asarray(np.arange(inputs["num_segments"])[:, None] == inputs["segment_ids"][rows], float)
    lengths = member.sum(-1)

    def of_logits(logits: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(logits[rows])
        lp = log_p[np.arange(len(rows)), inputs["labels"][rows]]
        return function(lp, given, lambda v: member @ v / jnp.maximum(lengths, 1.0), lambda v: member @ v, lengths)

    return of_logits


@pytest.mark.parametrize("name", CASES)
def test_against_automatic_differentiation(name: str) -> None:
    loss, function = CASES[name]
    for seed in (0, 1, 2):
        inputs = make_inputs(seed)
        if name == "orpo":  # the plain formula has no odds for the empty sequence's probability of 1
            inputs["preference_pairs"] = inputs["preference_pairs"][:4]
        value, gradient = jax.value_and_grad(whole(function, inputs))(jnp.asarray(np.nan_to_num(inputs["logits"])))
        assert np.asarray(gradient).any()
        for implementation in ("torch eager", "jax eager"):
            result = run(implementation, {"it": loss}, inputs)
            assert result.loss == pytest.approx(float(value), rel=1e-12)
            assert_close(result.gradient, gradient, 1e-12)
