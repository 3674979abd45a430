"""Restricted functions bound to Triton, and the few helpers that every kernel uses."""
# A kernel's parameters carry no annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from triton import knobs

from duohead.bind import bind
from duohead.term import Bound

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: the lowest finite float32: where a running maximum begins
LOWEST = tl.constexpr(-3.4028234663852886e38)
#: 2 to this is exactly 0, and times 0 it is 0: what −∞ is raised to before a product
FLOOR = tl.constexpr(-10000.0)
INFINITY = tl.constexpr(float("inf"))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1)."""
    return bool(knobs.runtime.interpret)


# Terms call these instead of tl's own: the interpreter replaces what it finds in tl, not what was taken from it.


@triton.jit
def exp(x):
    """e^x."""
    return tl.exp(x)


@triton.jit
def log(x):
    """log x."""
    return tl.log(x)


@triton.jit
def sqrt(x):
    """√x."""
    return tl.sqrt(x)


@triton.jit
def absolute(x):
    """|x|."""
    return tl.abs(x)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^−x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def where(condition, a, b):
    """a where the condition holds, else b."""
    return tl.where(condition, a, b)


@triton.jit
def nan_minimum(a, b):
    """The smaller of two, NaN where either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_maximum(a, b):
    """The larger of two, NaN where either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


if interpreted():

    @triton.jit
    def exp2(x):
        """2^x."""
        return tl.exp2(x)

    @triton.jit
    def prefetch(pointer, count, SIZE: tl.constexpr):
        """Nothing: there is no cache to fetch into."""

else:

    @triton.jit
    def exp2(x):
        """2^x, with results below the smallest normal number as 0."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def prefetch(pointer, count, SIZE: tl.constexpr):
        """One thread asks for ``count`` elements of SIZE bytes in L2, multiples of 16 bytes (sm_90)."""
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
            " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [pointer.to(tl.int64), count * SIZE],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def tanh(x):
    """tanh, with the series near 0, where (1 − e^−2x) / (1 + e^−2x) would cancel."""
    square = x * x
    series = x * (
        1.0 + square * (-0.3333333333 + square * (0.1333333333 + square * (-0.0539682540 + square * 0.0218694885)))
    )
    size = tl.abs(x)
    small = exp2(size * -2.8853900817779268)
    far = (1.0 - small) / (1.0 + small)
    return tl.where(size < 0.2, series, tl.where(x < 0.0, -far, far))


@triton.jit
def inverse(count):
    """1 / count, and 0 for a count of 0."""
    some = count != 0.0
    return tl.where(some, 1.0 / tl.where(some, count, 1.0), 0.0)


@triton.jit
def log_mixture(beta, log_q_over_p):
    """(log p/M, log q/M) with M = βq + (1 − β)p, without over- or underflow."""
    below = -tl.log((1.0 - beta) + beta * tl.exp(tl.minimum(log_q_over_p, 0.0)))
    above = -tl.log(beta + (1.0 - beta) * tl.exp(tl.minimum(-log_q_over_p, 0.0)))
    is_below = log_q_over_p <= 0.0
    return tl.where(is_below, below, above - log_q_over_p), tl.where(is_below, below + log_q_over_p, above)


#: what terms call
TERM_NAMES = {
    "exp": exp,
    "log": log,
    "where": where,
    "minimum": nan_minimum,
    "maximum": nan_maximum,
    "abs": absolute,
    "sqrt": sqrt,
    "sigmoid": sigmoid,
}

#: what the generated source calls
KERNEL_NAMES: dict[str, Any] = {
    "tl": tl,
    "LOG2E": LOG2E,
    "LN2": LN2,
    "LOWEST": LOWEST,
    "FLOOR": FLOOR,
    "INFINITY": INFINITY,
    "exp2": exp2,
    "prefetch": prefetch,
    "tanh": tanh,
    "inverse": inverse,
    "log_mixture": log_mixture,
}


@functools.lru_cache(maxsize=1024)
def bound(item: Bound) -> Any:
    """The function of a term, measure or fold as a Triton function, to be inlined in a kernel."""
    return bind(item.function, TERM_NAMES, wrap_function=triton.jit, wrap_constant=tl.constexpr, extra={"tl": tl})
