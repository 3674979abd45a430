"""Cross-entropy with a label, plain or smoothed."""

from __future__ import annotations

from dataclasses import dataclass

from duohead.fields import Number, number
from duohead.loss import Loss, Part, register
from duohead.term import Term


def cross_entropy(logprob):  # type: ignore[no-untyped-def]
    return -logprob, -1.0


def smoothed_cross_entropy(logprob, mean_logprob, label_smoothing):  # type: ignore[no-untyped-def]
    kept = 1.0 - label_smoothing
    return -(kept * logprob + label_smoothing * mean_logprob), -kept, -label_smoothing


CROSS_ENTROPY = Term(cross_entropy)
SMOOTHED_CROSS_ENTROPY = Term(smoothed_cross_entropy)


def is_zero(value: Number) -> bool:
    """Whether a hyperparameter is a plain Python zero: then what it multiplies is left out of the program."""
    return isinstance(value, (int, float)) and value == 0


@register("label")
@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """Cross-entropy, −[(1−ε)·log p_label + ε·mean_j log p_j], in nats.

    The smoothing mass goes uniformly to all V columns (Szegedy et al., 2016, arXiv:1512.00567); a column at
    −inf adds nothing.

    >>> CrossEntropy(label_smoothing=0.1).label_smoothing
    0.1
    """

    label_smoothing: Number = number(0.0, "ε, the share spread over all columns", minimum=0.0, below=1.0)

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        if is_zero(self.label_smoothing):
            return (Part(CROSS_ENTROPY, {}),)
        return (Part(SMOOTHED_CROSS_ENTROPY, {"label_smoothing": self.label_smoothing}),)
