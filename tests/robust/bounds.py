"""The tolerance of a comparison, derived: the oracle run on numbers that carry a bound of their rounding error.

Running error analysis (Wilkinson; Higham, Accuracy and Stability of Numerical Algorithms, §3.3). ``duohead.reference``
is loaded a second time with ``np``, ``math``, ``float``, ``min`` and ``max`` replaced, so that every number in it is a
value with a bound: how far the same formula may end from the truth when each of its operations rounds to the
precision under test. Nothing of the code under test takes part, so a worse formula there does not widen its tolerance.

What a bound counts for each operation:

* ``UNITS`` units in the last place of its result: one for the rounding, the rest for exp, log and tanh of the
  libraries (up to 4) and for an equal formula with a few more steps on operands of the same size;
* the bounds of its operands, carried through exactly (not to first order);
* a sum of n numbers: n units of the sum of their absolute values, whatever its order, also where the oracle's own
  order is a lucky one (1e4 − 1e4 + 0.3);
* one more unit of p for the label's derivative, because MATH §3 sums a row's cotangents before p multiplies them;
* the smallest normal number, because some back ends flush what is below it to zero;
* nothing, where the operands are exact and the result is representable: e.g. x − max x of two logits of 1e8.

A bound is infinite where a value leaves the range of the dtype. ``Trace.uncertain`` says that a comparison (a clip
edge, a sign) falls within the bounds: then the gradient may truly be either of two.
"""

from __future__ import annotations

import builtins
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import duohead.reference

UNITS = 4.0


class Precision(NamedTuple):
    """A compute dtype: half an ulp of 1, the smallest normal number and the largest."""

    unit: float
    tiny: float
    largest: float
    dtype: Any


PRECISIONS = {
    name: Precision(float(np.finfo(dtype).eps) / 2, float(np.finfo(dtype).tiny), float(np.finfo(dtype).max), dtype)
    for name, dtype in (("float32", np.float32), ("float64", np.float64))
}


class Trace:
    """What one run of the oracle found out beside its numbers."""

    precision = PRECISIONS["float32"]
    uncertain = False
    uncertain_metrics = False
    #: some probability was below the smallest normal number: it may or may not have been flushed to zero
    flushed = False


def _times(a: Any, b: Any) -> Any:
    """a·b with 0·inf = 0: an exact zero has no error."""
    return np.where((a == 0) | (b == 0), 0.0, a * b)


def _representable(value: Any) -> Any:
    precision = Trace.precision
    if precision.dtype == np.float64:
        return np.ones(np.shape(value), bool)
    same = np.asarray(value).astype(np.float32).astype(np.float64) == value
    return same & ((value == 0) | (np.abs(value) >= precision.tiny))


def _sum_is_exact(a: Any, b: Any, total: Any) -> Any:
    """Knuth's TwoSum: whether a + b lost nothing in float64."""
    part = total - a
    return ((a - (total - part)) + (b - part)) == 0


def _power_of_two(value: Any) -> Any:
    return np.abs(np.frexp(value)[0]) == 0.5


def _product_is_exact(a: Any, b: Any) -> Any:
    trivial = (a == 0) | (b == 0) | _power_of_two(a) | _power_of_two(b)
    if Trace.precision.dtype == np.float64:
        return trivial
    return trivial | (_representable(a) & _representable(b))  # 24 + 24 bits fit in float64


class Bounded:
    """An array or scalar with an absolute error bound for each element."""

    __array_priority__ = 100.0
    __array_ufunc__ = None

    def __init__(self, value: Any, error: Any) -> None:
        self.value = np.asarray(value, np.float64)
        error = np.broadcast_to(np.asarray(error, np.float64), self.value.shape)
        self.error = np.where(np.isnan(error), np.inf, error)
        #: of a running sum: how many numbers it has, and the sum of their absolute values
        self.count = np.where(self.value == 0, 0, 1)
        self.mass = np.abs(self.value)

    # --- array protocol

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: Any) -> Bounded:
        return Bounded(self.value[index], self.error[index])

    def __setitem__(self, index: Any, item: Any) -> None:
        item = bounded(item)
        self.value[index], self.error[index] = item.value, item.error

    def astype(self, dtype: Any) -> Bounded:
        return Bounded(self.value.copy(), self.error)

    def reshape(self, *shape: Any) -> Bounded:
        return Bounded(self.value.reshape(*shape), self.error.reshape(*shape))

    def copy(self) -> Bounded:
        return Bounded(self.value.copy(), self.error.copy())

    def sum(self) -> Bounded:
        if self.value.size == 0:
            return Bounded(0.0, 0.0)
        if self.value.size == 1:
            return self.reshape(-1)[0]
        total = self.value.sum()
        some = np.count_nonzero(self.value)
        lost = max(some - 1, 0) * Trace.precision.unit * np.abs(self.value).sum() if np.isfinite(total) else 0.0
        return _in_range(Bounded(total, self.error.sum() + lost))

    def max(self) -> Bounded:
        return Bounded(self.value.max(), self.error.max())

    # --- arithmetic

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.error)

    def __add__(self, other: Any) -> Bounded:
        other = bounded(other)
        total = self.value + other.value
        exact = (self.error == 0) & (other.error == 0) & _sum_is_exact(self.value, other.value, total)
        untouched = (self.value == 0) & (self.error == 0) | (other.value == 0) & (other.error == 0)
        return _rounded(total, self.error + other.error, exact | untouched, untouched)

    __radd__ = __add__

    def __iadd__(self, other: Any) -> Bounded:
        """One more number of a sum: from the third on, a bound that holds in whatever order they are added."""
        other = bounded(other)
        total = self + other
        total.count, total.mass = self.count + other.count, self.mass + other.mass
        any_order = self.error + other.error + Trace.precision.unit * total.mass
        total.error = np.where(total.count > 2, np.fmax(total.error, any_order), total.error)
        return total

    def __sub__(self, other: Any) -> Bounded:
        return self + (-bounded(other))

    def __rsub__(self, other: Any) -> Bounded:
        return bounded(other) + (-self)

    def __mul__(self, other: Any) -> Bounded:
        other = bounded(other)
        error = _times(np.abs(self.value), other.error) + _times(np.abs(other.value), self.error)
        error = error + _times(self.error, other.error)
        exact = (self.error == 0) & (other.error == 0) & _product_is_exact(self.value, other.value)
        one = ((np.abs(self.value) == 1) & (self.error == 0)) | ((np.abs(other.value) == 1) & (other.error == 0))
        return _rounded(self.value * other.value, error, exact | one, one)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Bounded:
        other = bounded(other)
        quotient = self.value / other.value
        away = np.abs(other.value) - other.error
        error = np.where(away > 0, (self.error + _times(np.abs(quotient), other.error)) / away, np.inf)
        error = np.where(np.isinf(other.value) & (other.error == 0), 0.0, error)
        exact = (self.error == 0) & (other.error == 0) & (_power_of_two(other.value) | (self.value == 0))
        return _rounded(quotient, error, exact, exact)

    def __rtruediv__(self, other: Any) -> Bounded:
        return bounded(other) / self

    def __pow__(self, power: int) -> Bounded:
        assert power == 2
        return self * self

    # --- comparisons: on scalars they choose a branch, and note whether the bounds leave a choice

    def _choose(self, other: Any, result: Any) -> Any:
        if self.value.ndim:
            small = (self.value > 0) & (self.value <= Trace.precision.tiny)
            Trace.flushed = Trace.flushed or bool(small.any())
            return result
        other = bounded(other)
        error = self.error + other.error
        if error > 0 and not abs(self.value - other.value) > error:
            Trace.uncertain = True
        return bool(result)

    def __gt__(self, other: Any) -> Any:
        return self._choose(other, self.value > bounded(other).value)

    def __lt__(self, other: Any) -> Any:
        return self._choose(other, self.value < bounded(other).value)

    def __ge__(self, other: Any) -> Any:
        return self._choose(other, self.value >= bounded(other).value)

    def __le__(self, other: Any) -> Any:
        return self._choose(other, self.value <= bounded(other).value)

    def __eq__(self, other: Any) -> Any:
        return self.value == bounded(other).value

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self.value != 0)


def bounded(number: Any) -> Bounded:
    """A plain number or array as the precision holds it: exact, or one rounding away."""
    if isinstance(number, Bounded):
        return number
    value = np.asarray(number, np.float64)
    error = np.where(_representable(value) | ~np.isfinite(value), 0.0, Trace.precision.unit * np.abs(value))
    small = (value != 0) & (np.abs(value) < Trace.precision.tiny)
    return Bounded(value, np.where(small, Trace.precision.tiny, error))


def _rounded(value: Any, carried: Any, exact: Any, unchanged: Any = False) -> Bounded:
    """A result with its carried error and, unless it is exact, the operation's own."""
    precision = Trace.precision
    own = UNITS * precision.unit * np.abs(value) + precision.tiny
    own = np.where((exact & _representable(value)) | unchanged | ~np.isfinite(value), 0.0, own)
    return _in_range(Bounded(value, carried + own))


def _in_range(number: Bounded) -> Bounded:
    """An infinite bound where a finite value may leave the range."""
    outside = np.isfinite(number.value) & (np.abs(number.value) + number.error > Trace.precision.largest)
    return Bounded(number.value, np.where(outside, np.inf, number.error))


def _monotone(function: Callable[[Any], Any], x: Bounded, exact: Any = False) -> Bounded:
    """A monotone function: the bound is the larger of the moves to either end."""
    value = function(x.value)
    up, down = function(x.value + x.error), function(x.value - x.error)
    moved = np.where(x.error == 0, 0.0, np.fmax(np.abs(up - value), np.abs(value - down)))
    return _rounded(value, moved, exact)


def _exp(x: Bounded) -> Bounded:
    found = _monotone(np.exp, x, (x.value == 0) & (x.error == 0))
    # What is below half the smallest subnormal number is zero in every implementation.
    gone = found.value < float(np.finfo(Trace.precision.dtype).smallest_subnormal) / 2
    return Bounded(np.where(gone, 0.0, found.value), np.where(x.value == -np.inf, 0.0, found.error))


def _log(x: Bounded) -> Bounded:
    return _monotone(np.log, Bounded(x.value, np.where(x.error >= x.value, np.inf, x.error)), x.value == 1)


def _logaddexp(a: Any, b: Any) -> Bounded:
    a, b = bounded(a), bounded(b)
    value = np.logaddexp(a.value, b.value)
    up = np.logaddexp(a.value + a.error, b.value + b.error)
    down = np.logaddexp(a.value - a.error, b.value - b.error)
    both_exact = (a.error == 0) & (b.error == 0)
    return _rounded(value, np.where(both_exact, 0.0, np.fmax(np.abs(up - value), np.abs(value - down))), False)


def _both(bounded_one: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """The bounded function where an argument is bounded, else the plain one."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        if any(isinstance(argument, Bounded) for argument in arguments):
            return bounded_one(*arguments)
        return plain(*arguments, **keywords)

    return call


def _where(condition: Any, a: Any, b: Any) -> Bounded:
    a, b = bounded(a), bounded(b)
    return Bounded(np.where(condition, a.value, b.value), np.where(condition, a.error, b.error))


def _extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    """min or max of several: continuous, so no choice is noted."""
    plain = getattr(builtins, function.__name__)

    def call(*items: Any, **keywords: Any) -> Any:
        values = list(items[0]) if len(items) == 1 else list(items)
        if not any(isinstance(item, Bounded) for item in values):
            return plain(*items, **keywords)
        numbers = [bounded(item) for item in values]
        value = plain(float(n.value) for n in numbers)
        up = plain(float(n.value + n.error) for n in numbers)
        down = plain(float(n.value - n.error) for n in numbers)
        return Bounded(value, 0.0 if up == down else np.fmax(abs(up - value), abs(value - down)))

    return call


def _sum(items: Any) -> Any:
    """``sum`` by ``+=``, which bounds any order."""
    total: Any = 0
    for item in items:
        total += item
    return total


class _Module:
    """A module of which some functions are replaced."""

    def __init__(self, origin: Any, **replaced: Any) -> None:
        self._origin = origin
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._origin, name)


def _load() -> Any:
    """A second copy of the oracle, whose numbers are bounded."""
    spec = importlib.util.spec_from_file_location("bounded_reference", duohead.reference.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    keep = _both(lambda x, *_: x, np.asarray)
    expm1 = _both(lambda x: _monotone(np.expm1, x), math.expm1)
    module.np = _Module(  # type: ignore[attr-defined]
        np,
        exp=_both(_exp, np.exp),
        tanh=_both(_tanh, np.tanh),
        logaddexp=_logaddexp,
        where=_where,
        asarray=keep,
        zeros_like=lambda x: Bounded(np.zeros(x.shape), 0.0),
        full=lambda shape, item: bounded(item) + Bounded(np.zeros(shape), 0.0),
        isnan=_both(lambda x: np.isnan(x.value), np.isnan),
    )
    module.math = _Module(  # type: ignore[attr-defined]
        math, exp=_both(_exp, math.exp), log=_both(_log, lambda x: bounded(math.log(x))), expm1=expm1
    )
    module.float = _both(lambda x: x, float)  # type: ignore[attr-defined]
    module.sum = _sum  # type: ignore[attr-defined]
    module.min, module.max = _extreme(min), _extreme(max)  # type: ignore[attr-defined]
    module._label = _with_rounded_sum(module._label)  # type: ignore[attr-defined]
    module._distillation = _with_rounded_sum(module._distillation)  # type: ignore[attr-defined]
    module._d_logprob = _with_rounded_sum(module._d_logprob)  # type: ignore[attr-defined]
    module._chain_to_logits = _chain_to_logits  # type: ignore[attr-defined]
    for name in ("_policy_metrics", "_head_metrics"):
        setattr(module, name, _apart(getattr(module, name)))
    return module


def _with_rounded_sum(derivative: Callable[..., Any]) -> Callable[..., Any]:
    """p·A − D·q − E·δ (MATH §3): a row's cotangents are summed, and rounded, before p multiplies them."""

    def call(row: Any, other: Any, *rest: Any) -> Any:
        found = derivative(row, other, *rest)
        weight = row.p.value + other.p.value if isinstance(other, tuple) else row.p.value
        d = found[1] if isinstance(found, tuple) else found
        d = Bounded(d.value, d.error + UNITS * Trace.precision.unit * weight)
        return (found[0], d) if isinstance(found, tuple) else d

    return call


def _chain_to_logits(call: Any, t: int, scale: Any, d_x: Bounded) -> Bounded:
    """As the oracle has it, but a derivative that is zero only to within its bound keeps the bound."""
    slope = bounded(scale) + Bounded(np.zeros(call.vocab), 0.0)
    if call.softcap is not None:
        slope = slope * (1.0 - _tanh(call.logits[t, : call.vocab] / call.softcap) ** 2)
    zero = (d_x.value == 0) & (d_x.error == 0)
    found = d_x * slope
    error = np.where(np.isnan(found.value) & (d_x.value == 0), np.inf, found.error)
    return Bounded(np.where(d_x.value == 0, 0.0, found.value), np.where(zero, 0.0, error))


def _tanh(x: Bounded) -> Bounded:
    return _monotone(np.tanh, x, x.value == 0)


def _apart(metrics: Callable[..., Any]) -> Callable[..., Any]:
    """Choices within metrics do not make the loss uncertain."""

    def call(*arguments: Any) -> Any:
        before = Trace.uncertain
        found = metrics(*arguments)
        Trace.uncertain_metrics = Trace.uncertain_metrics or (Trace.uncertain and not before)
        Trace.uncertain = before
        return found

    return call


_reference = _load()


def _wrap(value: Any) -> Any:
    """Every float (in mappings too) as the precision holds it; names, integers and masks as they are."""
    if isinstance(value, Mapping):
        return {key: _wrap(item) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return bounded(value.astype(np.float64))
    return bounded(value) if type(value) is float else value


class Truth(NamedTuple):
    """What the oracle says, and how far an implementation in the compute dtype may be from it."""

    loss: float
    loss_bound: float
    losses: dict[str, tuple[float, float]]
    metrics: dict[str, tuple[float, float]]
    gradient: np.ndarray
    gradient_bound: np.ndarray
    uncertain: bool
    uncertain_metrics: bool
    flushed: bool


def truth(head: Mapping[str, Any], inputs: Mapping[str, Any], compute: str) -> Truth:
    """The oracle's numbers for inputs that are exact in their dtype, with bounds for the compute dtype."""
    Trace.precision = PRECISIONS[compute]
    Trace.uncertain = Trace.uncertain_metrics = Trace.flushed = False
    arguments = {key: _wrap(value) for key, value in inputs.items()}
    with np.errstate(all="ignore"):
        exact = duohead.reference.reference(head=head, **inputs)
        found = _reference.reference(head=_wrap(head), **arguments)
    pairs = [
        {name: (value, _error(bounds[name])) for name, value in values.items()}
        for values, bounds in ((exact.losses, found.losses), (exact.metrics, found.metrics))
    ]
    return Truth(
        exact.loss,
        _error(found.loss),
        pairs[0],
        pairs[1],
        exact.logits_grad,
        found.logits_grad.error + Trace.precision.tiny,
        Trace.uncertain,
        Trace.uncertain_metrics,
        Trace.flushed,
    )


def _error(number: Any) -> float:
    number = bounded(number)
    return float(number.error) + Trace.precision.tiny
