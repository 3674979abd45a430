"""``token_statistics`` for PyTorch: differentiable row statistics whose backward is one write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from duohead import checks, engine
from duohead.fields import Number
from duohead.foreign import JAX, refuse_foreign
from duohead.statistics import Inputs
from duohead.token_statistics import (
    StatisticsPlan,
    TokenStatistics,
    evaluate_statistics,
    fold_statistics,
    plan_statistics,
)
from duohead_torch import namespace
from duohead_torch.autograd import refuse_second_derivative
from duohead_torch.hyper import hyper_tensors, symbolic_scale
from duohead_torch.runner import Setting, valid_rows
from duohead_torch.trees import flatten, rebuild, structure
from duohead_torch.vocab_parallel import Shards, check_same_layout, find_layout, local, make_setting


class _TokenStatistics(torch.autograd.Function):
    """The statistics asked for; backward folds their cotangents and writes the logits' gradient once."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits: torch.Tensor,
        wanted: StatisticsPlan,
        setting: Setting,
        shape: Any,
        *arrays: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        hyper, inputs = rebuild(shape, list(arrays))
        values, found, normalisers = evaluate_statistics(
            namespace,
            wanted,
            hyper,
            logits,
            inputs,
            setting.columns,
            setting.collectives,
            setting.split_vocab,
        )
        kept = (tuple(found.values()), normalisers)
        ctx.wanted, ctx.setting, ctx.keys = wanted, setting, tuple(found)
        ctx.shape, ctx.kept_shape, ctx.count = shape, structure(kept), len(arrays)
        ctx.save_for_backward(logits, *arrays, *flatten(kept))
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:  # type: ignore[override]
        logits, *saved = ctx.saved_tensors
        hyper, inputs = rebuild(ctx.shape, list(saved[: ctx.count]))
        values, normalisers = rebuild(ctx.kept_shape, list(saved[ctx.count :]))
        found = dict(zip(ctx.keys, values, strict=True))
        columns = ctx.setting.columns
        with torch.no_grad():
            coefficients = fold_statistics(namespace, ctx.wanted, hyper, found, inputs, columns, upstream)
            gradient = engine.write(
                namespace, ctx.wanted.plan, hyper, logits, inputs, columns, normalisers, coefficients
            ).to(logits.dtype)
        gradient = refuse_second_derivative(gradient, logits)
        return (gradient, None, None, None, *(None for _ in range(ctx.count)))


def token_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    statistics: Sequence[str] = ("logprob", "entropy", "lse"),
    mask: torch.Tensor | None = None,
    teacher_logits: Mapping[str, torch.Tensor] | torch.Tensor | None = None,
    temperature: Number = 1.0,
    student_temperature: Number = 1.0,
    jsd_beta: Number = 0.5,
    logits_scale_factor: Number = 1.0,
    final_logit_softcap: Number | None = None,
    vocab_size: int | None = None,
    vocab_group: Any = None,
    vocab_start: int | None = None,
) -> TokenStatistics:
    """Differentiable per-token statistics of one softmax, for a loss of the user's own.

    ``statistics``: among ``logprob, lse, entropy, mean_logprob, teacher_cross_entropy, forward_kl, reverse_kl, jsd``,
    in nats, each of the logits' token shape; the backward of any function of them is one write of the logits' gradient.
    Masked rows (``mask`` False or a negative label) give 0 and no gradient. ``vocab_group`` and ``vocab_start`` as for
    ``monolithic_loss``: every rank has the whole vocabulary's statistics, after one all-gather (two with ``jsd``).

    Raises:
        TypeError, ValueError: an argument of the wrong kind or shape, or missing where a statistic needs it.

    >>> import torch
    >>> found = token_statistics(torch.zeros(1, 4), torch.tensor([0]))
    >>> round(float(found.entropy), 4)
    1.3863
    """
    if not torch.compiler.is_compiling():
        refuse_foreign(locals(), "a torch tensor", (*JAX, "numpy"))
    layout = find_layout(logits, vocab_group, vocab_start, vocab_size)
    for model, array in checks.by_name("teacher_logits", teacher_logits, ["teacher"]).items():
        check_same_layout(f"teacher_logits[{model!r}]", array, layout)
    logits, labels, mask, teacher_logits = map(local, (logits, labels, mask, teacher_logits))
    if layout.vocab is None:
        checks.check_vocab(logits, vocab_size)
    checks.check_rows(labels, mask, logits)
    teachers = checks.by_name("teacher_logits", teacher_logits, ["teacher"])
    checks.check_teachers(teachers, logits)
    checks.check_scale(logits_scale_factor, final_logit_softcap)
    wanted, hyper = plan_statistics(
        statistics,
        has_labels=labels is not None,
        teachers=teachers,
        temperature=temperature,
        student_temperature=student_temperature,
        jsd_beta=jsd_beta,
        logits_scale_factor=symbolic_scale(logits_scale_factor, logits),
        final_logit_softcap=final_logit_softcap,
    )
    shards = None if layout.vocab is None else Shards(layout.vocab, None, layout.start, layout.size)
    setting = make_setting(layout, logits.shape[-1], shards)
    inputs = Inputs(
        labels,
        valid_rows(labels, mask, logits),
        tuple(teachers[name].detach() for name in wanted.plan.teacher_names),
        (),
        None,
        None,
        0,
    )
    arrays = (hyper_tensors(hyper, logits), inputs)
    values = _TokenStatistics.apply(logits, wanted, setting, structure(arrays), *flatten(arrays))
    return TokenStatistics(**dict(zip(wanted.names, values, strict=True)))
