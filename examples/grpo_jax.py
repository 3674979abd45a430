"""GRPO in JAX: policy loss, KL to a reference and entropy bonus from one softmax. A toy policy learns to count.

python examples/grpo_jax.py --steps 100 --plot docs/grpo.png
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import toy_policy as toy

from duohead import GRPO, EntropyLoss
from duohead_jax import monolithic_loss, token_statistics

LOSSES = {"rl": GRPO(epsilon_high=0.28, beta=0.01), "bonus": EntropyLoss(weight=-0.003)}
EPOCHS, RATE = 2, 2.0
Weights = dict[str, jax.Array]


def logits_of(weights: Weights, previous: jax.Array) -> jax.Array:
    return jnp.tanh(weights["token"][previous] + weights["position"]) @ weights["out"]


@jax.jit
def sample(weights: Weights, prompts: jax.Array, key: jax.Array) -> jax.Array:
    """One completion per prompt."""

    def one(before: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        position, step_key = step
        token = jax.random.categorical(step_key, jnp.tanh(weights["token"][before] + position) @ weights["out"])
        return token, token

    steps = (weights["position"], jax.random.split(key, toy.LENGTH))
    return jax.lax.scan(one, prompts, steps)[1].T


@jax.jit
def logprobs(weights: Weights, previous: jax.Array, completions: jax.Array) -> jax.Array:
    return token_statistics(logits_of(weights, previous), completions, statistics=("logprob",)).logprob


def loss_of(weights: Weights, previous: jax.Array, batch: dict[str, jax.Array], losses: Any) -> Any:
    return monolithic_loss(logits_of(weights, previous), losses, **batch)


@jax.jit
def update(weights: Weights, previous: jax.Array, batch: dict[str, jax.Array], losses: Any) -> tuple[Weights, Any]:
    """One step of gradient descent; the losses' numbers are runtime values, so a schedule recompiles nothing."""
    (_, aux), gradient = jax.value_and_grad(loss_of, has_aux=True)(weights, previous, batch, losses)
    return jax.tree.map(lambda w, g: w - RATE * g, weights, gradient), aux.metrics


def train(steps: int, seed: int = 0) -> dict[str, list[float]]:
    """Trains from scratch; the curves of reward and metrics, one value a step."""
    weights = {name: jnp.asarray(value) for name, value in toy.parameters(seed).items()}
    reference = weights
    r, key = np.random.default_rng(seed), jax.random.key(seed)
    curves: dict[str, list[float]] = {"reward": [], "kl_ref": [], "entropy": [], "clipped": []}
    for step in range(steps):
        prompts = toy.prompts_of_groups(r)
        completions = sample(weights, jnp.asarray(prompts), jax.random.fold_in(key, step))
        rewards = toy.reward(prompts, np.asarray(completions))
        previous = jnp.asarray(toy.previous(prompts, np.asarray(completions)))
        batch = {
            "labels": completions,
            "advantages": jnp.asarray(toy.group_advantages(rewards)),  # one per sequence
            "segment_ids": jnp.asarray(toy.segment_ids(len(prompts))),
            "old_logprobs": logprobs(weights, previous, completions),
            "ref_logprobs": logprobs(reference, previous, completions),
        }
        for _ in range(EPOCHS):
            weights, metrics = update(weights, previous, batch, LOSSES)
        curves["reward"].append(float(rewards.mean()))
        for name, metric in (("kl_ref", "kl_ref"), ("entropy", "entropy"), ("clipped", "clipped_ratio_fraction")):
            curves[name].append(float(metrics[f"rl/{metric}"]))
        toy.progress(step, steps, {name: values[-1] for name, values in curves.items()})
    return curves


if __name__ == "__main__":
    options = toy.arguments("GRPO on a toy policy, in JAX", 100, "docs/grpo.png")
    toy.plot(options.plot, "GRPO on a counting task", train(options.steps))
