"""z-loss: keeps the softmax's normaliser near one."""

from __future__ import annotations

from dataclasses import dataclass

from duohead.loss import Loss, Part, register
from duohead.term import Term


def z_loss(lse):  # type: ignore[no-untyped-def]
    return lse * lse, 2.0 * lse


Z_LOSS = Term(z_loss)


@register("z_loss")
@dataclass(frozen=True, kw_only=True)
class ZLoss(Loss):
    """z-loss, (log Σ_j e^x_j)², in nats² (Chowdhery et al., 2022, arXiv:2204.02311).

    >>> ZLoss(weight=1e-4).weight
    0.0001
    """

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        return (Part(Z_LOSS, {}),)
