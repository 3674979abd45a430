"""Shared by the tests of both adapters: one loss of every built-in type and variant, and inputs for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from duohead import (
    DPO,
    GRPO,
    GSPO,
    KTO,
    ORPO,
    CrossEntropy,
    Distillation,
    EntropyLoss,
    SimPO,
    ZLoss,
)
from duohead.loss import Loss


def every_loss(f: float = 1.0) -> dict[str, Loss]:
    """One loss of every type and variant; ``f`` moves every number of theirs."""
    return {
        "ce": CrossEntropy(weight=f),
        "smoothed": CrossEntropy(label_smoothing=0.1 * f, weight=0.5),
        "z": ZLoss(weight=0.1 * f),
        "entropy": EntropyLoss(weight=-0.2 * f),
        "kd": Distillation(temperature=2.0 * f),
        "forward": Distillation(loss_type="forward_kl", temperature=2.0 * f, student_temperature=1.5 * f),
        "reverse": Distillation(loss_type="reverse_kl", temperature=1.3 * f, weight=0.7),
        "jsd": Distillation(loss_type="jsd", jsd_beta=0.3 * f),
        "clip": GRPO(epsilon_low=0.2 * f, epsilon_high=0.28 * f, delta=3.0 * f, beta=0.05 * f),
        "cispo": GRPO(objective="cispo", epsilon_high=0.3 * f, beta=0.05 * f, kl_estimator="k1"),
        "sapo": GRPO(objective="sapo", tau_pos=1.1 * f, tau_neg=1.2 * f, beta=0.05 * f, kl_estimator="k2"),
        "reinforce": GRPO(objective="reinforce", weight=0.3 * f, metrics="none"),
        "gspo": GSPO(epsilon_low=0.2 * f, epsilon_high=0.3 * f, reduction="sequence_mean_token_sum", weight=0.2),
        "dpo": DPO(beta=0.2 * f, label_smoothing=0.1 * f),
        "hinge": DPO(loss_type="hinge", beta=0.15 * f),
        "ipo": DPO(loss_type="ipo", beta=0.4 * f),
        "simpo": SimPO(beta=2.0 * f, margin=0.4 * f),
        "orpo": ORPO(beta=0.1 * f),
        "kto": KTO(beta=0.1 * f, desirable_weight=1.2 * f, reference_point=0.05 * f),
    }


def random_inputs(
    seed: int = 0,
    tokens: int = 8,
    vocab: int = 11,
    *,
    logits_scale_factor: float = 1.0,
    final_logit_softcap: float | None = None,
) -> dict[str, Any]:
    """Inputs that any set of losses can take, as NumPy arrays: four sequences, two pairs, one ignored label.

    The ratios to the old policy, at the given scale and softcap, lie on both sides of the clip bands.
    """
    r = np.random.default_rng(seed)
    logits = 2.0 * r.normal(size=(tokens, vocab))
    labels = r.integers(0, vocab, tokens)
    x = logits if final_logit_softcap is None else final_logit_softcap * np.tanh(logits / final_logit_softcap)
    x = logits_scale_factor * (x - x.max(-1, keepdims=True))
    logprob = (x - np.log(np.exp(x).sum(-1, keepdims=True)))[np.arange(tokens), labels]
    steps = np.resize([0.6, -0.6, 0.05, -0.1, 0.5, 0.12, -0.5, 0.02], tokens)
    labels[tokens // 2] = -100
    return {
        "logits": logits,
        "labels": labels,
        "teacher_logits": {"teacher": 2.0 * r.normal(size=(tokens, vocab))},
        "advantages": np.resize([1.1, -1.3, 0.6, -0.4, 0.9], tokens),
        "old_logprobs": logprob - steps,
        "ref_logprobs": logprob + 0.4 * r.normal(size=tokens),
        "importance_weights": r.uniform(0.5, 1.5, tokens),
        "segment_ids": np.arange(tokens) * 4 // tokens,
        "preference_pairs": np.array([[0, 1], [3, 2]]),
    }


def relative_rms(found: Any, expected: Any) -> float:
    """‖found − expected‖ / ‖expected‖, 0 where both are zero."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    size = float(np.sqrt((expected**2).sum()))
    difference = float(np.sqrt(((found - expected) ** 2).sum()))
    return difference / size if size else difference


def as_config(loss: Loss) -> dict[str, Any]:
    """A loss in the plain form of a configuration, which is what the oracle reads."""
    fields = {rule.name: getattr(loss, rule.name) for rule in loss.rules}
    return {"type": loss.type, **{name: value for name, value in fields.items() if value is not None}}
