"""Cotangents of the statistics → the few coefficients per row from which the gradient is written (MATH §3).

    dL/dx_j = p_j·(A + B·log p_j + Σ C·log q_j) − Σ D·q_j − E·δ_{j,label} − U  (+ the JSD's p_j·(r_j − R)·J)

Restricted style: the same functions run in the kernel.
"""

from __future__ import annotations

from duohead.namespace import where
from duohead.term import Bound


def fold_softmax(  # type: ignore[no-untyped-def]
    d_logprob, d_lse, d_entropy, d_mean_logprob, entropy, share, inverse_vocab
):
    """(A, B, E, U) of one softmax; ``share`` is the share of its columns above −inf, over which the mean goes."""
    a = d_lse - d_logprob - d_entropy * entropy - d_mean_logprob * share
    return a, -d_entropy, -d_logprob, -d_mean_logprob * inverse_vocab


def fold_pairing(d_teacher_cross_entropy, d_forward_kl, d_reverse_kl, reverse_kl):  # type: ignore[no-untyped-def]
    """(A, B, C, D) that one pairing adds; Q = Σ q is 1 for a softmax."""
    d = d_teacher_cross_entropy + d_forward_kl
    # An infinite KL whose loss has no weight adds nothing.
    shift = where(d_reverse_kl == 0.0, 0.0, d_reverse_kl * reverse_kl)
    return d - shift, d_reverse_kl, -d_reverse_kl, d


FOLD_SOFTMAX = Bound(fold_softmax)
FOLD_PAIRING = Bound(fold_pairing)
