"""The entropy of the head's distribution, as a loss or (with a negative weight) a bonus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from duohead.loss import Loss, Part, register
from duohead.term import Term


def entropy_loss(entropy):  # type: ignore[no-untyped-def]
    return entropy, 1.0


ENTROPY = Term(entropy_loss)


@register("entropy")
@dataclass(frozen=True, kw_only=True)
class EntropyLoss(Loss):
    """Entropy H = −Σ_j p_j log p_j, in nats; a negative weight makes it an exploration bonus.

    >>> EntropyLoss(weight=-0.01).weight
    -0.01
    """

    negative_weight: ClassVar[bool] = True

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        return (Part(ENTROPY, {}),)
