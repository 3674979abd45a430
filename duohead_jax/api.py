"""The public calls for JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from duohead import checks
from duohead.fields import Number
from duohead.foreign import TORCH, refuse_foreign
from duohead.loss import Loss
from duohead.prepare import check_arguments, make_passes
from duohead.seam import Aux
from duohead.spec import HeadSpec
from duohead.token_statistics import TokenStatistics, plan_statistics
from duohead_jax import pytrees as _pytrees  # noqa: F401  (makes the specs pytrees)
from duohead_jax import triton, xla
from duohead_jax.sharding import Axes
from duohead_jax.xla import Arrays, Static

IMPLEMENTATIONS = ("auto", "triton", "xla", "per_loss")


class Result(NamedTuple):
    """``(loss, aux)``."""

    loss: jax.Array
    aux: Aux


class ResultAndGrad(NamedTuple):
    """``((loss, aux), logits_grad)``."""

    result: Result
    logits_grad: jax.Array


def monolithic_loss(
    logits: jax.Array,
    losses: Mapping[str, Loss] | HeadSpec | None = None,
    *,
    labels: jax.Array | None = None,
    mask: jax.Array | None = None,
    teacher_logits: Mapping[str, jax.Array] | jax.Array | None = None,
    advantages: jax.Array | None = None,
    old_logprobs: jax.Array | None = None,
    ref_logprobs: Mapping[str, jax.Array] | jax.Array | None = None,
    importance_weights: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    preference_pairs: jax.Array | None = None,
    num_segments: int | None = None,
    num_tokens: Number | None = None,
    num_sequences: Number | None = None,
    num_pairs: Number | None = None,
    logits_scale_factor: Number = 1.0,
    final_logit_softcap: Number | None = None,
    vocab_size: int | None = None,
    metrics: Sequence[str] = (),
    tokens: Sequence[str] = (),
    implementation: str = "auto",
    vocab_axis: str | None = None,
    sequence_axis: str | None = None,
    validate: bool = False,
) -> Result:
    """Every loss and metric over one softmax of ``logits``, with one combined gradient.

    The arguments are those of ``duohead_torch.monolithic_loss``. ``implementation`` is ``auto``, ``triton``, ``xla`` or
    ``per_loss``; ``vocab_axis`` and ``sequence_axis`` name the ``shard_map`` or ``pmap`` axis over which the vocabulary
    or the sequences are split. Composes with ``jit``, ``vmap``, ``scan``, ``remat`` and
    ``value_and_grad(has_aux=True)``.

    Returns:
        ``(loss, aux)``: Σ weight · reduced value, differentiable with respect to ``logits`` alone, and a detached
        ``Aux`` of ``losses``, ``metrics``, ``tokens`` and the metrics' ``parts``. In float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape or range, or missing where a loss needs it.

    >>> import jax, jax.numpy as jnp
    >>> from duohead import CrossEntropy, ZLoss
    >>> losses = {"ce": CrossEntropy(), "z": ZLoss(weight=0.1)}
    >>> (loss, aux), grad = jax.value_and_grad(monolithic_loss, has_aux=True)(
    ...     jnp.zeros((2, 4)), losses, labels=jnp.array([1, -100])
    ... )
    >>> grad[1].tolist()
    [0.0, 0.0, 0.0, 0.0]
    """
    static, passes, backend = _prepare(locals())
    return Result(*backend.loss(static, logits, passes))


def monolithic_loss_and_grad(
    logits: jax.Array,
    losses: Mapping[str, Loss] | HeadSpec | None = None,
    *,
    grad_scale: Number = 1.0,
    out: jax.Array | None = None,
    accumulate: bool = False,
    labels: jax.Array | None = None,
    mask: jax.Array | None = None,
    teacher_logits: Mapping[str, jax.Array] | jax.Array | None = None,
    advantages: jax.Array | None = None,
    old_logprobs: jax.Array | None = None,
    ref_logprobs: Mapping[str, jax.Array] | jax.Array | None = None,
    importance_weights: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    preference_pairs: jax.Array | None = None,
    num_segments: int | None = None,
    num_tokens: Number | None = None,
    num_sequences: Number | None = None,
    num_pairs: Number | None = None,
    logits_scale_factor: Number = 1.0,
    final_logit_softcap: Number | None = None,
    vocab_size: int | None = None,
    metrics: Sequence[str] = (),
    tokens: Sequence[str] = (),
    implementation: str = "auto",
    vocab_axis: str | None = None,
    sequence_axis: str | None = None,
    validate: bool = False,
) -> ResultAndGrad:
    """``((loss, aux), logits_grad)`` without autodiff; the other arguments are those of ``monolithic_loss``.

    Args:
        grad_scale: multiplies the gradient, exactly and before the one rounding.
        out: its dtype is the gradient's; arrays are immutable, so to reuse its memory donate it to a jitted step.
        accumulate: adds the gradient to ``out`` in the compute dtype and rounds once.

    >>> import jax.numpy as jnp
    >>> (loss, aux), grad = monolithic_loss_and_grad(jnp.zeros((1, 2)), labels=jnp.array([0]))
    >>> grad.tolist()
    [[-0.5, 0.5]]
    """
    checks.check_gradient(logits, grad_scale, out, accumulate)
    arguments = dict(locals())
    for name in ("grad_scale", "out", "accumulate"):
        arguments.pop(name)
    static, passes, backend = _prepare(arguments)
    scale = xla.hyper_vector([grad_scale], logits)[0]
    (loss, aux), gradient = backend.loss_and_grad(static, accumulate, logits, passes, scale, out)
    return ResultAndGrad(Result(loss, aux), gradient)


def token_statistics(
    logits: jax.Array,
    labels: jax.Array | None = None,
    *,
    statistics: Sequence[str] = ("logprob", "entropy", "lse"),
    mask: jax.Array | None = None,
    teacher_logits: Mapping[str, jax.Array] | jax.Array | None = None,
    temperature: Number = 1.0,
    student_temperature: Number = 1.0,
    jsd_beta: Number = 0.5,
    logits_scale_factor: Number = 1.0,
    final_logit_softcap: Number | None = None,
    vocab_size: int | None = None,
    vocab_axis: str | None = None,
) -> TokenStatistics:
    """Differentiable per-token statistics of one softmax, for a loss of the user's own.

    ``statistics``: among ``logprob, lse, entropy, mean_logprob, teacher_cross_entropy, forward_kl, reverse_kl, jsd``,
    in nats; the backward of any function of them is one write of the logits' gradient. Masked rows give 0.

    >>> import jax.numpy as jnp
    >>> found = token_statistics(jnp.zeros((1, 4)), jnp.array([0]))
    >>> round(float(found.entropy[0]), 4)
    1.3863
    """
    refuse_foreign(locals(), "a JAX array", TORCH)
    checks.check_logits(logits, vocab_size)
    axes = Axes(vocab_axis, None)
    axes.check()
    size, padded = _vocabulary(logits, vocab_size, axes)
    checks.check_rows(labels, mask, logits)
    teachers = checks.by_name("teacher_logits", teacher_logits, ["teacher"])
    checks.check_teachers(teachers, logits)
    wanted, hyper = plan_statistics(
        statistics,
        has_labels=labels is not None,
        teachers=teachers,
        temperature=temperature,
        student_temperature=student_temperature,
        jsd_beta=jsd_beta,
        logits_scale_factor=logits_scale_factor,
        final_logit_softcap=final_logit_softcap,
    )
    arrays = Arrays(
        xla.hyper_vector(hyper, logits),
        labels,
        _valid(labels, mask, logits),
        tuple(jax.lax.stop_gradient(teachers[name]) for name in wanted.plan.teacher_names),
        (),
        None,
        None,
    )
    values = xla.statistics(xla.StatisticsStatic(wanted, size, padded, axes), logits, arrays)
    return TokenStatistics(**dict(zip(wanted.names, values, strict=True)))


def make_loss(spec: HeadSpec | Mapping[str, Any] | str | Path) -> Callable[..., Result]:
    """``monolithic_loss`` with a HeadSpec already given, or its configuration, a YAML file or YAML text.

    >>> import jax.numpy as jnp
    >>> loss_fn = make_loss({"losses": {"ce": {"type": "label"}}})
    >>> round(float(loss_fn(jnp.zeros((1, 4)), labels=jnp.array([0])).loss), 4)
    1.3863
    """
    head = HeadSpec.of(spec)

    def loss_fn(logits: jax.Array, **inputs: Any) -> Result:
        return monolithic_loss(logits, head, **inputs)

    return loss_fn


def _vocabulary(logits: jax.Array, vocab_size: int | None, axes: Axes) -> tuple[int, bool]:
    """(size of the whole vocabulary, whether some columns are padding)."""
    if axes.vocab is None:
        checks.check_vocab(logits, vocab_size)
        columns = logits.shape[-1]
    else:
        columns = logits.shape[-1] * jax.lax.axis_size(axes.vocab)
        if columns < 1 or (vocab_size is not None and vocab_size > columns):
            raise ValueError(
                f"vocab_size: the shards of vocab_axis {axes.vocab!r} hold {columns} columns in all, got {vocab_size}"
            )
    size = columns if vocab_size is None else vocab_size
    return size, size < columns


def _valid(labels: jax.Array | None, mask: jax.Array | None, logits: jax.Array) -> jax.Array:
    """Which rows exist: the mask and a label that is not negative."""
    if labels is None:
        return jnp.ones(logits.shape[:-1], bool) if mask is None else mask
    return labels >= 0 if mask is None else (labels >= 0) & mask


def _prepare(arguments: dict[str, Any]) -> tuple[Static, tuple[Arrays, ...], Any]:
    """Checks a call's arguments and makes its passes; with them the module that runs them, ``xla`` or ``triton``."""
    refuse_foreign(arguments, "a JAX array", TORCH)
    logits = arguments.pop("logits")
    axes = Axes(arguments.pop("vocab_axis"), arguments.pop("sequence_axis"))
    axes.check()
    validate = arguments.pop("validate")
    if arguments["implementation"] not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: got {arguments['implementation']!r}; valid: {', '.join(IMPLEMENTATIONS)}")
    checked = check_arguments(logits, **arguments, sequence_ranks=axes.sequence_ranks)
    size, padded = _vocabulary(logits, checked.vocab_size, axes)
    arrays = (checked.labels, checked.mask, checked.segment_ids, checked.preference_pairs)
    traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
    if validate and traced:
        raise ValueError("validate: not possible under a transformation (labels are traced); validate outside of it")
    if not traced and (validate or checked.implementation == "per_loss"):
        checks.check_ranges(*arrays, size, checked.num_segments)
    valid = _valid(checked.labels, checked.mask, logits)
    passes = make_passes(checked, remember=True)
    stopped = jax.lax.stop_gradient
    static = Static(tuple(item.plan for item in passes), size, padded, checked.num_segments, axes)
    arrays_of_passes = tuple(
        Arrays(
            xla.hyper_vector(item.hyper, logits),
            checked.labels,
            valid,
            tuple(stopped(array) for array in item.teachers),
            tuple(stopped(array) for array in item.tokens),
            checked.segment_ids,
            checked.preference_pairs,
        )
        for item in passes
    )
    backend = triton if triton.takes(checked.implementation, static, logits) else xla
    return static, arrays_of_passes, backend
