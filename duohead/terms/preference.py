"""Preference losses over pairs of sequences (DPO, SimPO, ORPO) and over single ones (KTO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from duohead.fields import Number, choice, number, text
from duohead.loss import Loss, Measurement, Output, Part, register
from duohead.namespace import exp, log, maximum, minimum, sigmoid, where
from duohead.term import Measure, Term


def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + e^x) without overflow: −log σ(h) = softplus(−h)."""
    small = exp(minimum(x, -x))
    # log(1 + small) to the last place (Kahan): what 1 + small loses, log of it and the division lose alike.
    one = 1.0 + small
    lost = where(one == 1.0, 1.0, log(one) / where(one == 1.0, 1.0, one - 1.0))
    return maximum(x, 0.0) + small * lost


def sigmoid_loss(h):  # type: ignore[no-untyped-def]
    return softplus(-h), -sigmoid(-h)


def hinge_loss(h):  # type: ignore[no-untyped-def]
    return maximum(1.0 - h, 0.0), where(h < 1.0, -1.0, 0.0)


def smoothed(kept, flipped, label_smoothing):  # type: ignore[no-untyped-def]
    """(1 − ε)·kept + ε·flipped; with ε = 0 an infinite other side adds nothing."""
    return (1.0 - label_smoothing) * kept + where(label_smoothing > 0.0, label_smoothing * flipped, 0.0)


def dpo_sigmoid(chosen, rejected, beta, label_smoothing):  # type: ignore[no-untyped-def]
    h = beta * (chosen - rejected)
    kept, slope = sigmoid_loss(h)
    flipped, flipped_slope = sigmoid_loss(-h)
    slope = beta * smoothed(slope, -flipped_slope, label_smoothing)
    return smoothed(kept, flipped, label_smoothing), slope, -slope


def dpo_hinge(chosen, rejected, beta, label_smoothing):  # type: ignore[no-untyped-def]
    h = beta * (chosen - rejected)
    kept, slope = hinge_loss(h)
    flipped, flipped_slope = hinge_loss(-h)
    slope = beta * smoothed(slope, -flipped_slope, label_smoothing)
    return smoothed(kept, flipped, label_smoothing), slope, -slope


def dpo_ipo(chosen, rejected, beta, label_smoothing):  # type: ignore[no-untyped-def]
    difference = chosen - rejected
    target = 0.5 / beta
    kept = difference - target
    flipped = -difference - target
    slope = 2.0 * smoothed(kept, -flipped, label_smoothing)
    return smoothed(kept * kept, flipped * flipped, label_smoothing), slope, -slope


def simpo(chosen_logprob_mean, rejected_logprob_mean, beta, margin):  # type: ignore[no-untyped-def]
    value, slope = sigmoid_loss(beta * (chosen_logprob_mean - rejected_logprob_mean) - margin)
    return value, beta * slope, -beta * slope


#: a mean log-probability of 0 has infinite odds
MAX_MEAN_LOGPROB = -1e-7


def log_odds(mean_logprob_of_sequence):  # type: ignore[no-untyped-def]
    mean = minimum(mean_logprob_of_sequence, MAX_MEAN_LOGPROB)
    # 1 − e^m to the last place (Kahan): e^m loses near m = 0 what log of it loses too, and the quotient does not.
    power = exp(mean)
    near = (power > 0.5) & (power < 1.0)
    lost = where(near, mean / where(near, log(where(near, power, 0.5)), 1.0), 1.0)
    complement = where(power == 1.0, -mean, (1.0 - power) * lost)
    return mean - log(complement), 1.0 / complement


def orpo(chosen_logprob_mean, rejected_logprob_mean, beta):  # type: ignore[no-untyped-def]
    chosen_odds, chosen_slope = log_odds(chosen_logprob_mean)
    rejected_odds, rejected_slope = log_odds(rejected_logprob_mean)
    value, slope = sigmoid_loss(chosen_odds - rejected_odds)
    value = beta * value - chosen_logprob_mean
    return value, beta * slope * chosen_slope - 1.0, -beta * slope * rejected_slope


def kto(  # type: ignore[no-untyped-def]
    reward, advantages_mean, beta, desirable_weight, undesirable_weight, reference_point
):
    # NaN is neither, and must not count as a sequence that is neither.
    sign = where(advantages_mean > 0.0, 1.0, where(advantages_mean < 0.0, -1.0, advantages_mean))
    weight = where(sign > 0.0, desirable_weight, where(sign < 0.0, undesirable_weight, sign))
    # A sequence that is neither has no reward to speak of, whatever its log-probability.
    z = where(sign == 0.0, 0.0, beta * sign * (reward - reference_point))
    # 1 − σ(z) is σ(−z)
    return weight * sigmoid(-z), -weight * beta * sign * sigmoid(z) * sigmoid(-z)


def reward_measure(chosen, rejected, beta):  # type: ignore[no-untyped-def]
    return (
        beta * chosen,
        beta * rejected,
        beta * (chosen - rejected),
        where(chosen > rejected, 1.0, 0.0),
    )


def kto_measure(reward, advantages_mean, beta):  # type: ignore[no-untyped-def]
    desirable = where(advantages_mean > 0.0, 1.0, 0.0)
    undesirable = where(advantages_mean < 0.0, 1.0, 0.0)
    return beta * reward, desirable, beta * reward, undesirable


def _of(quantity: str) -> dict[str, str]:
    return {"chosen": f"chosen_{quantity}", "rejected": f"rejected_{quantity}"}


_LOSSES = {"sigmoid": dpo_sigmoid, "hinge": dpo_hinge, "ipo": dpo_ipo}
#: (loss type, is there a reference?) → term; IPO compares token means, the others sums
_DPO = {
    (name, with_reference): Term(
        function,
        _of(("ref_log_ratio" if with_reference else "logprob") + ("_mean" if name == "ipo" else "_sum")),
    )
    for name, function in _LOSSES.items()
    for with_reference in (True, False)
}
_DPO_REWARD = {
    with_reference: Measure(reward_measure, _of("ref_log_ratio_sum" if with_reference else "logprob_sum"))
    for with_reference in (True, False)
}
_MEAN_REWARD = Measure(reward_measure, _of("logprob_mean"))
_SIMPO = Term(simpo)
_ORPO = Term(orpo)
_KTO = {
    with_reference: Term(kto, {"reward": "ref_log_ratio_sum" if with_reference else "logprob_sum"})
    for with_reference in (True, False)
}
_KTO_REWARD = {
    with_reference: Measure(kto_measure, {"reward": "ref_log_ratio_sum" if with_reference else "logprob_sum"})
    for with_reference in (True, False)
}
_KTO_OUTPUTS = (
    Output((("rewards_chosen", "mean"),), weight=1),
    Output(()),
    Output((("rewards_rejected", "mean"),), weight=3),
    Output(()),
)
#: a pair, or a sequence that counts once, has no tokens to weight: its `token_mean` is a mean over pairs or sequences
PAIR_REDUCTIONS = ("token_mean", "sum", "constant")
PAIR_REDUCTION = "how pairs become one scalar: token_mean is the mean over pairs"
SEQUENCE_REDUCTIONS = ("token_mean", "sum", "sequence_mean_token_mean", "constant")
SEQUENCE_REDUCTION = (
    "how sequences become one scalar: token_mean is, like sequence_mean_token_mean, the mean over sequences"
)
_REWARDS = ("rewards_chosen", "rewards_rejected", "margin", "accuracy")
_REWARD_OUTPUTS = tuple(Output(((name, "mean"),)) for name in _REWARDS)


@dataclass(frozen=True, kw_only=True)
class PairLoss(Loss):
    """A mean over preference pairs; ``token_mean`` means the mean over pairs, ``sum`` their sum."""

    metric_names: ClassVar[tuple[str, ...]] = _REWARDS

    reduction: str = choice("token_mean", PAIR_REDUCTION, PAIR_REDUCTIONS)


@register("dpo")
@dataclass(frozen=True, kw_only=True)
class DPO(PairLoss):
    """Direct preference optimisation over pairs, h = β[(Σ_chosen log p − ref) − (Σ_rejected log p − ref)].

    ``sigmoid`` −log σ(h) (Rafailov et al., 2023, arXiv:2305.18290), ``hinge`` max(0, 1 − h) (SLiC), ``ipo``
    (h/β − 1/(2β))² on token means (Azar et al., 2023, arXiv:2310.12036); ``label_smoothing`` ε gives
    (1−ε)·L(h) + ε·L(−h) (cDPO). Reference-free where no ``ref_logprobs`` are given. Needs ``segment_ids`` and
    ``preference_pairs``.

    >>> DPO(beta=0.3).loss_type
    'sigmoid'
    """

    loss_type: str = choice("sigmoid", "which loss of h", tuple(_LOSSES))
    beta: Number = number(0.1, "β, the inverse temperature of the implicit reward", above=0.0)
    label_smoothing: Number = number(0.0, "ε, the share of flipped preferences", minimum=0.0, maximum=0.5)
    reference_model: str | None = text(
        None, "the name of the reference where `ref_logprobs` is a mapping", optional=True
    )

    @property
    def reference(self) -> str | None:
        return self.reference_model

    def _with_reference(self, given: frozenset[str]) -> bool:
        return "ref_logprobs" in given or self.reference_model is not None

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        values = {"beta": self.beta, "label_smoothing": self.label_smoothing}
        return (Part(_DPO[self.loss_type, self._with_reference(given)], values),)

    def measurements(self, given: frozenset[str]) -> tuple[Measurement, ...]:
        return (Measurement(_DPO_REWARD[self._with_reference(given)], {"beta": self.beta}, _REWARD_OUTPUTS),)


@register("simpo")
@dataclass(frozen=True, kw_only=True)
class SimPO(PairLoss):
    """−log σ(β(mean_chosen log p − mean_rejected log p) − γ) (Meng et al., 2024, arXiv:2405.14734).

    >>> SimPO(margin=0.0).beta
    2.0
    """

    beta: Number = number(2.0, "β, the scale of the mean log-probabilities", above=0.0)
    margin: Number = number(0.5, "γ, the target margin", minimum=0.0)

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        return (Part(_SIMPO, {"beta": self.beta, "margin": self.margin}),)

    def measurements(self, given: frozenset[str]) -> tuple[Measurement, ...]:
        return (Measurement(_MEAN_REWARD, {"beta": self.beta}, _REWARD_OUTPUTS),)


@register("orpo")
@dataclass(frozen=True, kw_only=True)
class ORPO(PairLoss):
    """−mean_chosen log p + β·(−log σ(log odds_chosen − log odds_rejected)) (Hong et al., 2024, arXiv:2403.07691).

    odds = P/(1 − P) of the sequence's mean-token probability P = exp(mean log p); β is the paper's λ, and the
    first term its supervised loss on the chosen sequence.

    >>> ORPO().beta
    0.1
    """

    beta: Number = number(0.1, "β, the factor of the odds-ratio term (the paper's λ)", minimum=0.0)

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        return (Part(_ORPO, {"beta": self.beta}),)

    def measurements(self, given: frozenset[str]) -> tuple[Measurement, ...]:
        return (Measurement(_MEAN_REWARD, {"beta": self.beta}, _REWARD_OUTPUTS),)


@register("kto")
@dataclass(frozen=True, kw_only=True)
class KTO(Loss):
    """Kahneman-Tversky optimisation over single sequences (Ethayarajh et al., 2024, arXiv:2402.01306).

    With reward r = Σ log p − ref, weight·(1 − σ(±β(r − z₀))): plus for a desirable sequence (advantage > 0), minus
    for an undesirable one (advantage < 0). z₀, ``reference_point``, is the paper's detached KL estimate: a runtime
    value, because an estimate from the sequences at hand would differ between micro-batches.

    ``rewards_chosen`` and ``rewards_rejected`` are the mean rewards of the desirable and of the undesirable sequences;
    their margin is no mean over anything, so it is left to the reader of the two.

    >>> KTO(beta=0.2).reference_point
    0.0
    """

    metric_names: ClassVar[tuple[str, ...]] = ("rewards_chosen", "rewards_rejected")
    carried_by_tokens: ClassVar[bool] = False

    reduction: str = choice("token_mean", SEQUENCE_REDUCTION, SEQUENCE_REDUCTIONS)
    beta: Number = number(0.1, "β, the inverse temperature of the implicit reward", above=0.0)
    desirable_weight: Number = number(1.0, "λ_D", minimum=0.0)
    undesirable_weight: Number = number(1.0, "λ_U", minimum=0.0)
    reference_point: Number = number(0.0, "z₀, in nats", minimum=0.0)
    reference_model: str | None = text(
        None, "the name of the reference where `ref_logprobs` is a mapping", optional=True
    )

    @property
    def reference(self) -> str | None:
        return self.reference_model

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        values = {
            "beta": self.beta,
            "desirable_weight": self.desirable_weight,
            "undesirable_weight": self.undesirable_weight,
            "reference_point": self.reference_point,
        }
        return (Part(_KTO[self._with_reference(given)], values),)

    def measurements(self, given: frozenset[str]) -> tuple[Measurement, ...]:
        return (Measurement(_KTO_REWARD[self._with_reference(given)], {"beta": self.beta}, _KTO_OUTPUTS),)

    def _with_reference(self, given: frozenset[str]) -> bool:
        return "ref_logprobs" in given or self.reference_model is not None
