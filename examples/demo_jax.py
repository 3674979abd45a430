"""The demo's training step in JAX."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from demo_model import BETA_1, BETA_2, EPSILON, LEARNING_RATE, Weights

from duohead.loss import Loss
from duohead_jax import monolithic_loss


def logits_of(weights: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """``[rows, length]`` token ids → ``[rows, length, vocab]``."""
    x = weights["embedding"][tokens]
    window = weights["mixing"].shape[0]
    padded = jnp.pad(x, ((0, 0), (window - 1, 0), (0, 0)))
    mixed = sum(weights["mixing"][k] * padded[:, k : k + x.shape[1]] for k in range(window))
    x = x + jnp.tanh(mixed @ weights["inner"]) @ weights["outer"]
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * weights["gain"]
    return x @ weights["embedding"].T


def adam(weights: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
    """One step of Adam, in the order of operations of ``torch.optim.Adam``."""
    count, first, second = state
    count = count + 1
    first = jax.tree.map(lambda m, g: m + (g - m) * (1 - BETA_1), first, gradient)
    second = jax.tree.map(lambda v, g: BETA_2 * v + (1 - BETA_2) * g * g, second, gradient)
    rate, correction = LEARNING_RATE / (1 - BETA_1**count), jnp.sqrt(1 - BETA_2**count)
    weights = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) / correction + EPSILON), weights, first, second)
    return weights, (count, first, second)


class Trainer:
    """Trains a model's weights on batches, with a teacher where one is given."""

    def __init__(self, weights: Weights, losses: Mapping[str, Loss], teacher: Weights | None = None) -> None:
        self.weights = jax.tree.map(jnp.asarray, weights)
        self.teacher = jax.tree.map(jnp.asarray, teacher)
        zeros = jax.tree.map(jnp.zeros_like, self.weights)
        self.state = (jnp.float32(0), zeros, jax.tree.map(jnp.zeros_like, self.weights))
        self.update = jax.jit(
            functools.partial(_update, losses), static_argnames="implementation", donate_argnums=(0, 1)
        )

    def step(self, tokens: np.ndarray, labels: np.ndarray, implementation: str = "auto") -> dict[str, float]:
        """One step of training; each loss, unweighted, before it."""
        self.weights, self.state, found = self.update(
            self.weights, self.state, self.teacher, tokens, labels, implementation=implementation
        )
        return {name: float(value) for name, value in found.items()}


def _update(
    losses: Mapping[str, Loss],
    weights: Any,
    state: Any,
    teacher: Any,
    tokens: jax.Array,
    labels: jax.Array,
    *,
    implementation: str,
) -> Any:
    teacher_logits = None if teacher is None else logits_of(teacher, tokens)

    def total(trained: Any) -> Any:
        return monolithic_loss(
            logits_of(trained, tokens),
            losses,
            labels=labels,
            teacher_logits=teacher_logits,
            implementation=implementation,
        )

    (_, aux), gradient = jax.value_and_grad(total, has_aux=True)(weights)
    return *adam(weights, gradient, state), aux.losses
