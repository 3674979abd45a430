"""Random sets of losses with their inputs, and ways to split a vocabulary: what both frameworks' shard tests share."""

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

TOKENS, VOCAB, SEGMENTS = (3, 8), 11, 6


def all_losses() -> dict[str, Any]:
    """Every family once or twice; jsd apart, for it alone needs a second collective."""
    return {
        "ce": CrossEntropy(label_smoothing=0.1),
        "scaled": CrossEntropy(logits_scale_factor=0.7, reduction="sum", weight=0.05),
        "z": ZLoss(weight=0.1),
        "h": EntropyLoss(weight=-0.02),
        "cross": Distillation(temperature=2.0, weight=0.3),
        "forward": Distillation(loss_type="forward_kl", student_temperature=1.5, weight=0.7),
        "reverse": Distillation(loss_type="reverse_kl", weight=0.4),
        "rl": GRPO(beta=0.05, metrics="basic"),
        "cispo": GRPO(objective="cispo", reduction="sequence_mean_token_mean", weight=0.5),
        "sapo": GRPO(objective="sapo", reduction="constant", denominator=17.0),
        "seq": GSPO(reduction="sequence_mean_token_sum", weight=0.2),
        "dpo": DPO(beta=0.2),
        "orpo": ORPO(weight=0.3),
        "simpo": SimPO(weight=0.2),
        "kto": KTO(weight=0.1),
    }


def jsd_losses() -> dict[str, Any]:
    return {
        "low": Distillation(loss_type="jsd", jsd_beta=0.1),
        "half": Distillation(loss_type="jsd", jsd_beta=0.5, temperature=2.0, weight=0.3),
        "zero": Distillation(loss_type="jsd", jsd_beta=0.0, weight=0.2),
        "one": Distillation(loss_type="jsd", jsd_beta=1.0, weight=0.1),
    }


def random_losses(seed: int) -> dict[str, Any]:
    """A random set out of all losses."""
    r = np.random.default_rng(seed)
    losses = {**all_losses(), **jsd_losses()}
    names = r.choice(sorted(losses), size=r.integers(1, 6), replace=False)
    return {str(name): losses[str(name)] for name in names}


def random_inputs(seed: int, tokens: tuple[int, ...] = TOKENS, vocab: int = VOCAB) -> dict[str, Any]:
    """Inputs for any losses: ignored tokens, masked rows of NaN, a −inf column, an empty segment, a padded pair."""
    r = np.random.default_rng(seed)
    logits = r.normal(size=(*tokens, vocab)) * 1.5
    labels = r.integers(0, vocab, tokens)
    flat_labels, flat_logits = labels.reshape(-1), logits.reshape(-1, vocab)
    lse = np.log(np.exp(logits).sum(-1))
    flat_labels[:vocab] = np.arange(vocab)[: flat_labels.size]  # a label in every column
    # Near the policy's own: a ratio multiplies the rounding of a log-probability by itself.
    logprobs = np.take_along_axis(logits, labels[..., None], -1)[..., 0] - lse
    flat_labels[vocab + 1 :: 5] = -100
    mask = r.uniform(size=tokens) > 0.1
    flat_logits[~mask.reshape(-1)] = np.nan
    last = flat_logits[-1]
    last[(flat_labels[-1] + 1) % vocab] = -np.inf
    segment_ids = r.permutation(np.arange(labels.size) % SEGMENTS).reshape(tokens)
    segment_ids[segment_ids == 4] = -1
    return {
        "logits": logits,
        "labels": labels,
        "mask": mask,
        "segment_ids": segment_ids,
        "num_segments": SEGMENTS,
        "teacher_logits": {"teacher": r.normal(size=(*tokens, vocab)) * 2},
        "advantages": r.normal(size=tokens),
        "old_logprobs": np.minimum(logprobs + 0.4 * r.normal(size=tokens), -1e-3),
        "ref_logprobs": np.minimum(logprobs + 0.4 * r.normal(size=tokens), -1e-3),
        "preference_pairs": np.array([[0, 1], [3, 2], [5, -1]]),
        "metrics": ("entropy", "accuracy", "perplexity", "mean_logprob", "num_tokens"),
        "tokens": ("logprobs", "entropy", "lse"),
    }


def even_bounds(vocab: int, ranks: int) -> list[tuple[int, int]]:
    """ceil(vocab / ranks) columns each, the last ones short or empty."""
    width = -(-vocab // ranks)
    return [(min(rank * width, vocab), min((rank + 1) * width, vocab)) for rank in range(ranks)]


def uneven_bounds(vocab: int, ranks: int, seed: int) -> list[tuple[int, int]]:
    """Random cuts, shards in any order, some of them empty."""
    r = np.random.default_rng(seed)
    cuts = [0, *sorted(int(cut) for cut in r.integers(0, vocab + 1, ranks - 1)), vocab]
    return [(cuts[i], cuts[i + 1]) for i in r.permutation(ranks)]
