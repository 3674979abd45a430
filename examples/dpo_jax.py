"""DPO in JAX, sharing its softmax with a z-loss. A toy policy learns which of two completions counts better.

python examples/dpo_jax.py --steps 60 --plot docs/dpo.png
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import toy_policy as toy

from duohead import DPO, ZLoss
from duohead_jax import monolithic_loss, token_statistics

LOSSES = {"dpo": DPO(beta=0.1), "z": ZLoss(weight=1e-4)}
RATE = 4.0
Weights = dict[str, jax.Array]


def logits_of(weights: Weights, previous: jax.Array) -> jax.Array:
    return jnp.tanh(weights["token"][previous] + weights["position"]) @ weights["out"]


def batch_of(reference: Weights, r: np.random.Generator) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The tokens before, and the labels, sequences, pairs and reference log-probabilities of fresh pairs."""
    prompts, completions, pairs = toy.preference_batch(r)
    previous, labels = jnp.asarray(toy.previous(prompts, completions)), jnp.asarray(completions)
    return previous, {
        "labels": labels,
        "segment_ids": jnp.asarray(toy.segment_ids(len(prompts))),
        "preference_pairs": jnp.asarray(pairs),
        "ref_logprobs": token_statistics(logits_of(reference, previous), labels, statistics=("logprob",)).logprob,
    }


def loss_of(weights: Weights, previous: jax.Array, batch: dict[str, jax.Array]) -> Any:
    return monolithic_loss(logits_of(weights, previous), LOSSES, **batch)


@jax.jit
def update(weights: Weights, previous: jax.Array, batch: dict[str, jax.Array]) -> tuple[Weights, Any]:
    """One step of gradient descent."""
    (_, aux), gradient = jax.value_and_grad(loss_of, has_aux=True)(weights, previous, batch)
    return jax.tree.map(lambda w, g: w - RATE * g, weights, gradient), aux


def train(steps: int, seed: int = 0) -> dict[str, list[float]]:
    """Trains from scratch; the curves of loss and metrics on pairs not seen before, one value a step."""
    weights = {name: jnp.asarray(value) for name, value in toy.parameters(seed).items()}
    reference, r = weights, np.random.default_rng(seed)
    curves: dict[str, list[float]] = {"loss": [], "accuracy": [], "margin": []}
    for step in range(steps):
        weights, aux = update(weights, *batch_of(reference, r))
        curves["loss"].append(float(aux.losses["dpo"]))
        for name in ("accuracy", "margin"):
            curves[name].append(float(aux.metrics[f"dpo/{name}"]))
        toy.progress(step, steps, {name: found[-1] for name, found in curves.items()})
    return curves


if __name__ == "__main__":
    options = toy.arguments("DPO on a toy policy, in JAX", 60, "docs/dpo.png")
    toy.plot(options.plot, "DPO on a counting task", train(options.steps))
