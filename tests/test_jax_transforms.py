"""The JAX face: one trace as numbers change, and jit, vmap, scan, remat and value_and_grad compose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_loss import every_loss, random_inputs
from helpers import to_jax

from duohead import GRPO, CrossEntropy, Distillation, EntropyLoss, HeadSpec, ZLoss
from duohead_jax import make_loss, monolithic_loss, monolithic_loss_and_grad, token_statistics, xla

TOKENS, VOCAB = 6, 9
LOSSES = {
    "ce": CrossEntropy(label_smoothing=0.1),
    "z": ZLoss(weight=0.1),
    "kd": Distillation(loss_type="forward_kl", temperature=2.0, weight=0.5),
    "h": EntropyLoss(weight=-0.05),
}
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def plain(logits: jax.Array, labels: jax.Array, teacher: jax.Array) -> jax.Array:
    """The total of LOSSES by the framework's own functions, for its own differentiation."""
    valid = labels >= 0
    count = jnp.maximum(valid.sum(), 1)
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher / 2.0)
    label = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    p = jnp.exp(log_p)
    row = -(0.9 * label + 0.1 * log_p.mean(-1)) + 0.1 * jax.nn.logsumexp(logits, axis=-1) ** 2
    row = row + 0.5 * (jnp.exp(log_q) * (log_q - log_p)).sum(-1) - 0.05 * -(p * log_p).sum(-1)
    return jnp.where(valid, row, 0.0).sum() / count


def make(shape: tuple[int, ...] = (TOKENS,), seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits, labels (the first one ignored) and teacher logits in float64."""
    r = np.random.default_rng(seed)
    labels = r.integers(0, VOCAB, shape)
    labels.reshape(-1)[:1] = -100
    return (
        jnp.asarray(r.normal(size=(*shape, VOCAB))),
        jnp.asarray(labels),
        jnp.asarray(r.normal(size=(*shape, VOCAB))),
    )


def ours(logits: jax.Array, labels: jax.Array, teacher: jax.Array, losses: Any = LOSSES) -> Any:
    return monolithic_loss(logits, losses, labels=labels, teacher_logits=teacher)


def count_traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows whenever the engine is traced (or run)."""
    traced: list[int] = []
    evaluate = xla.engine.evaluate

    def counted(*arguments: Any) -> Any:
        traced.append(len(traced))
        return evaluate(*arguments)

    monkeypatch.setattr(xla.engine, "evaluate", counted)
    return traced


# --------------------------------------------------------------------------------------------------------- one trace


def test_one_trace_with_all_losses_as_arguments_of_a_jitted_step() -> None:
    inputs = to_jax(random_inputs(), "float32")
    logits = inputs.pop("logits")

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(logits: jax.Array, losses: Any, num_tokens: Any) -> Any:
        return jax.value_and_grad(
            lambda x: monolithic_loss(x, losses, num_tokens=num_tokens, metrics=("entropy",), **inputs), has_aux=True
        )(logits)

    seen = set()
    for k in range(20):
        (loss, _), gradient = step(logits, every_loss(1.1 + 0.01 * k), 7.0 + k)
        assert jnp.isfinite(gradient).all()
        seen.add(float(loss))
    assert len(seen) == 20
    (expected, _), expected_gradient = monolithic_loss_and_grad(
        logits, every_loss(1.1 + 0.19), num_tokens=26.0, metrics=("entropy",), **inputs
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_one_trace_with_a_head_spec_as_an_argument() -> None:
    logits, labels, teacher = make()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(logits: jax.Array, head: HeadSpec) -> jax.Array:
        return ours(logits, labels, teacher, head).loss

    values = [
        step(
            logits, HeadSpec(losses={"ce": CrossEntropy(weight=w)}, logits_scale_factor=w, final_logit_softcap=9.0 * w)
        )
        for w in (1.1, 1.2, 1.3)
    ]
    assert len({float(value) for value in values}) == 3


def test_one_trace_over_eager_calls_with_changing_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = count_traces(monkeypatch)
    logits, labels, teacher = make((TOKENS + 1,))

    def value(logits: jax.Array, f: float) -> Any:
        losses = {
            "ce": CrossEntropy(label_smoothing=0.1 * f, weight=f),
            "kd": Distillation(loss_type="jsd", jsd_beta=0.3 * f, temperature=f, student_temperature=1.5 * f),
        }
        return monolithic_loss(
            logits, losses, labels=labels, teacher_logits=teacher, num_tokens=5.0 * f, logits_scale_factor=f
        )

    def run(k: int) -> float:
        return float(jax.value_and_grad(value, has_aux=True)(logits, 1.1 + 0.01 * k)[0][0])

    first = run(0)
    once = len(traced)  # the value and the forward rule of one trace
    assert once <= 2
    assert len({first, *(run(k) for k in range(1, 20))}) == 20
    assert len(traced) == once


# ------------------------------------------------------------------------------------------------------- composition


def test_value_and_grad_under_jit_is_plain_autodiff() -> None:
    given = make()
    (loss, aux), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(*given)
    expected, expected_gradient = jax.value_and_grad(plain)(*given)
    np.testing.assert_allclose(loss, expected, **EXACT)
    np.testing.assert_allclose(gradient, expected_gradient, **EXACT)
    assert set(aux.losses) == set(LOSSES)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3, 4), (2, 0)])
def test_token_shapes(shape: tuple[int, ...]) -> None:
    given = make(shape, 3)
    (loss, _), gradient = jax.value_and_grad(ours, has_aux=True)(*given)
    expected, expected_gradient = jax.value_and_grad(plain)(*given)
    np.testing.assert_allclose(loss, expected, **EXACT)
    np.testing.assert_allclose(gradient, expected_gradient, **EXACT)
    assert gradient.shape == given[0].shape


def test_upstream_gradients_and_two_calls_on_one_array() -> None:
    given, other = make(), make(seed=1)

    def total(f: Any) -> Any:
        return jax.grad(lambda x: 2.0 * f(x, *given[1:]) + f(x, *other[1:]) / 3.0 + (x**2).sum())(given[0])

    np.testing.assert_allclose(total(lambda *a: ours(*a).loss), total(plain), **EXACT)


def test_vmap_equals_the_loop() -> None:
    batch = make((4, TOKENS))
    value = jax.value_and_grad(ours, has_aux=True)
    (losses, aux), gradients = jax.jit(jax.vmap(value))(*batch)
    for i in range(4):
        (loss, one_aux), gradient = value(*(array[i] for array in batch))
        np.testing.assert_allclose(losses[i], loss, **EXACT)
        np.testing.assert_allclose(gradients[i], gradient, **EXACT)
        np.testing.assert_allclose(aux.losses["kd"][i], one_aux.losses["kd"], **EXACT)


def test_vmap_over_sequences_and_numbers() -> None:
    inputs = to_jax(random_inputs(), "float64")
    logits = inputs.pop("logits")
    logits = jnp.stack([logits, logits[::-1]])
    weights = jnp.array([0.5, 2.0])

    def value(x: jax.Array, weight: jax.Array) -> Any:
        losses = {**{name: every_loss()[name] for name in ("jsd", "gspo", "dpo")}, "ce": CrossEntropy(weight=weight)}
        return monolithic_loss(x, losses, **inputs).loss

    found = jax.vmap(value)(logits, weights)
    np.testing.assert_allclose(found, [value(*pair) for pair in zip(logits, weights, strict=True)], **EXACT)


def test_scan_over_micro_batches_equals_the_whole_batch() -> None:
    logits, labels, teacher = make((4, TOKENS))
    count = float((labels >= 0).sum())
    weight = jnp.asarray(np.random.default_rng(5).normal(size=(VOCAB, VOCAB)))

    def part(weight: jax.Array, batch: Any) -> Any:
        x, y, t = batch
        return monolithic_loss(x @ weight, LOSSES, labels=y, teacher_logits=t, num_tokens=count).loss

    def accumulate(carry: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(part)(weight, batch)
        return (carry[0] + loss, carry[1] + gradient), None

    @jax.jit
    def scanned(weight: jax.Array) -> Any:
        return jax.lax.scan(accumulate, (jnp.zeros(()), jnp.zeros_like(weight)), (logits, labels, teacher))[0]

    loss, gradient = scanned(weight)
    expected, expected_gradient = jax.value_and_grad(lambda w: plain(logits @ w, labels, teacher))(weight)
    np.testing.assert_allclose(loss, expected, **EXACT)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-11, atol=1e-12)


def test_gradient_through_a_scan() -> None:
    logits, labels, teacher = make((3, TOKENS))

    def total(f: Any) -> Any:
        def value(x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda c, batch: (c + f(*batch), None), 0.0, (x, labels, teacher))[0]

        return jax.jit(jax.grad(value))(logits)

    np.testing.assert_allclose(total(lambda *a: ours(*a).loss), total(plain), **EXACT)


def test_remat() -> None:
    given = make()
    weight = jnp.eye(VOCAB) + 0.1

    def gradient(f: Any) -> jax.Array:
        return jax.grad(lambda w: f(given[0] @ w, *given[1:]))(weight)

    rematted = jax.checkpoint(lambda x, *rest: ours(x, *rest).loss)
    np.testing.assert_allclose(gradient(rematted), gradient(plain), **EXACT)


def test_second_derivatives_are_right() -> None:
    given = make((2,))
    found = jax.hessian(lambda x: ours(x, *given[1:]).loss)(given[0])
    expected = jax.hessian(lambda x: plain(x, *given[1:]))(given[0])
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_gradient_flows_to_the_logits_alone() -> None:
    logits, labels, teacher = make()

    def value(teacher: jax.Array, weight: jax.Array) -> jax.Array:
        return ours(logits, labels, teacher, {**LOSSES, "ce": CrossEntropy(weight=weight)}).loss

    for gradient in jax.grad(value, argnums=(0, 1))(teacher, jnp.asarray(1.3)):
        assert not gradient.any()
    aux_gradient = jax.grad(lambda x: ours(x, labels, teacher).aux.losses["ce"])(logits)
    assert not aux_gradient.any()


def test_token_statistics_in_a_loss_of_the_users_own() -> None:
    logits, labels, teacher = make()

    def own(x: jax.Array) -> jax.Array:
        found = token_statistics(
            x, labels, statistics=("logprob", "entropy", "forward_kl"), teacher_logits=teacher, temperature=2.0
        )
        return (jnp.exp(found.logprob) * found.forward_kl + found.entropy**2).sum()

    def formula(x: jax.Array) -> jax.Array:
        log_p, log_q = jax.nn.log_softmax(x), jax.nn.log_softmax(teacher / 2.0)
        label = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[:, None], -1)[:, 0]
        entropy = -(jnp.exp(log_p) * log_p).sum(-1)
        kl = (jnp.exp(log_q) * (log_q - log_p)).sum(-1)
        return jnp.where(labels >= 0, jnp.exp(label) * kl + entropy**2, 0.0)[1:].sum()

    np.testing.assert_allclose(jax.jit(jax.grad(own))(logits), jax.grad(formula)(logits), **EXACT)


# ----------------------------------------------------------------------------------------------- loss and gradient


def test_grad_scale_and_accumulate() -> None:
    logits, labels, teacher = make()
    exact = jax.grad(plain)(logits, labels, teacher)
    half = logits.astype(jnp.bfloat16), labels, teacher.astype(jnp.bfloat16)
    half_exact = jax.grad(plain)(half[0].astype(jnp.float32), labels, half[2].astype(jnp.float32))

    def gradient(given: Any, **arguments: Any) -> jax.Array:
        x, y, t = given
        return monolithic_loss_and_grad(x, LOSSES, labels=y, teacher_logits=t, **arguments).logits_grad

    np.testing.assert_allclose(gradient((logits, labels, teacher), grad_scale=3.0), 3.0 * exact, **EXACT)
    begun = jnp.asarray(np.random.default_rng(2).normal(size=logits.shape), jnp.float32)
    found = gradient(half, out=begun, accumulate=True)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, begun + half_exact, rtol=1e-5, atol=1e-6)
    assert gradient(half).dtype == jnp.bfloat16
    assert gradient(half, out=begun).dtype == jnp.float32


def test_numpy_inputs_are_taken_as_jnp_functions_take_them() -> None:
    given = make()
    as_numpy = tuple(np.asarray(array) for array in given)
    (loss, _), gradient = jax.value_and_grad(ours, has_aux=True)(*as_numpy)
    (direct, _), direct_gradient = monolithic_loss_and_grad(
        as_numpy[0], LOSSES, labels=as_numpy[1], teacher_logits=as_numpy[2], mask=np.ones(TOKENS, bool)
    )
    expected, expected_gradient = jax.value_and_grad(plain)(*given)
    assert isinstance(direct_gradient, jax.Array)
    for found in (loss, direct):
        np.testing.assert_allclose(found, expected, **EXACT)
    for found in (gradient, direct_gradient):
        np.testing.assert_allclose(found, expected_gradient, **EXACT)
    assert isinstance(token_statistics(as_numpy[0], as_numpy[1]).lse, jax.Array)


def test_hyperparameters_as_arrays() -> None:
    inputs = to_jax(random_inputs(), "float64")
    logits = inputs.pop("logits")

    def run(number: Any) -> Any:
        losses = {
            "ce": CrossEntropy(label_smoothing=number(0.1), weight=number(0.7)),
            "kd": Distillation(loss_type="reverse_kl", temperature=number(2.0), student_temperature=number(1.5)),
            "rl": GRPO(epsilon_low=number(0.1), epsilon_high=number(0.3), beta=number(0.2)),
        }
        return monolithic_loss_and_grad(
            logits,
            losses,
            num_tokens=number(5.0),
            logits_scale_factor=number(1.2),
            final_logit_softcap=number(9.0),
            **inputs,
        )

    (expected, _), expected_gradient = run(float)
    for number in (jnp.asarray, np.float64, np.asarray):
        (loss, _), gradient = run(number)
        np.testing.assert_allclose(loss, expected, **EXACT)
        np.testing.assert_allclose(gradient, expected_gradient, **EXACT)


def test_make_loss() -> None:
    loss_fn = make_loss({"head": {"losses": {"ce": {"type": "label"}, "z": {"type": "z_loss", "weight": 0.1}}}})
    logits, labels, _ = make()
    expected = monolithic_loss(logits, {"ce": CrossEntropy(), "z": ZLoss(weight=0.1)}, labels=labels)
    np.testing.assert_allclose(jax.jit(loss_fn)(logits, labels=labels).loss, expected.loss, **EXACT)


WITHOUT_X64 = """
import jax, jax.numpy as jnp, numpy as np
from every_loss import as_config, every_loss, random_inputs, relative_rms
from helpers import to_jax
from duohead.reference import reference
from duohead_jax import monolithic_loss

assert not jax.config.jax_enable_x64
for dtype, limit in (("float32", 3e-6), ("bfloat16", 4e-3)):
    given = to_jax(random_inputs(), dtype)
    logits = given.pop("logits")
    value = jax.jit(jax.value_and_grad(lambda x: monolithic_loss(x, every_loss(), **given), has_aux=True))
    (loss, aux), gradient = value(logits)
    assert loss.dtype == jnp.float32 and gradient.dtype == logits.dtype, (loss.dtype, gradient.dtype)
    head = {"losses": {name: as_config(loss) for name, loss in every_loss().items()}}
    plain = {name: np.asarray(value) for name, value in given.items() if name != "teacher_logits"}
    teacher = np.asarray(given["teacher_logits"]["teacher"], np.float64)
    expected = reference(np.asarray(logits, np.float64), head, **plain, teacher_logits={"teacher": teacher})
    assert abs(loss - expected.loss) <= 3e-6 * abs(expected.loss)
    assert relative_rms(gradient, expected.logits_grad) <= limit, (dtype, relative_rms(gradient, expected.logits_grad))
print("right")
"""


def test_the_default_setting_without_float64() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_X64],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_ENABLE_X64": "0", "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert done.stdout.strip() == "right", done.stderr
