"""A plain training step in JAX: the head of a model with several losses and their metrics, under jit.

python examples/train_jax.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from duohead import CrossEntropy, EntropyLoss, ZLoss
from duohead_jax import monolithic_loss

VOCAB, WIDTH, TOKENS = 1000, 32, 64
RATE = 0.5


def model(weights: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    return weights["embedding"][inputs] @ weights["head"]


@jax.jit
def train_step(weights: Any, losses: Any, inputs: jax.Array, labels: jax.Array) -> Any:
    def total(trained: Any) -> Any:
        return monolithic_loss(model(trained, inputs), losses, labels=labels, metrics=("accuracy", "perplexity"))

    (loss, aux), gradient = jax.value_and_grad(total, has_aux=True)(weights)
    return jax.tree.map(lambda w, g: w - RATE * g, weights, gradient), loss, aux


def main(steps: int = 20) -> list[float]:
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {
        "embedding": jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "head": jax.random.normal(keys[1], (WIDTH, VOCAB)) * WIDTH**-0.5,
    }
    tokens = jax.random.randint(keys[2], (TOKENS + 1,), 0, VOCAB)
    # Nothing is shifted for you: the label of a row is the next token. A negative label is ignored.
    inputs, labels = tokens[:-1], jnp.where(jnp.arange(TOKENS) < 4, -100, tokens[1:])

    found = []
    for step in range(steps):
        # Losses are pytrees whose numbers are leaves: weights may change at every step, nothing is traced again.
        losses = {
            "ce": CrossEntropy(label_smoothing=0.05),
            "z": ZLoss(weight=1e-4),
            "bonus": EntropyLoss(weight=-0.01 * (1 - step / steps)),
        }
        weights, loss, aux = train_step(weights, losses, inputs, labels)
        found.append(float(loss))
        if step % 5 == 0 or step == steps - 1:
            reported = {"total": loss, **aux.losses, **aux.metrics}
            print(f"step {step:3}", *(f"{name} {float(value):.4f}" for name, value in reported.items()), sep="  ")
    return found


if __name__ == "__main__":
    main()
