"""Shared by the tests of policy and preference losses: inputs, losses in every reduction, one way to run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from helpers import to_jax, to_torch

from duohead.spec import HeadSpec

REDUCTIONS = ("token_mean", "sum", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")
PAIR_REDUCTIONS = ("token_mean", "sum", "constant")
SEQUENCE_REDUCTIONS = ("token_mean", "sum", "sequence_mean_token_mean", "constant")
PAIR_TYPES = ("dpo", "simpo", "orpo")
#: name → the configuration of a loss, in its type's default reduction
LOSSES: dict[str, dict[str, Any]] = {
    "ce": {"type": "label"},
    "smoothed": {"type": "label", "label_smoothing": 0.2},
    "z": {"type": "z_loss"},
    "bonus": {"type": "entropy", "weight": -0.1},
    "kd": {"type": "distillation", "loss_type": "forward_kl"},
    "clip": {"type": "grpo", "epsilon_high": 0.3},
    "delta": {"type": "grpo", "delta": 1.4, "beta": 0.2},
    "cispo": {"type": "grpo", "objective": "cispo", "beta": 0.3, "kl_estimator": "k1"},
    "sapo": {"type": "grpo", "objective": "sapo", "tau_pos": 0.8},
    "reinforce": {"type": "grpo", "objective": "reinforce", "beta": 0.1, "kl_estimator": "k2"},
    "gspo": {"type": "gspo", "epsilon_low": 0.1, "epsilon_high": 0.15, "beta": 0.1},
    "dpo": {"type": "dpo", "beta": 0.5},
    "cdpo": {"type": "dpo", "beta": 0.5, "label_smoothing": 0.1},
    "hinge": {"type": "dpo", "loss_type": "hinge", "beta": 0.7},
    "ipo": {"type": "dpo", "loss_type": "ipo", "beta": 0.4, "label_smoothing": 0.2},
    "simpo": {"type": "simpo", "margin": 0.3},
    "orpo": {"type": "orpo", "beta": 0.2},
    "kto": {"type": "kto", "beta": 0.5, "desirable_weight": 1.2, "undesirable_weight": 0.8, "reference_point": 0.1},
}


def reductions_of(loss: Mapping[str, Any]) -> tuple[str, ...]:
    if loss["type"] in PAIR_TYPES:
        return PAIR_REDUCTIONS
    return SEQUENCE_REDUCTIONS if loss["type"] == "kto" else REDUCTIONS


def with_reduction(loss: Mapping[str, Any], reduction: str) -> dict[str, Any]:
    extra = {"denominator": 7.0} if reduction == "constant" else {}
    return {**loss, "reduction": reduction, **extra}


def in_every_reduction(losses: Mapping[str, Mapping[str, Any]] = LOSSES) -> dict[str, dict[str, Any]]:
    """Every loss in every reduction it knows, each under its own name and with a weight of its own."""
    every: dict[str, dict[str, Any]] = {}
    for name, loss in losses.items():
        for reduction in reductions_of(loss):
            weight = loss.get("weight", 1.0) * (1.0 + 0.1 * len(every))
            every[f"{name}:{reduction}"] = {**with_reduction(loss, reduction), "weight": weight}
    return every


def in_one_reduction(turn: int) -> dict[str, dict[str, Any]]:
    """Every loss once, each in another reduction; five turns show all of them."""
    return {
        name: with_reduction(loss, reductions_of(loss)[(turn + i) % len(reductions_of(loss))])
        for i, (name, loss) in enumerate(LOSSES.items())
    }


def make_inputs(seed: int = 0, tokens: int = 14, vocab: int = 6, segments: int = 5) -> dict[str, Any]:
    """Segments in any order, one of them empty, some tokens in none; pairs that share a sequence, and a padding pair.

    One row is masked and one ignored, both full of NaN.
    """
    r = np.random.default_rng(seed)
    logits = 1.5 * r.normal(size=(tokens, vocab))
    labels = r.integers(0, vocab, tokens)
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    lp = log_p[np.arange(tokens), labels]
    ids = r.integers(-1, segments - 1, tokens)  # the last segment is empty
    ids[:segments] = r.permutation([*range(segments - 1), -1])
    mask = np.ones(tokens, bool)
    mask[-2] = False
    labels[-1] = -100
    inputs = {
        "logits": logits,
        "labels": labels,
        "mask": mask,
        "teacher_logits": {"teacher": r.normal(size=(tokens, vocab))},
        "advantages": r.normal(size=tokens),
        "old_logprobs": lp + r.normal(size=tokens) * 0.3,
        "ref_logprobs": lp + r.normal(size=tokens) * 0.4,
        "importance_weights": r.uniform(0.5, 2.0, tokens),
        "segment_ids": ids,
        "preference_pairs": np.array([[0, 1], [2, 1], [1, 3], [-1, -1], [0, segments - 1]]),
        "num_segments": segments,
    }
    for row in (-1, -2):
        logits[row] = np.nan
        inputs["teacher_logits"]["teacher"][row] = np.inf
        for name in ("advantages", "old_logprobs", "ref_logprobs", "importance_weights"):
            inputs[name][row] = np.nan
    return inputs


class Run(NamedTuple):
    """What an implementation gave, as NumPy and Python numbers."""

    loss: float
    losses: dict[str, float]
    metrics: dict[str, float]
    parts: dict[str, Any]
    gradient: np.ndarray


def run(implementation: str, losses: Any, inputs: Mapping[str, Any], dtype: str = "float64", **more: Any) -> Run:
    """``implementation`` is ``"torch eager"``, ``"jax xla"`` …; ``losses`` specs or plain configurations.

    ``"jax eager"`` is xla without jit: it runs operation by operation, and compiles none of the many small programs.
    """
    if implementation == "jax eager":
        with jax.disable_jit():
            return run("jax xla", losses, inputs, dtype, **more)
    framework, _, name = implementation.partition(" ")
    if isinstance(losses, Mapping) and all(isinstance(item, Mapping) for item in losses.values()):
        losses = HeadSpec.from_dict({"losses": losses})
    if framework == "torch":
        import duohead_torch as adapter

        arrays = to_torch(dict(inputs), dtype)
    else:
        import duohead_jax as adapter

        arrays = to_jax(dict(inputs), dtype)
    logits = arrays.pop("logits")
    (loss, aux), gradient = adapter.monolithic_loss_and_grad(logits, losses, implementation=name, **arrays, **more)
    if framework == "torch":
        gradient = gradient.double()
    return Run(
        float(loss),
        {key: float(value) for key, value in aux.losses.items()},
        {key: float(value) for key, value in aux.metrics.items()},
        aux.parts,
        np.asarray(gradient, np.float64),
    )


def assert_close(actual: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Relative to the size of the whole: single entries may cancel."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    finite = np.abs(expected[np.isfinite(expected)])
    size = max(1.0, float(finite.max())) if finite.size else 1.0
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * size, err_msg=what)


def assert_same(actual: Any, expected: Any, tolerance: float) -> None:
    """Two results: the loss, every loss, every metric that ``actual`` reports, and the gradient."""
    assert_close(actual.loss, expected.loss, tolerance, "loss")
    assert actual.losses.keys() == expected.losses.keys()
    for name, value in expected.losses.items():
        assert_close(actual.losses[name], value, tolerance, name)
    for name, value in actual.metrics.items():
        assert_close(value, expected.metrics[name], tolerance, name)
    gradient = expected.gradient if isinstance(expected, Run) else expected.logits_grad
    assert_close(actual.gradient, gradient, tolerance, "gradient")
