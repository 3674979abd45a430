"""One head with every family of loss, and ordinary inputs for it."""

from __future__ import annotations

from typing import Any

import numpy as np

LOSSES: dict[str, dict[str, Any]] = {
    "ce": {"type": "label", "label_smoothing": 0.1},
    "z": {"type": "z_loss", "weight": 0.1},
    "h": {"type": "entropy", "weight": -0.02},
    "forward": {"type": "distillation", "loss_type": "forward_kl", "temperature": 1.5, "weight": 0.7},
    "soft": {"type": "distillation", "student_temperature": 2.0, "weight": 0.5},
    "reverse": {"type": "distillation", "loss_type": "reverse_kl", "reference_model": "other", "weight": 0.3},
    "jsd": {"type": "distillation", "loss_type": "jsd", "jsd_beta": 0.3, "weight": 0.4},
    "rl": {"type": "grpo", "epsilon_high": 0.28, "beta": 0.05, "weight": 0.5},
    "cispo": {"type": "grpo", "objective": "cispo", "reduction": "sequence_mean_token_mean"},
    "sapo": {"type": "grpo", "objective": "sapo", "weight": 0.2},
    "seq": {"type": "gspo", "reduction": "sequence_mean_token_sum", "weight": 0.2},
    "dpo": {"type": "dpo", "beta": 0.2, "weight": 0.4},
    "simpo": {"type": "simpo", "weight": 0.1},
    "orpo": {"type": "orpo", "weight": 0.1},
    "kto": {"type": "kto", "weight": 0.3},
}


def head(**settings: Any) -> dict[str, Any]:
    """Every family of loss over one head."""
    return {"losses": {name: dict(loss) for name, loss in LOSSES.items()}, **settings}


def inputs(seed: int, tokens: int = 8, columns: int = 7, dtype: str = "float64") -> dict[str, Any]:
    """Ordinary numbers, ratios away from the clip edges, one ignored row, segments in no order."""
    r = np.random.default_rng(seed)
    number = np.float64 if dtype == "float64" else np.float32
    logits = (2.0 * r.normal(size=(tokens, columns))).astype(number).astype(np.float64)
    labels = r.integers(0, columns, tokens)
    lp = logits[np.arange(tokens), labels] - np.logaddexp.reduce(logits, -1)
    shifts = np.array([0.05, -0.1, 0.6, 0.1, -0.7, 0.08, 0.5, -0.05])
    labels[3] = -100
    found = {
        "logits": logits,
        "labels": labels,
        "mask": np.arange(tokens) != 5,
        "teacher_logits": {name: r.normal(size=(tokens, columns)) for name in ("teacher", "other")},
        "old_logprobs": lp - shifts[np.arange(tokens) % 8],
        "ref_logprobs": lp + 0.4 * r.normal(size=tokens),
        "advantages": r.choice([1.0, -1.0, 0.5, -0.7], tokens),
        "importance_weights": r.uniform(0.5, 2.0, tokens),
        "segment_ids": np.array([2, 0, 2, 1, 0, 1, 1, 3])[np.arange(tokens) % 8],
        "preference_pairs": np.array([[0, 2], [1, 3]]),
    }
    for name in ("old_logprobs", "ref_logprobs", "advantages", "importance_weights"):
        found[name] = found[name].astype(number).astype(np.float64)
    found["teacher_logits"] = {
        name: array.astype(number).astype(np.float64) for name, array in found["teacher_logits"].items()
    }
    return found


PER_TOKEN = (
    "labels",
    "mask",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
    "importance_weights",
    "segment_ids",
)


def rearrange(given: dict[str, Any], order: Any) -> dict[str, Any]:
    """The tokens in another order (or some of them)."""
    found = dict(given, logits=given["logits"][order])
    found["teacher_logits"] = {name: array[order] for name, array in given["teacher_logits"].items()}
    for name in PER_TOKEN:
        found[name] = given[name][order]
    return found
