"""The public calls for PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from duohead import checks
from duohead.engine import joined
from duohead.fields import Number
from duohead.foreign import JAX, refuse_foreign
from duohead.loss import Loss
from duohead.prepare import Arguments, check_arguments, make_passes
from duohead.seam import Aux
from duohead.spec import HeadSpec
from duohead.statistics import Inputs
from duohead_torch.autograd import attach
from duohead_torch.compiled import pick_runner
from duohead_torch.hyper import hyper_tensors, symbolic_scale
from duohead_torch.runner import Job, Setting, Written, valid_rows
from duohead_torch.vocab_parallel import (
    CheckedShards,
    Group,
    Layout,
    Shards,
    check_same_layout,
    find_group,
    find_layout,
    local,
    make_setting,
)

IMPLEMENTATIONS = ("auto", "triton", "compiled", "eager", "per_loss")


class Result(NamedTuple):
    """``(loss, aux)``."""

    loss: torch.Tensor
    aux: Aux


class ResultAndGrad(NamedTuple):
    """``((loss, aux), logits_grad)``."""

    result: Result
    logits_grad: torch.Tensor


class _Call(NamedTuple):
    """A checked call, ready to run."""

    logits: torch.Tensor
    jobs: tuple[Job, ...]
    setting: Setting
    runner: Any
    layout: Layout


def monolithic_loss(
    logits: torch.Tensor,
    losses: Mapping[str, Loss] | HeadSpec | None = None,
    *,
    labels: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    teacher_logits: Mapping[str, torch.Tensor] | torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    old_logprobs: torch.Tensor | None = None,
    ref_logprobs: Mapping[str, torch.Tensor] | torch.Tensor | None = None,
    importance_weights: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    preference_pairs: torch.Tensor | None = None,
    num_segments: int | None = None,
    num_tokens: Number | None = None,
    num_sequences: Number | None = None,
    num_pairs: Number | None = None,
    logits_scale_factor: Number = 1.0,
    final_logit_softcap: Number | None = None,
    vocab_size: int | None = None,
    metrics: Sequence[str] = (),
    tokens: Sequence[str] = (),
    overwrite_logits: bool = False,
    implementation: str = "auto",
    vocab_group: Any = None,
    vocab_start: int | None = None,
    sequence_group: Any = None,
    validate: bool = False,
) -> Result:
    """Every loss and metric over one softmax of ``logits``, with one combined gradient.

    Args:
        logits: ``(*tokens, V)`` float32, bfloat16, float16 or float64.
        losses: name → loss, or a HeadSpec; none means cross-entropy, named ``ce``.
        labels: ``(*tokens)`` integer; negative = ignored. ``labels[t]`` is the class of row t: nothing is shifted.
        mask: ``(*tokens)`` bool, ANDed with ``labels >= 0``.
        teacher_logits: reference model → ``(*tokens, V)``, or a bare array where there is one teacher.
        advantages: ``(*tokens)``, or ``(num_segments,)``.
        old_logprobs: ``(*tokens)``, the label's log-probability under the policy that sampled it, in nats.
        ref_logprobs: the same under a reference policy; by name where there are several.
        importance_weights: ``(*tokens)``; they multiply the policy part, never the KL.
        segment_ids: ``(*tokens)`` integer, the sequence a token belongs to; negative = none. Any order.
        preference_pairs: ``(pairs, 2)`` integer segment ids, (chosen, rejected); a negative id is padding.
        num_segments: how many segments there are (default: as many as tokens).
        num_tokens, num_sequences, num_pairs: the global batch's counts, so that micro-batches and ranks add up.
        logits_scale_factor, final_logit_softcap: x = s·c·tanh(logit / c).
        vocab_size: columns at and past it are padding.
        metrics: head metrics among ``entropy, accuracy, perplexity, mean_logprob, num_tokens``.
        tokens: per-token outputs among ``logprobs, entropy, lse``.
        overwrite_logits: the gradient takes the logits' memory; one backward only.
        implementation: ``auto``, ``triton``, ``compiled``, ``eager`` or ``per_loss`` (each loss by itself).
        vocab_group: the ProcessGroup over which the vocabulary is split; one all-gather serves all losses. Logits that
            are a DTensor split over the vocabulary need none.
        vocab_start: the first column of this rank's shard, where it is not ``rank · max(V, ceil(vocab_size / ranks))``.
        sequence_group: the ProcessGroup over which sequences are split; the ranks' losses add up to the whole's.
        validate: check labels, segment ids and pairs against their ranges, also where that costs a device sync.

    Returns:
        ``(loss, aux)``: Σ weight · reduced value, differentiable with respect to ``logits`` alone, and a detached
        ``Aux`` of ``losses``, ``metrics``, ``tokens`` and the metrics' ``parts``. In float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape or range, or missing where a loss needs it.

    >>> import torch
    >>> from duohead import CrossEntropy, ZLoss
    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> losses = {"ce": CrossEntropy(), "z": ZLoss(weight=0.1)}
    >>> loss, aux = monolithic_loss(logits, losses, labels=torch.tensor([1, -100]), implementation="eager")
    >>> loss.backward()
    >>> logits.grad[1].tolist()
    [0.0, 0.0, 0.0, 0.0]
    """
    call = _prepare(
        logits,
        losses=losses,
        labels=labels,
        mask=mask,
        teacher_logits=teacher_logits,
        advantages=advantages,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        importance_weights=importance_weights,
        segment_ids=segment_ids,
        preference_pairs=preference_pairs,
        num_segments=num_segments,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_pairs=num_pairs,
        logits_scale_factor=logits_scale_factor,
        final_logit_softcap=final_logit_softcap,
        vocab_size=vocab_size,
        metrics=metrics,
        tokens=tokens,
        implementation=implementation,
        vocab_group=vocab_group,
        vocab_start=vocab_start,
        sequence_group=sequence_group,
        validate=validate,
    )
    differentiable = logits.requires_grad and torch.is_grad_enabled()
    # A kernel that reads once writes the gradient in the same launch; backward then only hands it over.
    early = differentiable and not overwrite_logits and call.runner.gives_gradient(call.jobs, call.setting)
    evaluations, gradient = _evaluate_with_gradient(call) if early else (_evaluate(call), None)
    loss, aux = joined(evaluations)
    if differentiable:
        written = _written(call, evaluations)
        loss = attach(call.logits, loss, call.runner, call.setting, written, overwrite_logits, gradient)
    return Result(loss, aux)


def monolithic_loss_and_grad(
    logits: torch.Tensor,
    losses: Mapping[str, Loss] | HeadSpec | None = None,
    *,
    grad_scale: Number = 1.0,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    labels: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    teacher_logits: Mapping[str, torch.Tensor] | torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    old_logprobs: torch.Tensor | None = None,
    ref_logprobs: Mapping[str, torch.Tensor] | torch.Tensor | None = None,
    importance_weights: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    preference_pairs: torch.Tensor | None = None,
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
    vocab_group: Any = None,
    vocab_start: int | None = None,
    sequence_group: Any = None,
    validate: bool = False,
) -> ResultAndGrad:
    """``((loss, aux), logits_grad)`` without autograd; the other arguments are those of ``monolithic_loss``.

    Args:
        grad_scale: multiplies the gradient (a loss scaler's factor, say), exactly and before the one rounding.
        out: takes the gradient; ``out=logits`` overwrites them.
        accumulate: adds the gradient to ``out`` in the compute dtype and rounds once.

    >>> import torch
    >>> (loss, aux), grad = monolithic_loss_and_grad(
    ...     torch.zeros(1, 2), labels=torch.tensor([0]), implementation="eager"
    ... )
    >>> grad.tolist()
    [[-0.5, 0.5]]
    """
    checks.check_gradient(logits, grad_scale, out, accumulate)
    if accumulate and out is logits:
        raise ValueError("accumulate: out is the logits themselves, there is no gradient to add to")
    if out is not None and not isinstance(out, torch.Tensor):
        raise TypeError(f"out: must be a torch tensor, got {type(out).__module__}.{type(out).__name__}")
    if out is not None and out.device != logits.device:
        raise ValueError(f"out: must be on the logits' device {logits.device}, got {out.device}")
    with torch.no_grad():
        call = _prepare(
            logits,
            losses=losses,
            labels=labels,
            mask=mask,
            teacher_logits=teacher_logits,
            advantages=advantages,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            importance_weights=importance_weights,
            segment_ids=segment_ids,
            preference_pairs=preference_pairs,
            num_segments=num_segments,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_pairs=num_pairs,
            logits_scale_factor=logits_scale_factor,
            final_logit_softcap=final_logit_softcap,
            vocab_size=vocab_size,
            metrics=metrics,
            tokens=tokens,
            implementation=implementation,
            vocab_group=vocab_group,
            vocab_start=vocab_start,
            sequence_group=sequence_group,
            validate=validate,
        )
        upstream = hyper_tensors((grad_scale,), call.logits)[0]
        evaluations, gradient = _evaluate_with_gradient(call, upstream, local(out), accumulate)
        loss, aux = joined(evaluations)
    return ResultAndGrad(Result(loss, aux), call.layout.wrap(gradient))


def _prepare(
    logits: torch.Tensor,
    *,
    vocab_group: Any,
    vocab_start: int | None,
    sequence_group: Any,
    validate: bool,
    **arguments: Any,
) -> _Call:
    """Checks a call's arguments and makes its passes."""
    if not torch.compiler.is_compiling():
        refuse_foreign({"logits": logits, **arguments}, "a torch tensor", (*JAX, "numpy"))
    if arguments["implementation"] not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: got {arguments['implementation']!r}; valid: {', '.join(IMPLEMENTATIONS)}")
    layout = find_layout(logits, vocab_group, vocab_start, _vocab_size(arguments))
    split = find_group("sequence_group", sequence_group)
    for model, array in _teachers(arguments["teacher_logits"]):
        check_same_layout(model, array, layout)
    logits = local(logits)
    arguments = {name: value if name == "losses" else local(value) for name, value in arguments.items()}
    checked = check_arguments(logits, **arguments, sequence_ranks=1 if split is None else split.ranks)
    if layout.vocab is None:
        checks.check_vocab(logits, checked.vocab_size)
    _check_devices(checked, logits)
    checked = checked._replace(logits_scale_factor=symbolic_scale(checked.logits_scale_factor, logits))
    setting = make_setting(layout, logits.shape[-1], _collectives(checked, logits, layout, split, validate))
    valid = valid_rows(checked.labels, checked.mask, logits)
    jobs = tuple(
        Job(
            item.plan,
            hyper_tensors(item.hyper, logits),
            Inputs(
                checked.labels,
                valid,
                tuple(array.detach() for array in item.teachers),
                tuple(array.detach() for array in item.tokens),
                checked.segment_ids,
                checked.preference_pairs,
                checked.num_segments,
            ),
        )
        for item in make_passes(checked, remember=not torch.compiler.is_compiling())
    )
    return _Call(logits, jobs, setting, pick_runner(checked.implementation, logits, jobs), layout)


def _check_devices(checked: Arguments, logits: torch.Tensor) -> None:
    arrays = {
        "labels": checked.labels,
        "mask": checked.mask,
        "segment_ids": checked.segment_ids,
        "preference_pairs": checked.preference_pairs,
        **checked.inputs,
        **{f"teacher_logits[{name!r}]": array for name, array in checked.teacher_logits.items()},
        **{f"ref_logprobs[{name!r}]": array for name, array in checked.ref_logprobs.items()},
    }
    for name, array in arrays.items():
        if array is None:
            continue
        if not isinstance(array, torch.Tensor):
            raise TypeError(f"{name}: must be a torch tensor, got {type(array).__module__}.{type(array).__name__}")
        if array.device != logits.device:
            raise ValueError(f"{name}: must be on the logits' device {logits.device}, got {array.device}")


def _vocab_size(arguments: Mapping[str, Any]) -> int | None:
    size, losses = arguments["vocab_size"], arguments["losses"]
    return losses.vocab_size if size is None and isinstance(losses, HeadSpec) else size


def _teachers(teacher_logits: Any) -> list[tuple[str, Any]]:
    if isinstance(teacher_logits, Mapping):
        return [(f"teacher_logits[{model!r}]", array) for model, array in teacher_logits.items()]
    return [("teacher_logits", teacher_logits)]


def _collectives(
    checked: Arguments, logits: torch.Tensor, layout: Layout, split: Group | None, validate: bool
) -> Shards | CheckedShards | None:
    """The collectives of a call, and its ranges checked: on the CPU always where eager, else only on request."""
    shards = None
    if layout.vocab is not None or split is not None:
        shards = Shards(layout.vocab, split, layout.start, layout.size)
    if torch.compiler.is_compiling():
        if validate:
            raise ValueError("validate: not possible inside torch.compile; validate the batch outside of it")
        return shards
    eager = checked.implementation in ("eager", "per_loss")
    if not validate and not (logits.device.type == "cpu" and eager):
        return shards
    ranged = (checked.labels, checked.mask, checked.segment_ids, checked.preference_pairs)
    if shards is None:
        checks.check_ranges(*ranged, layout.size, checked.num_segments)
        return None
    fault = checks.range_fault(*ranged, layout.size, checked.num_segments)
    watching = CheckedShards(shards, fault, checked.num_segments)
    if eager:
        return watching
    watching.verify(logits.shape[-1], hyper_tensors((0.0,), logits)[0])
    return shards


def _evaluate(call: _Call) -> list[Any]:
    with torch.no_grad():
        evaluations = call.runner.evaluate(call.jobs, call.setting, call.logits.detach())
    if isinstance(call.setting.collectives, CheckedShards):
        call.setting.collectives.check()
    return evaluations


def _evaluate_with_gradient(
    call: _Call, upstream: torch.Tensor | None = None, out: torch.Tensor | None = None, accumulate: bool = False
) -> tuple[list[Any], torch.Tensor]:
    """The evaluations and the gradient times upstream (default 1), in one launch where the runner can."""
    logits = call.logits.detach()
    with torch.no_grad():
        if upstream is None:
            upstream = hyper_tensors((1.0,), logits)[0]
        if call.runner.gives_gradient(call.jobs, call.setting):
            return call.runner.evaluate_with_gradient(call.jobs, call.setting, logits, upstream, out, accumulate)
        evaluations = _evaluate(call)
        gradient = call.runner.gradient(
            _written(call, evaluations), call.setting, logits, upstream, out=out, accumulate=accumulate
        )
    return evaluations, gradient


def _written(call: _Call, evaluations: list[Any]) -> tuple[Written, ...]:
    return tuple(
        Written(job, evaluation.normalisers, evaluation.coefficients)
        for job, evaluation in zip(call.jobs, evaluations, strict=True)
    )
