"""The oracle: every loss straight from its definition, in float64, one row at a time.

It shares no code with the rest of the package and is written to be read, not to be fast. Each row's full
probability vectors are formed, each loss has its own closed-form derivative, and nothing is combined: a head with
five losses takes five softmaxes. Hyperparameters come in the plain YAML form of a head; they are not validated here.

Conventions, in the order in which they matter:

* A masked row is never looked at. Columns from ``vocab_size`` on do not exist.
* A column whose scaled logit is -inf adds nothing to any sum and gets a zero gradient, whatever the loss.
  (A softcap comes first, and turns -inf into -cap, which is a column like any other.)
* Every ratio is ``exp(min(l, 80))``, and its derivative is itself, also where it was bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Loss = Mapping[str, Any]

MAX_EXPONENT = 80.0
ORPO_MAX_MEAN = -1e-7


class Reference(NamedTuple):
    """What one call gives; ``losses`` are unweighted, ``tokens`` are NaN on masked rows."""

    loss: float
    losses: dict[str, float]
    metrics: dict[str, float]
    logits_grad: Vector
    tokens: dict[str, Vector]


# ---------------------------------------------------------------------------------------------------- inputs


@dataclass
class _Call:
    """One call's inputs, flattened to one entry per token. Only the tokens in ``rows`` exist."""

    logits: Vector
    vocab: int
    softcap: float | None
    rows: list[int]
    labels: list[int] | None
    teacher_logits: Any
    advantages: dict[int, float] | None
    old_logprobs: Vector | None
    ref_logprobs: Any
    importance_weights: Vector | None
    segments: dict[int, list[int]] | None  # segment id -> its valid tokens
    pairs: list[tuple[int, int]] | None
    num_tokens: float
    num_sequences: float
    num_pairs: float


def _require(value: Any, argument: str, name: str) -> Any:
    if value is None:
        raise ValueError(f"loss {name!r} needs {argument}")
    return value


def _flat(array: Any, shape: tuple[int, ...], argument: str) -> Vector:
    result = np.asarray(array)
    if result.shape != shape:
        raise ValueError(f"{argument} has shape {result.shape}, the tokens have {shape}")
    return result.astype(np.float64).reshape(-1)


def _by_name(arrays: Any, name: str | None, default: str, argument: str) -> Any:
    """The array of one reference model, out of a mapping or as it stands."""
    if not isinstance(arrays, Mapping):
        return arrays
    if name is None:
        name = next(iter(arrays)) if len(arrays) == 1 else default
    if name not in arrays:
        raise ValueError(f"{argument} has no {name!r}, only {sorted(arrays)}")
    return arrays[name]


# ----------------------------------------------------------------------------------------------- row statistics


class _Row(NamedTuple):
    """One softmax. ``logp`` is -inf and ``p`` is 0 on the columns that are not ``live``."""

    x: Vector
    live: npt.NDArray[np.bool_]
    p: Vector
    logp: Vector
    lse: float
    entropy: float


def _softmax(x: Vector) -> _Row:
    live = x > -np.inf
    live |= np.isnan(x)  # a NaN must stay visible
    peak = x.max()
    log_sum = math.log(np.exp(x - peak).sum()) if live.any() else math.nan
    logp = (x - peak) - log_sum
    p = np.exp(logp)
    entropy = -float((p[live] * logp[live]).sum())
    return _Row(x, live, p, logp, float(peak) + log_sum, entropy)


def _student_row(call: _Call, t: int, scale: float) -> _Row:
    v = call.logits[t, : call.vocab]
    if call.softcap is not None:
        v = call.softcap * np.tanh(v / call.softcap)
    return _softmax(scale * v)


def _chain_to_logits(call: _Call, t: int, scale: float, d_x: Vector) -> Vector:
    """From d/dx to d/d raw logits: times scale * (1 - tanh^2), zero where d_x is."""
    slope = np.full(call.vocab, scale)
    if call.softcap is not None:
        slope = slope * (1.0 - np.tanh(call.logits[t, : call.vocab] / call.softcap) ** 2)
    return np.where(d_x == 0.0, 0.0, d_x * slope)


def _d_logprob(row: _Row, label: int) -> Vector:
    """d log p_label / dx."""
    d = -row.p
    d[label] += 1.0
    return np.where(row.live, d, 0.0)


def _sigmoid(x: float) -> float:
    return float(np.exp(-np.logaddexp(0.0, -x)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if len(values) else 0.0


# ------------------------------------------------------------- losses of one row's distribution: value and d/dx


def _label(row: _Row, label: int, smoothing: float) -> tuple[float, Vector]:
    vocab = len(row.x)
    value = -(1.0 - smoothing) * float(row.logp[label])
    d = -(1.0 - smoothing) * _d_logprob(row, label)
    if smoothing:  # the mean is over V columns, those at -inf adding nothing
        value -= smoothing * float(row.logp[row.live].sum()) / vocab
        d -= smoothing * np.where(row.live, 1.0 / vocab - row.live.sum() / vocab * row.p, 0.0)
    return value, d


def _z_loss(row: _Row) -> tuple[float, Vector]:
    return row.lse**2, 2.0 * row.lse * row.p


def _entropy(row: _Row) -> tuple[float, Vector]:
    d = np.zeros_like(row.p)
    d[row.live] = -row.p[row.live] * (row.logp[row.live] + row.entropy)
    return row.entropy, d


def _distillation(student: _Row, teacher: _Row, loss_type: str, beta: float) -> tuple[float, Vector]:
    live = student.live
    p, logp, q, logq = student.p, student.logp, teacher.p, teacher.logp
    has_p, has_q = p > 0.0, q > 0.0
    has_p |= np.isnan(p)  # a NaN must stay visible
    if loss_type == "jsd" and beta == 0.0:
        loss_type = "forward_kl"
    if loss_type == "jsd" and beta == 1.0:
        loss_type = "reverse_kl"

    # The teacher's mass on a column that the student has at -inf makes its cross-entropy infinite: that is the truth.
    if loss_type == "cross_entropy":
        value = -float((q[has_q] * logp[has_q]).sum())
        d = p - q
    elif loss_type == "forward_kl":
        value = float((q[has_q] * (logq[has_q] - logp[has_q])).sum())
        d = p - q
    elif loss_type == "reverse_kl":  # infinite where the student has mass and the teacher has none
        value = float((p[has_p] * (logp[has_p] - logq[has_p])).sum())
        d = np.zeros_like(p)
        d[has_p] = p[has_p] * (logp[has_p] - logq[has_p] - value)
    elif loss_type == "jsd":
        log_mix = np.logaddexp(math.log(beta) + logq, math.log(1.0 - beta) + logp)
        kl_teacher = float((q[has_q] * (logq[has_q] - log_mix[has_q])).sum())
        r = np.zeros_like(p)
        r[has_p] = logp[has_p] - log_mix[has_p]
        kl_student = float((p * r).sum())
        value = beta * kl_teacher + (1.0 - beta) * kl_student
        d = (1.0 - beta) * p * (r - kl_student)
    else:
        raise ValueError(f"unknown distillation loss_type {loss_type!r}")
    d = np.where(live, d, 0.0)
    return value, d


# ------------------------------------------------------------- losses of one number: value and d/d that number


def _ratio(log_ratio: float) -> float:
    return math.exp(min(log_ratio, MAX_EXPONENT))


def _times(factor: float, value: float) -> float:
    """A factor of 0 removes even an infinite value."""
    return factor * value if factor else 0.0


def _band(loss: Loss) -> tuple[float, float]:
    return 1.0 - loss.get("epsilon_low", 0.2), 1.0 + loss.get("epsilon_high", 0.2)


def _clip_surrogate(loss: Loss, r: float, advantage: float) -> tuple[float, float]:
    """-min(r A, clip(r) A) and its derivative with respect to log r; the band's edges belong to the band."""
    low, high = _band(loss)
    delta = loss.get("delta")
    unclipped = min(r, delta) if delta is not None and advantage < 0.0 else r
    value = -min(unclipped * advantage, min(max(r, low), high) * advantage)
    if advantage > 0.0 and r > high:
        return value, 0.0
    if advantage < 0.0 and r < low:
        return value, 0.0
    if advantage < 0.0 and delta is not None and r > delta:
        return value, 0.0
    return value, -r * advantage


def _policy(loss: Loss, lp: float, old: float | None, advantage: float) -> tuple[float, float]:
    """One token's policy objective and its derivative with respect to lp."""
    objective = loss.get("objective", "clip")
    if objective == "reinforce":
        return _times(-advantage, lp), -advantage
    assert old is not None
    r = _ratio(lp - old)
    if objective == "clip":
        return _clip_surrogate(loss, r, advantage)
    if objective == "cispo":  # the clipped ratio is a constant
        low, high = _band(loss)
        clipped = min(max(r, low), high)
        return _times(-clipped * advantage, lp), -clipped * advantage
    if objective == "sapo":
        tau = loss.get("tau_pos", 1.0) if advantage > 0.0 else loss.get("tau_neg", 1.05)
        z = tau * (r - 1.0)
        return -4.0 / tau * _sigmoid(z) * advantage, -advantage * r * 4.0 * _sigmoid(z) * _sigmoid(-z)
    raise ValueError(f"unknown grpo objective {objective!r}")


def _kl_estimate(loss: Loss, lp: float, ref: float) -> tuple[float, float]:
    """An estimate of KL(policy || reference) from one token, and its derivative with respect to lp."""
    estimator = loss.get("kl_estimator", "k3")
    difference = ref - lp
    if estimator == "k1":
        return -difference, 1.0
    if estimator == "k2":
        return difference**2 / 2.0, -difference
    if estimator == "k3":
        bounded = min(difference, MAX_EXPONENT)
        return math.exp(bounded) - bounded - 1.0, 1.0 - _ratio(difference)
    raise ValueError(f"unknown kl_estimator {estimator!r}")


def _dpo_value(loss: Loss, h: float) -> tuple[float, float]:
    """L(h) and L'(h)."""
    loss_type, beta = loss.get("loss_type", "sigmoid"), loss.get("beta", 0.1)
    if loss_type == "sigmoid":
        return float(np.logaddexp(0.0, -h)), -_sigmoid(-h)
    if loss_type == "hinge":
        return max(1.0 - h, 0.0), -1.0 if h < 1.0 else 0.0  # in this order a NaN stays
    if loss_type == "ipo":
        away = h / beta - 1.0 / (2.0 * beta)
        return away**2, 2.0 * away / beta
    raise ValueError(f"unknown dpo loss_type {loss_type!r}")


def _log_odds(mean_logprob: float) -> tuple[float, float]:
    """log(e^m / (1 - e^m)) and its derivative, m bounded away from 0."""
    m = min(mean_logprob, ORPO_MAX_MEAN)
    return m - math.log(-math.expm1(m)), 1.0 / -math.expm1(m)


# ---------------------------------------------------------------------------------------------------- reductions


def _token_weights(call: _Call, name: str, loss: Loss) -> dict[int, float]:
    """Every valid token's weight in the reduced loss."""
    reduction = loss.get("reduction", "token_mean")
    if reduction == "token_mean":
        return dict.fromkeys(call.rows, 1.0 / max(call.num_tokens, 1))
    if reduction == "sum":
        return dict.fromkeys(call.rows, 1.0)
    if reduction == "constant":
        denominator = _require(loss.get("denominator"), "a denominator", name)
        return dict.fromkeys(call.rows, 1.0 / denominator)
    if reduction not in ("sequence_mean_token_mean", "sequence_mean_token_sum"):
        raise ValueError(f"unknown reduction {reduction!r}")
    weights = dict.fromkeys(call.rows, 0.0)  # a token outside any segment keeps 0
    for tokens in _require(call.segments, "segment_ids", name).values():
        for t in tokens:
            length = len(tokens) if reduction == "sequence_mean_token_mean" else 1
            weights[t] = 1.0 / (call.num_sequences * length)
    return weights


def _item_weight(name: str, loss: Loss, count: float) -> float:
    """The weight of one pair or one sequence: its share of the mean, unless a sum or a constant is asked for."""
    reduction = loss.get("reduction", "token_mean")
    if reduction == "sum":
        return 1.0
    if reduction == "constant":
        return 1.0 / float(_require(loss.get("denominator"), "a denominator", name))
    return 1.0 / max(count, 1)


# ----------------------------------------------------- losses of the label's log-probability: value and d/dlp_t

#: reduced value, d value / d lp of each token, metrics
_LogprobLoss = tuple[float, dict[int, float], dict[str, float]]


def _kl_term(
    call: _Call, name: str, loss: Loss, lp: dict[int, float], ref: Vector | None
) -> tuple[float, dict[int, float]]:
    """beta times the reduced KL to the reference, over every valid token, and its derivatives."""
    beta = loss.get("beta", 0.0)
    total, d_lp = 0.0, dict.fromkeys(call.rows, 0.0)
    if beta > 0.0:
        ref = _require(ref, "ref_logprobs", name)
        for t, weight in _token_weights(call, name, loss).items():
            if weight:
                value, d = _kl_estimate(loss, lp[t], ref[t])
                total += weight * beta * value
                d_lp[t] = weight * beta * d
    return total, d_lp


def _grpo(call: _Call, name: str, loss: Loss, rows: dict[int, _Row], lp: dict[int, float], ref: Any) -> _LogprobLoss:
    advantages = _require(call.advantages, "advantages", name)
    old = call.old_logprobs
    if loss.get("objective", "clip") != "reinforce":
        _require(old, "old_logprobs", name)
    total, d_lp = _kl_term(call, name, loss, lp, ref)
    for t, weight in _token_weights(call, name, loss).items():
        if weight:
            value, d = _policy(loss, lp[t], None if old is None else old[t], advantages[t])
            importance = 1.0 if call.importance_weights is None else call.importance_weights[t]
            if importance:  # a weight of zero leaves nothing, not even of an infinite value
                total += weight * importance * value
                d_lp[t] += weight * importance * d
    log_ratios = None if old is None else {t: lp[t] - old[t] for t in call.rows}
    return total, d_lp, _policy_metrics(call, loss, rows, lp, log_ratios, advantages, ref)


def _gspo(call: _Call, name: str, loss: Loss, rows: dict[int, _Row], lp: dict[int, float], ref: Any) -> _LogprobLoss:
    advantages = _require(call.advantages, "advantages", name)
    old = _require(call.old_logprobs, "old_logprobs", name)
    segments = _require(call.segments, "segment_ids", name)
    weights = _token_weights(call, name, loss)
    total, d_lp = _kl_term(call, name, loss, lp, ref)
    carried_log_ratio = dict.fromkeys(call.rows, 0.0)
    carried_advantage = dict.fromkeys(call.rows, 0.0)
    for tokens in segments.values():
        log_ratio = _mean([lp[t] - old[t] for t in tokens])
        advantage = _mean([advantages[t] for t in tokens])
        importance = 1.0
        if call.importance_weights is not None:
            importance = _mean([call.importance_weights[t] for t in tokens])
        value, d = _clip_surrogate(loss, _ratio(log_ratio), advantage)
        weight = sum(weights[t] for t in tokens)  # each token carries the sequence's value
        if importance:
            total += weight * importance * value
        for t in tokens:
            if importance:
                d_lp[t] += weight * importance * d / len(tokens)
            carried_log_ratio[t] = log_ratio
            carried_advantage[t] = advantage
    return total, d_lp, _policy_metrics(call, loss, rows, lp, carried_log_ratio, carried_advantage, ref)


def _preference(
    call: _Call, name: str, loss: Loss, rows: dict[int, _Row], lp: dict[int, float], ref: Any
) -> _LogprobLoss:
    """dpo, simpo and orpo: functions of the two sequences of a pair."""
    kind = loss["type"]
    beta = loss.get("beta", {"dpo": 0.1, "simpo": 2.0, "orpo": 0.1}[kind])
    segments = _require(call.segments, "segment_ids", name)
    pairs = _require(call.pairs, "preference_pairs", name)
    weight = _item_weight(name, loss, call.num_pairs) if call.rows else 0.0  # no valid token: 0
    total, d_lp = 0.0, dict.fromkeys(call.rows, 0.0)
    chosen_rewards, rejected_rewards = [], []
    for chosen_id, rejected_id in pairs:
        chosen, rejected = segments.get(chosen_id, []), segments.get(rejected_id, [])
        if kind == "dpo":
            over_reference = {t: lp[t] - (0.0 if ref is None else ref[t]) for t in (*chosen, *rejected)}
            sum_c, sum_r = (sum(over_reference[t] for t in side) for side in (chosen, rejected))
            mean_c, mean_r = (_mean([over_reference[t] for t in side]) for side in (chosen, rejected))
            ipo = loss.get("loss_type", "sigmoid") == "ipo"
            smoothing = loss.get("label_smoothing", 0.0)
            h = beta * (mean_c - mean_r if ipo else sum_c - sum_r)
            straight, d_straight = _dpo_value(loss, h)
            flipped, d_flipped = _dpo_value(loss, -h)
            value = (1.0 - smoothing) * straight + _times(smoothing, flipped)
            d_h = (1.0 - smoothing) * d_straight - _times(smoothing, d_flipped)
            # derivatives with respect to one token of each side
            d_chosen = d_h * beta / (max(len(chosen), 1) if ipo else 1)
            d_rejected = -d_h * beta / (max(len(rejected), 1) if ipo else 1)
            rewards = (beta * sum_c, beta * sum_r)
        else:
            mean_c, mean_r = (_mean([lp[t] for t in side]) for side in (chosen, rejected))
            if kind == "simpo":
                h = beta * (mean_c - mean_r) - loss.get("margin", 0.5)
                value = float(np.logaddexp(0.0, -h))
                d_mean_c = -_sigmoid(-h) * beta
                d_mean_r = _sigmoid(-h) * beta
            else:
                odds_c, d_odds_c = _log_odds(mean_c)
                odds_r, d_odds_r = _log_odds(mean_r)
                h = odds_c - odds_r
                value = -mean_c + beta * float(np.logaddexp(0.0, -h))
                d_mean_c = -1.0 - beta * _sigmoid(-h) * d_odds_c
                d_mean_r = beta * _sigmoid(-h) * d_odds_r
            d_chosen = d_mean_c / max(len(chosen), 1)
            d_rejected = d_mean_r / max(len(rejected), 1)
            rewards = (beta * mean_c, beta * mean_r)
        total += weight * value
        for t in chosen:
            d_lp[t] += weight * d_chosen
        for t in rejected:
            d_lp[t] += weight * d_rejected
        chosen_rewards.append(rewards[0])
        rejected_rewards.append(rewards[1])
    metrics = {
        "rewards_chosen": _mean(chosen_rewards),
        "rewards_rejected": _mean(rejected_rewards),
        "margin": _mean(chosen_rewards) - _mean(rejected_rewards),
        "accuracy": _mean([float(c > r) for c, r in zip(chosen_rewards, rejected_rewards, strict=True)]),
    }
    return total, d_lp, metrics


def _kto(call: _Call, name: str, loss: Loss, rows: dict[int, _Row], lp: dict[int, float], ref: Any) -> _LogprobLoss:
    """Each sequence by itself; the sign of its mean advantage says whether it is desirable."""
    beta, point = loss.get("beta", 0.1), loss.get("reference_point", 0.0)
    advantages = _require(call.advantages, "advantages", name)
    weight = _item_weight(name, loss, call.num_sequences)
    total, d_lp = 0.0, dict.fromkeys(call.rows, 0.0)
    desirable_rewards, undesirable_rewards = [], []
    for tokens in _require(call.segments, "segment_ids", name).values():
        advantage = _mean([advantages[t] for t in tokens])
        r = sum(lp[t] - (0.0 if ref is None else ref[t]) for t in tokens)
        if advantage > 0.0:
            sign, factor = 1.0, loss.get("desirable_weight", 1.0)
            desirable_rewards.append(beta * r)
        elif advantage < 0.0:
            sign, factor = -1.0, loss.get("undesirable_weight", 1.0)
            undesirable_rewards.append(beta * r)
        else:
            continue
        z = sign * beta * (r - point)
        total += weight * factor * (1.0 - _sigmoid(z))
        for t in tokens:
            d_lp[t] = -weight * factor * sign * beta * _sigmoid(z) * _sigmoid(-z)
    metrics = {
        "rewards_chosen": _mean(desirable_rewards),
        "rewards_rejected": _mean(undesirable_rewards),
        "margin": _mean(desirable_rewards) - _mean(undesirable_rewards),
    }
    return total, d_lp, metrics


_LOGPROB_LOSSES: dict[str, Callable[..., _LogprobLoss]] = {
    "grpo": _grpo,
    "gspo": _gspo,
    "dpo": _preference,
    "simpo": _preference,
    "orpo": _preference,
    "kto": _kto,
}


# ------------------------------------------------------------------------------------------------------- metrics


def _policy_metrics(
    call: _Call,
    loss: Loss,
    rows: dict[int, _Row],
    lp: dict[int, float],
    log_ratios: dict[int, float] | None,
    advantages: dict[int, float],
    ref: Vector | None,
) -> dict[str, float]:
    """Means over this call's valid tokens, of everything that the inputs allow."""
    adv = [advantages[t] for t in call.rows]
    metrics = {
        "new_logprobs": _mean([lp[t] for t in call.rows]),
        "advantage": _mean(adv),
        "advantage_min": min(adv, default=0.0),
        "advantage_max": max(adv, default=0.0),
        "num_tokens": float(len(call.rows)),
    }
    if call.old_logprobs is not None and log_ratios is not None:
        low, high = _band(loss)
        logs = [min(log_ratios[t], MAX_EXPONENT) for t in call.rows]
        r = [math.exp(log) for log in logs]
        metrics["old_logprobs"] = _mean([call.old_logprobs[t] for t in call.rows])
        metrics["ratio_new_old"] = _mean(r)
        metrics["ratio_new_old_min"] = min(r, default=0.0)
        metrics["ratio_new_old_max"] = max(r, default=0.0)
        metrics["ratio_new_old_sum"] = sum(r)
        metrics["ratio_new_old_squared_sum"] = sum(value**2 for value in r)
        metrics["kl_new_old"] = _mean([value - log - 1.0 for value, log in zip(r, logs, strict=True)])
        metrics["clipped_ratio_fraction"] = _mean([float(value < low or value > high) for value in r])
        metrics["clip_low_fraction"] = _mean([float(v < low and a < 0.0) for v, a in zip(r, adv, strict=True)])
        metrics["clip_high_fraction"] = _mean([float(v > high and a > 0.0) for v, a in zip(r, adv, strict=True)])
    if ref is not None:
        metrics["kl_ref"] = _mean([_kl_estimate(loss, lp[t], ref[t])[0] for t in call.rows])
    if call.segments is not None:
        metrics["num_segments"] = float(len(call.segments))
    if loss.get("metrics", "auto") == "auto":
        metrics["entropy"] = _mean([rows[t].entropy for t in call.rows])
    return metrics


def _head_metrics(call: _Call, asked: Sequence[str], rows: dict[int, _Row]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in (name.removeprefix("head/") for name in asked):
        if name == "num_tokens":
            value = float(len(call.rows))
        elif name == "entropy":
            value = _mean([rows[t].entropy for t in call.rows])
        elif name in ("accuracy", "perplexity", "mean_logprob"):
            labels = _require(call.labels, "labels", f"head/{name}")
            mean_logprob = _mean([float(rows[t].logp[labels[t]]) for t in call.rows])
            if name == "accuracy":
                value = _mean([float(rows[t].x[labels[t]] == rows[t].x.max()) for t in call.rows])
            else:
                value = mean_logprob if name == "mean_logprob" else float(np.exp(-mean_logprob))  # may be inf
        else:
            raise ValueError(f"unknown head metric {name!r}")
        metrics[f"head/{name}"] = value
    return metrics


# ------------------------------------------------------------------------------------------------------ the call


def _one_loss(
    call: _Call, name: str, loss: Loss, head_scale: float, shape: tuple[int, ...]
) -> tuple[float, Vector, dict[str, float]]:
    """One loss by itself: its value, d value / d raw logits, its metrics."""
    kind = loss["type"]
    scale = head_scale * loss.get("logits_scale_factor", 1.0)
    student_scale = scale / loss.get("student_temperature", 1.0)
    rows = {t: _student_row(call, t, student_scale) for t in call.rows}
    gradient = np.zeros_like(call.logits)
    total = 0.0
    metrics: dict[str, float] = {}

    if kind in ("label", "z_loss", "entropy", "distillation"):
        for t, weight in _token_weights(call, name, loss).items():
            if not weight:
                continue
            if kind == "label":
                label = _require(call.labels, "labels", name)[t]
                value, d_x = _label(rows[t], label, loss.get("label_smoothing", 0.0))
            elif kind == "z_loss":
                value, d_x = _z_loss(rows[t])
            elif kind == "entropy":
                value, d_x = _entropy(rows[t])
            else:
                y = _teacher_row(call, name, loss, t, scale, shape)
                loss_type = loss.get("loss_type", "cross_entropy")
                value, d_x = _distillation(rows[t], y, loss_type, loss.get("jsd_beta", 0.5))
            total += weight * value
            gradient[t, : call.vocab] = _chain_to_logits(call, t, student_scale, weight * d_x)
    elif kind in _LOGPROB_LOSSES:
        labels = _require(call.labels, "labels", name)
        lp = {t: float(rows[t].logp[labels[t]]) for t in call.rows}
        ref = _by_name(call.ref_logprobs, loss.get("reference_model"), "ref", "ref_logprobs")
        ref = None if ref is None else _flat(ref, shape, "ref_logprobs")
        total, d_lp, metrics = _LOGPROB_LOSSES[kind](call, name, loss, rows, lp, ref)
        for t in call.rows:
            if d_lp[t]:
                d_x = d_lp[t] * _d_logprob(rows[t], labels[t])
                gradient[t, : call.vocab] = _chain_to_logits(call, t, student_scale, d_x)
        if loss.get("metrics", "auto") == "none":
            metrics = {}
    else:
        raise ValueError(f"loss {name!r} has unknown type {kind!r}")
    return float(total), gradient, {f"{name}/{metric}": float(value) for metric, value in metrics.items()}


def _teacher_row(call: _Call, name: str, loss: Loss, t: int, scale: float, shape: tuple[int, ...]) -> _Row:
    """softmax(scale * teacher logits / temperature); no softcap."""
    logits = _by_name(
        _require(call.teacher_logits, "teacher_logits", name),
        loss.get("reference_model", "teacher"),
        "teacher",
        "teacher_logits",
    )
    array = np.asarray(logits)
    if array.shape[:-1] != shape or array.shape[-1] < call.vocab:
        raise ValueError(f"teacher_logits have shape {array.shape}, the tokens have {shape}")
    y = array.reshape(-1, array.shape[-1])[t, : call.vocab].astype(np.float64)
    return _softmax(scale * y / loss.get("temperature", 1.0))


@np.errstate(all="ignore")
def reference(
    logits: Any,
    head: Mapping[str, Any],
    *,
    labels: Any = None,
    mask: Any = None,
    teacher_logits: Any = None,
    advantages: Any = None,
    old_logprobs: Any = None,
    ref_logprobs: Any = None,
    importance_weights: Any = None,
    segment_ids: Any = None,
    preference_pairs: Any = None,
    num_tokens: float | None = None,
    num_sequences: float | None = None,
    num_pairs: float | None = None,
    vocab_size: int | None = None,
    logits_scale_factor: float | None = None,
    final_logit_softcap: float | None = None,
    num_segments: int | None = None,
) -> Reference:
    """The head's loss, its parts, its metrics and d loss / d logits, in float64.

    Args:
        logits: ``(*tokens, V)``, of any float type; everything per token has shape ``(*tokens)``.
        head: the plain YAML form, ``{"losses": {name: {"type": ...}}, "logits_scale_factor": ..., "metrics": [...]}``.
            No losses means one ``label`` loss named ``ce``.

    Raises:
        ValueError: for a label or segment id out of range on a valid row, a missing input, an unknown name.
    """
    array = np.asarray(logits).astype(np.float64)
    shape, columns = array.shape[:-1], array.shape[-1]
    tokens = math.prod(shape)
    vocab = columns if vocab_size is None else int(vocab_size)
    if not 0 < vocab <= columns:
        raise ValueError(f"vocab_size {vocab} of {columns} columns")
    head_scale = head.get("logits_scale_factor", 1.0) if logits_scale_factor is None else logits_scale_factor
    softcap = head.get("final_logit_softcap") if final_logit_softcap is None else final_logit_softcap

    # which rows exist
    flat_mask = np.ones(tokens, bool) if mask is None else np.asarray(mask, bool).reshape(tokens)
    flat_labels = None if labels is None else [int(label) for label in np.asarray(labels).reshape(tokens)]
    valid = [t for t in range(tokens) if flat_mask[t] and (flat_labels is None or flat_labels[t] >= 0)]
    for t in valid:
        if flat_labels is not None and flat_labels[t] >= vocab:
            raise ValueError(f"label {flat_labels[t]} at row {t}, the vocabulary has {vocab}")

    # which of them belong to which segment
    segment_of: dict[int, int] = {}
    segments: dict[int, list[int]] | None = None
    if segment_ids is not None:
        ids = np.asarray(segment_ids).reshape(tokens)
        segment_of = {t: int(ids[t]) for t in valid if ids[t] >= 0}
        segments = {}
        for t, segment in segment_of.items():
            if num_segments is not None and segment >= num_segments:
                raise ValueError(f"segment id {segment} at row {t}, there are {num_segments}")
            segments.setdefault(segment, []).append(t)

    # advantages per token, or per segment and carried by its tokens
    token_advantages: dict[int, float] | None = None
    if advantages is not None:
        given = np.asarray(advantages).astype(np.float64)
        if given.shape == shape:
            token_advantages = {t: float(given.reshape(tokens)[t]) for t in valid}
        elif given.ndim == 1 and segments is not None:
            if num_segments is not None and len(given) != num_segments:
                raise ValueError(f"{len(given)} advantages for {num_segments} segments")
            token_advantages = {t: float(given[segment_of[t]]) if t in segment_of else 0.0 for t in valid}
        else:
            raise ValueError(f"advantages have shape {given.shape}, the tokens have {shape}")

    pairs: list[tuple[int, int]] | None = None
    if preference_pairs is not None:
        both = [(int(c), int(r)) for c, r in np.asarray(preference_pairs).reshape(-1, 2)]
        pairs = [(c, r) for c, r in both if c >= 0 and r >= 0]

    call = _Call(
        logits=array.reshape(tokens, columns),
        vocab=vocab,
        softcap=softcap,
        rows=valid,
        labels=flat_labels,
        teacher_logits=teacher_logits,
        advantages=token_advantages,
        old_logprobs=None if old_logprobs is None else _flat(old_logprobs, shape, "old_logprobs"),
        ref_logprobs=ref_logprobs,
        importance_weights=(
            None if importance_weights is None else _flat(importance_weights, shape, "importance_weights")
        ),
        segments=segments,
        pairs=pairs,
        num_tokens=len(valid) if num_tokens is None else num_tokens,
        num_sequences=len(segments or {}) if num_sequences is None else num_sequences,
        num_pairs=len(pairs or []) if num_pairs is None else num_pairs,
    )

    total = 0.0
    losses: dict[str, float] = {}
    metrics: dict[str, float] = {}
    gradient = np.zeros_like(call.logits)
    for name, loss in (head.get("losses") or {"ce": {"type": "label"}}).items():
        value, loss_gradient, loss_metrics = _one_loss(call, name, loss, head_scale, shape)
        losses[name] = value
        metrics.update(loss_metrics)
        weight = loss.get("weight", 1.0)
        if weight:
            total += weight * value
            gradient += weight * loss_gradient

    # what is reported per token is at the head's own scale
    rows = {t: _student_row(call, t, head_scale) for t in valid}
    metrics.update(_head_metrics(call, head.get("metrics") or [], rows))
    per_token = {what: np.full(tokens, np.nan) for what in ("logprobs", "entropy", "lse")}
    for t, row in rows.items():
        if flat_labels is not None:
            per_token["logprobs"][t] = row.logp[flat_labels[t]]
        per_token["entropy"][t] = row.entropy
        per_token["lse"][t] = row.lse
    return Reference(
        loss=float(total),
        losses=losses,
        metrics=metrics,
        logits_grad=gradient.reshape(array.shape),
        tokens={what: values.reshape(shape) for what, values in per_token.items()},
    )
