"""A small model with a vocabulary-sharded head on eight devices, its curve beside the unsharded run's.

python examples/vocab_parallel_jax.py
"""

from __future__ import annotations

import os
import sys

if "jax" not in sys.modules:  # eight devices, on a machine that has only a CPU too
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from duohead import CrossEntropy, ZLoss
from duohead_jax import monolithic_loss

VOCAB, WIDTH, TOKENS, DEVICES = 1003, 32, 64, 8
PADDED = -(-VOCAB // DEVICES) * DEVICES  # JAX shards are equal: the last one holds padding
LOSSES = {"ce": CrossEntropy(label_smoothing=0.05), "z": ZLoss(weight=1e-3)}


def train(steps: int, sharded: bool) -> list[float]:
    """The losses of a run, with the head split over the devices or whole on one."""
    keys = jax.random.split(jax.random.key(0), 3)
    parameters = {
        "embedding": jax.random.normal(keys[0], (VOCAB, WIDTH), jnp.float32),
        "head": jax.random.normal(keys[1], (WIDTH, PADDED), jnp.float32) / WIDTH**0.5,
    }
    tokens = jax.random.randint(keys[2], (TOKENS + 1,), 0, VOCAB)
    inputs, labels = tokens[:-1], tokens[1:]
    optimizer = optax.adamw(1e-2)
    state = optimizer.init(parameters)

    def loss_of(head: jax.Array, hidden: jax.Array, labels: jax.Array, axis: str | None) -> tuple[jax.Array, jax.Array]:
        loss, aux = monolithic_loss(
            hidden @ head, LOSSES, labels=labels, vocab_size=VOCAB, vocab_axis=axis, metrics=("accuracy",)
        )
        return loss, aux.metrics["head/accuracy"]

    def whole(head: jax.Array, hidden: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss_of(head, hidden, labels, None)

    # One all-gather of a few numbers per token, whatever the losses; the gradient of the logits needs none.
    split = jax.shard_map(
        lambda head, hidden, labels: loss_of(head, hidden, labels, "model"),
        mesh=jax.make_mesh((DEVICES,), ("model",), axis_types=(AxisType.Auto,)),
        in_specs=(P(None, "model"), P(), P()),
        out_specs=P(),
    )
    run = split if sharded else whole

    @jax.jit
    def step(parameters: dict[str, jax.Array], state: optax.OptState) -> tuple[object, ...]:
        def total(parameters: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return run(parameters["head"], parameters["embedding"][inputs], labels)

        (loss, accuracy), gradients = jax.value_and_grad(total, has_aux=True)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss, accuracy

    curve = []
    for number in range(steps):
        parameters, state, loss, accuracy = step(parameters, state)
        curve.append(float(loss))
        if number % 5 == 0 or number == steps - 1:
            devices = DEVICES if sharded else 1
            print(f"{devices} device(s)  step {number:3}  loss {curve[-1]:.6f}  accuracy {float(accuracy):.3f}")
    return curve


def main(steps: int = 20) -> float:
    """Both runs; the largest difference of their curves."""
    off = max(abs(a - b) for a, b in zip(train(steps, True), train(steps, False), strict=True))
    if off > 1e-5:
        raise SystemExit(f"the sharded curve is off by {off}")
    print(f"largest difference of the two curves: {off:.2g}")
    return off


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
