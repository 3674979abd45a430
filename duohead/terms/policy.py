"""Policy-gradient losses over the label's log-probability: GRPO with its objectives, and GSPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from duohead.fields import Number, choice, number, text
from duohead.loss import Loss, Measurement, OnlyWith, Output, Part, register
from duohead.namespace import exp, maximum, minimum, sigmoid, where
from duohead.term import Measure, Term
from duohead.terms.label import is_zero

#: exp is taken of min(l, 80): e^80 = 5.5e34 is still finite in float32
MAX_LOG_RATIO = 80.0
#: no two-sided bound
NO_DELTA = float("inf")


def ratio_of(log_ratio):  # type: ignore[no-untyped-def]
    return exp(minimum(log_ratio, MAX_LOG_RATIO))


def exp_minus_linear(x):  # type: ignore[no-untyped-def]
    """e^x − x − 1 ≥ 0. Near 0, where the difference would cancel, it is the series x²/2 · (1 + x/3 + x²/12 + …)."""
    bounded = minimum(x, MAX_LOG_RATIO)
    rest = 1.0 + bounded / 7.0 * (1.0 + bounded / 8.0 * (1.0 + bounded / 9.0))
    rest = 1.0 + bounded / 4.0 * (1.0 + bounded / 5.0 * (1.0 + bounded / 6.0 * rest))
    series = 0.5 * bounded * bounded * (1.0 + bounded / 3.0 * rest)
    return where((x > -0.05) & (x < 0.05), series, exp(bounded) - bounded - 1.0)


def times(factor, value):  # type: ignore[no-untyped-def]
    """factor·value, and 0 where the factor is: also for a label at −inf, or a product that has overflowed."""
    return where(factor == 0.0, 0.0, factor * value)


def clipped_objective(ratio, advantages, epsilon_low, epsilon_high, delta):  # type: ignore[no-untyped-def]
    """−min(rA, clip(r)·A) with the two-sided bound δ where A < 0, and d/d log r."""
    low = 1.0 - epsilon_low
    high = 1.0 + epsilon_high
    bounded = where(advantages < 0.0, minimum(ratio, delta), ratio)
    clipped = minimum(maximum(ratio, low), high)
    # The branch is chosen before the product: r may be huge where A is 0.
    chosen = where(advantages < 0.0, maximum(bounded, clipped), minimum(ratio, clipped))
    cut_high = (advantages > 0.0) & (ratio > high)
    cut_low = (advantages < 0.0) & (ratio < low)
    cut_delta = (advantages < 0.0) & (ratio > delta)
    slope = where(cut_high | cut_low | cut_delta, 0.0, ratio)
    return -chosen * advantages, -slope * advantages


def grpo_clip(  # type: ignore[no-untyped-def]
    logprob, old_logprobs, advantages, importance_weights, epsilon_low, epsilon_high, delta
):
    ratio = ratio_of(logprob - old_logprobs)
    value, slope = clipped_objective(ratio, advantages, epsilon_low, epsilon_high, delta)
    return times(importance_weights, value), times(importance_weights, slope)


def grpo_cispo(  # type: ignore[no-untyped-def]
    logprob, old_logprobs, advantages, importance_weights, epsilon_low, epsilon_high
):
    ratio = ratio_of(logprob - old_logprobs)
    clipped = minimum(maximum(ratio, 1.0 - epsilon_low), 1.0 + epsilon_high)
    slope = -importance_weights * clipped * advantages
    return times(slope, logprob), slope


def grpo_sapo(logprob, old_logprobs, advantages, importance_weights, tau_pos, tau_neg):  # type: ignore[no-untyped-def]
    ratio = ratio_of(logprob - old_logprobs)
    tau = where(advantages > 0.0, tau_pos, tau_neg)
    gate = sigmoid(tau * (ratio - 1.0))
    value = -(4.0 / tau) * gate * advantages
    # 1 − σ(z) is σ(−z): no cancellation, and exactly 0 before the ratio can overflow the product.
    slope = -advantages * (4.0 * gate * sigmoid(tau * (1.0 - ratio))) * ratio
    return times(importance_weights, value), times(importance_weights, slope)


def grpo_reinforce(logprob, advantages, importance_weights):  # type: ignore[no-untyped-def]
    slope = -importance_weights * advantages
    return times(slope, logprob), slope


def kl_k1(logprob, ref_logprobs, beta):  # type: ignore[no-untyped-def]
    return beta * (logprob - ref_logprobs), beta


def kl_k2(logprob, ref_logprobs, beta):  # type: ignore[no-untyped-def]
    log_ratio = ref_logprobs - logprob
    return beta * (0.5 * log_ratio * log_ratio), -beta * log_ratio


def kl_k3(logprob, ref_logprobs, beta):  # type: ignore[no-untyped-def]
    log_ratio = ref_logprobs - logprob
    return beta * exp_minus_linear(log_ratio), beta * (1.0 - ratio_of(log_ratio))


def gspo_clip(  # type: ignore[no-untyped-def]
    log_ratio_mean, advantages_mean, importance_weights_mean, epsilon_low, epsilon_high
):
    ratio = ratio_of(log_ratio_mean)
    value, slope = clipped_objective(ratio, advantages_mean, epsilon_low, epsilon_high, NO_DELTA)
    return times(importance_weights_mean, value), times(importance_weights_mean, slope)


def ratio_measure(log_ratio, advantages, epsilon_low, epsilon_high):  # type: ignore[no-untyped-def]
    """ratio, its square, KL(new‖old) estimate, and whether the ratio left the band."""
    ratio = ratio_of(log_ratio)
    low = where(ratio < 1.0 - epsilon_low, 1.0, 0.0)
    high = where(ratio > 1.0 + epsilon_high, 1.0, 0.0)
    return (
        ratio,
        ratio * ratio,
        exp_minus_linear(log_ratio),
        low + high,
        where(advantages < 0.0, low, 0.0),
        where(advantages > 0.0, high, 0.0),
    )


def token_ratio_measure(logprob, old_logprobs, advantages, epsilon_low, epsilon_high):  # type: ignore[no-untyped-def]
    return ratio_measure(logprob - old_logprobs, advantages, epsilon_low, epsilon_high)


def sequence_ratio_measure(  # type: ignore[no-untyped-def]
    carried_log_ratio_mean, carried_advantages_mean, epsilon_low, epsilon_high
):
    return ratio_measure(carried_log_ratio_mean, carried_advantages_mean, epsilon_low, epsilon_high)


def same(value):  # type: ignore[no-untyped-def]
    return (value,)


OBJECTIVES = {
    "clip": Term(grpo_clip),
    "cispo": Term(grpo_cispo),
    "sapo": Term(grpo_sapo),
    "reinforce": Term(grpo_reinforce),
}
GSPO_CLIP = Term(gspo_clip)
ESTIMATORS = {"k1": Term(kl_k1), "k2": Term(kl_k2), "k3": Term(kl_k3)}

_NEW_LOGPROBS = Measure(same, {"value": "logprob"})
_OLD_LOGPROBS = Measure(same, {"value": "old_logprobs"})
_ADVANTAGES = Measure(same, {"value": "advantages"})
_SEQUENCE_ADVANTAGES = Measure(same, {"value": "carried_advantages_mean"})
_ENTROPY = Measure(same, {"value": "entropy"})
_TOKEN_RATIO = Measure(token_ratio_measure)
_SEQUENCE_RATIO = Measure(sequence_ratio_measure)
_KL_REF = {name: Measure(term.function) for name, term in ESTIMATORS.items()}
_RATIO_OUTPUTS = (
    Output(
        (
            ("ratio_new_old", "mean"),
            ("ratio_new_old_min", "min"),
            ("ratio_new_old_max", "max"),
            ("ratio_new_old_sum", "sum"),
        )
    ),
    Output((("ratio_new_old_squared_sum", "sum"),)),
    Output((("kl_new_old", "mean"),)),
    Output((("clipped_ratio_fraction", "mean"),)),
    Output((("clip_low_fraction", "mean"),)),
    Output((("clip_high_fraction", "mean"),)),
)
_ADVANTAGE_OUTPUTS = (Output((("advantage", "mean"), ("advantage_min", "min"), ("advantage_max", "max"))),)
METRICS = ("auto", "basic", "none")


def _mean_of(name: str) -> tuple[Output, ...]:
    return (Output(((name, "mean"),)),)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Loss):
    """What GRPO and GSPO share: the clip band, the KL to a reference, and the metrics."""

    metric_names: ClassVar[tuple[str, ...]] = (
        "new_logprobs",
        "old_logprobs",
        *(name for output in _RATIO_OUTPUTS for name, _ in output.metrics),
        *(name for output in _ADVANTAGE_OUTPUTS for name, _ in output.metrics),
        "kl_ref",
        "entropy",
        "num_tokens",
        "num_segments",
    )

    epsilon_low: Number = number(0.2, "the ratio's band begins at 1 − ε_low", minimum=0.0, maximum=1.0)
    epsilon_high: Number = number(0.2, "the ratio's band ends at 1 + ε_high", minimum=0.0)
    beta: Number = number(0.0, "factor of the KL to the reference policy", minimum=0.0)
    kl_estimator: str = choice("k3", "the estimator of that KL", tuple(ESTIMATORS))
    metrics: str = choice("auto", "auto: all that the inputs allow; basic: all but entropy; none", METRICS)
    reference_model: str | None = text(
        None, "the name of the reference where `ref_logprobs` is a mapping", optional=True
    )

    @property
    def reference(self) -> str | None:
        return self.reference_model

    def kl_parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        if is_zero(self.beta):
            return ()
        return (Part(ESTIMATORS[self.kl_estimator], {"beta": self.beta}),)

    def measurements(self, given: frozenset[str]) -> tuple[Measurement, ...]:
        if self.metrics == "none":
            return ()
        found = [Measurement(_NEW_LOGPROBS, {}, _mean_of("new_logprobs"))]
        missing = {"old_logprobs", "advantages"} - given
        if self.metrics == "basic" and missing:
            raise ValueError(
                f"{', '.join(sorted(missing))}: metrics='basic' of a {self.type} loss needs it, none was given; "
                f"metrics='auto' reports what the inputs allow"
            )
        if not missing:
            band = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
            found.append(Measurement(_OLD_LOGPROBS, {}, _mean_of("old_logprobs")))
            found.append(Measurement(self.ratio_measure, band, _RATIO_OUTPUTS))
        if "advantages" in given:
            found.append(Measurement(self.advantage_measure, {}, _ADVANTAGE_OUTPUTS))
        if "ref_logprobs" in given:
            outputs = (*_mean_of("kl_ref"), Output(()))
            found.append(Measurement(_KL_REF[self.kl_estimator], {"beta": 1.0}, outputs))
        if self.metrics == "auto":
            found.append(Measurement(_ENTROPY, {}, _mean_of("entropy")))
        return tuple(found)

    def counts(self, given: frozenset[str]) -> tuple[str, ...]:
        if self.metrics == "none":
            return ()
        return ("num_tokens", "num_segments") if "segment_ids" in given else ("num_tokens",)

    ratio_measure: ClassVar[Measure] = _TOKEN_RATIO
    advantage_measure: ClassVar[Measure] = _ADVANTAGES


@register("grpo")
@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyLoss):
    """Group-relative policy optimisation per token, with r = exp(log p_label − old_logprob) and advantage A.

    ``clip`` −min(rA, clip(r, 1−ε_low, 1+ε_high)·A) (Shao et al., 2024, arXiv:2402.03300; asymmetric: DAPO,
    arXiv:2503.14476), with ``delta`` the upper bound of r where A < 0 (dual clip, arXiv:1912.09729); ``cispo``
    −sg(clip(r))·A·log p (arXiv:2506.13585); ``sapo`` −(4/τ)·σ(τ(r−1))·A (arXiv:2511.20347); ``reinforce`` −A·log p.
    ``importance_weights`` multiply the policy part; ``beta`` adds a KL to the reference policy. exp is taken of
    min(·, 80).

    >>> GRPO(epsilon_high=0.28).objective
    'clip'
    """

    only_with: ClassVar[tuple[OnlyWith, ...]] = (*Loss.only_with, OnlyWith("delta", "objective", "clip"))

    objective: str = choice("clip", "which surrogate", tuple(OBJECTIVES))
    delta: Number = number(None, "upper bound of the ratio where A < 0", above=0.0, optional=True)
    tau_pos: Number = number(1.0, "gate temperature of `sapo` where A > 0", above=0.0)
    tau_neg: Number = number(1.05, "gate temperature of `sapo` elsewhere", above=0.0)

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        band = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
        values: dict[str, Number] = {}
        if self.objective == "clip":
            values = {**band, "delta": NO_DELTA if self.delta is None else self.delta}
        elif self.objective == "cispo":
            values = band
        elif self.objective == "sapo":
            values = {"tau_pos": self.tau_pos, "tau_neg": self.tau_neg}
        return (Part(OBJECTIVES[self.objective], values), *self.kl_parts(given))


@register("gspo")
@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyLoss):
    """Sequence-level GRPO: s = exp(mean over the sequence of log p − old_logprob), −min(sA, clip(s)·A).

    A is the sequence's mean advantage; every token carries its sequence's value, so the reductions mean what
    they mean for tokens (Zheng et al., 2025, arXiv:2507.18071). Needs ``segment_ids``.

    >>> GSPO(epsilon_low=3e-4, epsilon_high=4e-4).kl_estimator
    'k3'
    """

    ratio_measure: ClassVar[Measure] = _SEQUENCE_RATIO
    advantage_measure: ClassVar[Measure] = _SEQUENCE_ADVANTAGES

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        band = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
        return (Part(GSPO_CLIP, band), *self.kl_parts(given))
