"""GRPO, GSPO and DPO, values and metrics, against plain Python loops over lists of floats: no array code is shared."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from policy_inputs import run

SEEDS = range(6)
IMPLEMENTATIONS = ("torch eager", "jax eager")


def make_batch(seed: int) -> dict[str, Any]:
    """Lists of floats: 12 tokens in 4 sequences in any order, some ignored, some in no sequence."""
    r = random.Random(seed)
    tokens, vocab = 12, 5
    return {
        "logits": [[r.gauss(0.0, 1.5) for _ in range(vocab)] for _ in range(tokens)],
        "labels": [r.choice([0, 1, 2, 3, 4, 4, -100]) for _ in range(tokens)],
        "advantages": [r.gauss(0.0, 1.0) for _ in range(tokens)],
        "old_logprobs": [-1.6 + r.gauss(0.0, 0.7) for _ in range(tokens)],
        "ref_logprobs": [-1.6 + r.gauss(0.0, 0.7) for _ in range(tokens)],
        "segment_ids": [0, 1, 2, 3, *(r.choice([-1, 0, 1, 2, 3]) for _ in range(tokens - 4))],
        "preference_pairs": [[0, 1], [2, 3], [3, 0]],
    }


def arrays(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: np.array(value) for name, value in batch.items()}


def log_softmax(row: list[float]) -> list[float]:
    total = math.fsum(math.exp(x) for x in row)
    return [x - math.log(total) for x in row]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def valid_tokens(batch: dict[str, Any]) -> list[int]:
    return [t for t, label in enumerate(batch["labels"]) if label >= 0]


def logprobs(batch: dict[str, Any]) -> dict[int, float]:
    return {t: log_softmax(batch["logits"][t])[batch["labels"][t]] for t in valid_tokens(batch)}


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    inside = ratio
    if ratio < 1.0 - low:
        inside = 1.0 - low
    if ratio > 1.0 + high:
        inside = 1.0 + high
    return -min(ratio * advantage, inside * advantage)


def k3(lp: float, ref: float) -> float:
    return math.exp(ref - lp) - (ref - lp) - 1.0


def ratio_metrics(ratios: list[float], advantages: list[float], low: float, high: float) -> dict[str, float]:
    below = [ratio < 1.0 - low for ratio in ratios]
    above = [ratio > 1.0 + high for ratio in ratios]
    return {
        "ratio_new_old": mean(ratios),
        "ratio_new_old_min": min(ratios),
        "ratio_new_old_max": max(ratios),
        "ratio_new_old_sum": math.fsum(ratios),
        "ratio_new_old_squared_sum": math.fsum(ratio * ratio for ratio in ratios),
        "kl_new_old": mean([ratio - math.log(ratio) - 1.0 for ratio in ratios]),
        "clipped_ratio_fraction": mean([float(a or b) for a, b in zip(below, above, strict=True)]),
        "clip_low_fraction": mean([float(b and a < 0.0) for b, a in zip(below, advantages, strict=True)]),
        "clip_high_fraction": mean([float(b and a > 0.0) for b, a in zip(above, advantages, strict=True)]),
        "advantage": mean(advantages),
        "advantage_min": min(advantages),
        "advantage_max": max(advantages),
    }


def common_metrics(batch: dict[str, Any]) -> dict[str, float]:
    valid, lp = valid_tokens(batch), logprobs(batch)
    entropies = []
    for t in valid:
        entropies.append(-math.fsum(math.exp(x) * x for x in log_softmax(batch["logits"][t])))
    segments = set()
    for t in valid:
        if batch["segment_ids"][t] >= 0:
            segments.add(batch["segment_ids"][t])
    return {
        "new_logprobs": mean([lp[t] for t in valid]),
        "old_logprobs": mean([batch["old_logprobs"][t] for t in valid]),
        "kl_ref": mean([k3(lp[t], batch["ref_logprobs"][t]) for t in valid]),
        "entropy": mean(entropies),
        "num_tokens": float(len(valid)),
        "num_segments": float(len(segments)),
    }


def members(batch: dict[str, Any], segment: int) -> list[int]:
    return [t for t in valid_tokens(batch) if batch["segment_ids"][t] == segment]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_grpo(seed: int, implementation: str) -> None:
    batch = make_batch(seed)
    low, high, beta = 0.2, 0.28, 0.1
    lp, valid = logprobs(batch), valid_tokens(batch)
    values, ratios, advantages = [], [], []
    for t in valid:
        ratio = math.exp(lp[t] - batch["old_logprobs"][t])
        ratios.append(ratio)
        advantages.append(batch["advantages"][t])
        values.append(clipped(ratio, batch["advantages"][t], low, high) + beta * k3(lp[t], batch["ref_logprobs"][t]))
    loss = {"rl": {"type": "grpo", "epsilon_low": low, "epsilon_high": high, "beta": beta}}
    result = run(implementation, loss, arrays(batch))
    assert result.loss == pytest.approx(mean(values), rel=1e-12)
    expected = {**common_metrics(batch), **ratio_metrics(ratios, advantages, low, high)}
    assert result.metrics == pytest.approx({f"rl/{name}": value for name, value in expected.items()}, rel=1e-11)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_gspo(seed: int, implementation: str) -> None:
    batch = make_batch(seed)
    low, high = 0.1, 0.15
    lp, valid = logprobs(batch), valid_tokens(batch)
    carried_ratio = dict.fromkeys(valid, 1.0)
    carried_advantage = dict.fromkeys(valid, 0.0)
    total, per_sequence = 0.0, []
    for segment in range(4):
        tokens = members(batch, segment)
        if not tokens:
            continue
        ratio = math.exp(mean([lp[t] - batch["old_logprobs"][t] for t in tokens]))
        advantage = mean([batch["advantages"][t] for t in tokens])
        value = clipped(ratio, advantage, low, high)
        per_sequence.append(value)
        for t in tokens:
            total += value / len(valid)
            carried_ratio[t], carried_advantage[t] = ratio, advantage
    band = {"type": "gspo", "epsilon_low": low, "epsilon_high": high}
    losses = {"rl": band, "each": {**band, "reduction": "sequence_mean_token_mean", "metrics": "none"}}
    result = run(implementation, losses, arrays(batch))
    assert result.losses["rl"] == pytest.approx(total, rel=1e-12)
    assert result.losses["each"] == pytest.approx(mean(per_sequence), rel=1e-12)
    ratios, advantages = list(carried_ratio.values()), list(carried_advantage.values())
    expected = {**common_metrics(batch), **ratio_metrics(ratios, advantages, low, high)}
    assert result.metrics == pytest.approx(
        {f"rl/{name}": value for name, value in expected.items()}, rel=1e-11, abs=1e-15
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_dpo(seed: int, loss_type: str, implementation: str) -> None:
    batch = make_batch(seed)
    beta, smoothing = 0.4, 0.1
    lp = logprobs(batch)
    over = {segment: [lp[t] - batch["ref_logprobs"][t] for t in members(batch, segment)] for segment in range(4)}

    def loss_of(h: float) -> float:
        if loss_type == "sigmoid":
            return math.log(1.0 + math.exp(-h))
        if loss_type == "hinge":
            return max(0.0, 1.0 - h)
        return (h / beta - 1.0 / (2.0 * beta)) ** 2

    values, chosen_rewards, rejected_rewards = [], [], []
    for chosen, rejected in batch["preference_pairs"]:
        chosen_sum, rejected_sum = math.fsum(over[chosen]), math.fsum(over[rejected])
        h = beta * (chosen_sum - rejected_sum)
        if loss_type == "ipo":
            h = beta * (
                (mean(over[chosen]) if over[chosen] else 0.0) - (mean(over[rejected]) if over[rejected] else 0.0)
            )
        values.append((1.0 - smoothing) * loss_of(h) + smoothing * loss_of(-h))
        chosen_rewards.append(beta * chosen_sum)
        rejected_rewards.append(beta * rejected_sum)
    loss = {"dpo": {"type": "dpo", "loss_type": loss_type, "beta": beta, "label_smoothing": smoothing}}
    result = run(implementation, loss, arrays(batch))
    assert result.loss == pytest.approx(mean(values), rel=1e-12)
    both = list(zip(chosen_rewards, rejected_rewards, strict=True))
    expected = {
        "dpo/rewards_chosen": mean(chosen_rewards),
        "dpo/rewards_rejected": mean(rejected_rewards),
        "dpo/margin": mean([c - r for c, r in both]),
        "dpo/accuracy": mean([float(c > r) for c, r in both]),
    }
    assert result.metrics == pytest.approx(expected, rel=1e-11, abs=1e-14)
