"""Random inputs for any head: whatever its losses need, and how to run it in both frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from helpers import to_jax, to_torch

from duohead import HeadSpec

CONFIGS = sorted((Path(__file__).parent.parent / "examples" / "configs").glob("*.yaml"))
TOKENS, VOCAB = 9, 7


def inputs_for(head: HeadSpec, seed: int = 0, vocab: int = VOCAB) -> dict[str, Any]:
    """The arguments of a call beside the losses, as NumPy arrays: every input that the head's losses use."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal((TOKENS, vocab))
    labels = random.integers(0, vocab if head.vocab_size is None else min(vocab, head.vocab_size), TOKENS)
    labels[2] = -100
    found: dict[str, Any] = {"logits": logits, "labels": labels}
    report = head.plan("torch", "cpu")
    used = {name for loss in report.losses for name in (*loss.needs, *loss.optional)}
    teachers = {loss.teacher[0] for loss in head.losses.values() if loss.teacher is not None}
    if teachers:
        found["teacher_logits"] = {name: random.standard_normal((TOKENS, vocab)) for name in sorted(teachers)}
    label_logprobs = np.where(labels >= 0, -1.5 + 0.4 * random.standard_normal(TOKENS), 0.0)
    if "advantages" in used:
        found["advantages"] = random.standard_normal(TOKENS)
    if "old_logprobs" in used:
        found["old_logprobs"] = label_logprobs
    if "importance_weights" in used:
        found["importance_weights"] = random.uniform(0.5, 1.5, TOKENS)
    if "ref_logprobs" in used:
        named = sorted({loss.reference for loss in head.losses.values() if loss.reference is not None})
        reference = {name: label_logprobs + 0.1 * random.standard_normal(TOKENS) for name in named or ["bare"]}
        found["ref_logprobs"] = reference if named else reference["bare"]
    if "segment_ids" in used:
        found["segment_ids"] = np.array([0, 0, 0, 1, 1, 2, 2, 3, 3])
        found["num_segments"] = 4
    if "preference_pairs" in used:
        found["preference_pairs"] = np.array([[0, 1], [3, 2]])
    return found


def run_torch(head: HeadSpec, inputs: dict[str, Any], implementation: str, dtype: str = "float32") -> tuple[Any, Any]:
    """((loss, losses, metrics) as floats, gradient as NumPy)."""
    from duohead_torch import monolithic_loss_and_grad

    arrays = to_torch(inputs, dtype)
    (loss, aux), gradient = monolithic_loss_and_grad(
        arrays.pop("logits"), head, implementation=implementation, **arrays
    )
    return _scalars(loss, aux), gradient.numpy()


def run_jax(head: HeadSpec, inputs: dict[str, Any], implementation: str, dtype: str = "float32") -> tuple[Any, Any]:
    """The same in JAX."""
    from duohead_jax import monolithic_loss_and_grad

    arrays = to_jax(inputs, dtype)
    (loss, aux), gradient = monolithic_loss_and_grad(
        arrays.pop("logits"), head, implementation=implementation, **arrays
    )
    return _scalars(loss, aux), np.asarray(gradient)


def _scalars(loss: Any, aux: Any) -> dict[str, float]:
    return {
        "loss": float(loss),
        **{f"losses/{name}": float(value) for name, value in aux.losses.items()},
        **{name: float(value) for name, value in aux.metrics.items()},
    }


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any], bound: float) -> None:
    """Scalars within ``bound`` relative to their size, or to 1 where smaller; gradients relative to their rms."""
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert abs(found[0][name] - value) <= bound * max(1.0, abs(value)), (name, found[0][name], value)
    error = np.sqrt(np.mean((found[1] - expected[1]) ** 2))
    size = np.sqrt(np.mean(expected[1] ** 2))
    assert error <= bound * size, (error, size)
