"""The public calls for PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from duohead import checks
from duohead.engine import join_aux
from duohead.fields import Number
from duohead.loss import Loss
from duohead.prepare import Arguments, check_arguments, make_passes
from duohead.seam import Aux
from duohead.spec import HeadSpec
from duohead.statistics import Columns, Inputs
from duohead_torch.autograd import attach
from duohead_torch.compiled import pick_runner
from duohead_torch.hyper import hyper_tensors
from duohead_torch.runner import Job, Setting, Written

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
        vocab_group: the ProcessGroup over which the vocabulary is split.
        vocab_start: the first column of this rank's shard, where it does not follow from the sizes.
        sequence_group: the ProcessGroup over which sequences are split.
        validate: check labels, segment ids and pairs against their ranges, also where that costs a device sync.

    Returns:
        ``(loss, aux)``: Σ weight · reduced value, differentiable with respect to ``logits`` alone, and a detached
        ``Aux`` of ``losses``, ``metrics``, ``tokens`` and the metrics' ``parts``. In float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument of the wrong kind, shape or range, or missing where a loss needs it.

    >>> import torch
    >>> from duohead import CrossEntropy, ZLoss
    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> loss, aux = monolithic_loss(
    ...     logits, {"ce": CrossEntropy(), "z": ZLoss(weight=0.1)}, labels=torch.tensor([1, -100]), implementation="eager"
    ... )
    >>> loss.backward()
    >>> logits.grad[1].tolist()
    [0.0, 0.0, 0.0, 0.0]
    """
    call = _prepare(locals())
    evaluations = _evaluate(call)
    loss, aux = _joined(evaluations)
    if logits.requires_grad and torch.is_grad_enabled():
        loss = attach(call.logits, loss, call.runner, call.setting, _written(call, evaluations), overwrite_logits)
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
    if accumulate and out is None:
        raise ValueError("accumulate: needs out, the tensor that the gradient is added to")
    if accumulate and out is logits:
        raise ValueError("accumulate: out is the logits themselves, there is no gradient to add to")
    if out is not None and (out.shape != logits.shape or out.device != logits.device):
        raise ValueError(f"out: must have the logits' shape and device, got {checks.describe(out)} on {out.device}")
    arguments = dict(locals())
    for name in ("grad_scale", "out", "accumulate"):
        arguments.pop(name)
    with torch.no_grad():
        call = _prepare(arguments)
        evaluations = _evaluate(call)
        loss, aux = _joined(evaluations)
        upstream = hyper_tensors((grad_scale,), call.logits)[0]
        gradient = call.runner.gradient(
            _written(call, evaluations), call.setting, call.logits, upstream, out=out, accumulate=accumulate
        )
    return ResultAndGrad(Result(loss, aux), gradient)


def _prepare(arguments: dict[str, Any]) -> _Call:
    """Checks a call's arguments and makes its passes."""
    logits = arguments.pop("logits")
    vocab_group, vocab_start = arguments.pop("vocab_group"), arguments.pop("vocab_start")
    sequence_group, validate = arguments.pop("sequence_group"), arguments.pop("validate")
    arguments.pop("overwrite_logits", None)
    if arguments["implementation"] not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: got {arguments['implementation']!r}; valid: {', '.join(IMPLEMENTATIONS)}"
        )
    if vocab_group is not None or sequence_group is not None or vocab_start is not None:
        raise NotImplementedError("vocab_group: to come")
    checked = check_arguments(logits, **arguments)
    checks.check_vocab(logits, checked.vocab_size)
    size = logits.shape[-1] if checked.vocab_size is None else checked.vocab_size
    setting = Setting(Columns(0, size, size < logits.shape[-1]), None, False, False)
    _check_devices(checked, logits)
    _check_values(checked, logits, size, validate)
    valid = _valid(checked, logits)
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
    return _Call(logits, jobs, setting, pick_runner(checked.implementation, logits))


def _valid(checked: Arguments, logits: torch.Tensor) -> torch.Tensor:
    """Which rows exist: the mask and a label that is not negative."""
    if checked.labels is None:
        if checked.mask is None:
            return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
        return checked.mask
    valid = checked.labels >= 0
    return valid if checked.mask is None else valid & checked.mask


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


def _check_values(checked: Arguments, logits: torch.Tensor, size: int, validate: bool) -> None:
    """Ranges of labels, segments and pairs: on the CPU always where eager, else only on request."""
    if torch.compiler.is_compiling():
        if validate:
            raise ValueError("validate: not possible inside torch.compile; validate the batch outside of it")
        return
    if not validate and not (logits.device.type == "cpu" and checked.implementation in ("eager", "per_loss")):
        return
    checks.check_ranges(
        checked.labels,
        None if checked.mask is None else checked.mask,
        checked.segment_ids,
        checked.preference_pairs,
        size,
        checked.num_segments,
    )


def _evaluate(call: _Call) -> list[Any]:
    with torch.no_grad():
        return call.runner.evaluate(call.jobs, call.setting, call.logits.detach())


def _written(call: _Call, evaluations: list[Any]) -> tuple[Written, ...]:
    return tuple(
        Written(job, evaluation.normalisers, evaluation.coefficients)
        for job, evaluation in zip(call.jobs, evaluations, strict=True)
    )


def _joined(evaluations: list[Any]) -> tuple[torch.Tensor, Aux]:
    loss = evaluations[0].loss
    for evaluation in evaluations[1:]:
        loss = loss + evaluation.loss
    return loss, join_aux([evaluation.aux for evaluation in evaluations])
