"""A call's arguments → plans and inputs: the part of both adapters that does not depend on the framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from duohead import checks
from duohead.fields import Number
from duohead.loss import Loss
from duohead.plan import Given, Plan, make_plan
from duohead.spec import HeadSpec
from duohead.terms import CrossEntropy

Array = Any


class Pass(NamedTuple):
    """One fused pass: its plan, the values of its hyperparameters, and its arrays in the plan's order."""

    plan: Plan
    hyper: list[Number]
    teachers: tuple[Array, ...]
    tokens: tuple[Array, ...]


class Arguments(NamedTuple):
    """The arguments of a call by name, as the user gave them (a HeadSpec already taken apart)."""

    losses: Mapping[str, Loss]
    labels: Array | None
    mask: Array | None
    teacher_logits: Mapping[str, Array]
    ref_logprobs: Mapping[str, Array]
    inputs: Mapping[str, Array | None]
    segment_ids: Array | None
    preference_pairs: Array | None
    num_segments: int
    counts: Mapping[str, Number | None]
    logits_scale_factor: Number
    final_logit_softcap: Number | None
    vocab_size: int | None
    metrics: tuple[str, ...]
    tokens: tuple[str, ...]
    implementation: str


def take_apart(
    losses: Mapping[str, Loss] | HeadSpec | None,
    logits_scale_factor: Number,
    final_logit_softcap: Number | None,
    vocab_size: int | None,
    metrics: Sequence[str],
    tokens: Sequence[str],
    implementation: str,
) -> tuple[Mapping[str, Loss], Number, Number | None, int | None, Sequence[str], Sequence[str], str]:
    """A HeadSpec's fields stand in for arguments that were left at their defaults."""
    if not isinstance(losses, HeadSpec):
        if losses is None or len(losses) == 0:
            losses = {"ce": CrossEntropy()}
        return losses, logits_scale_factor, final_logit_softcap, vocab_size, metrics, tokens, implementation
    head = losses
    if isinstance(logits_scale_factor, (int, float)) and logits_scale_factor == 1.0:
        logits_scale_factor = head.logits_scale_factor
    return (
        head.losses,
        logits_scale_factor,
        head.final_logit_softcap if final_logit_softcap is None else final_logit_softcap,
        head.vocab_size if vocab_size is None else vocab_size,
        metrics or head.metrics,
        tokens or head.tokens,
        head.loss_implementation if implementation == "auto" else implementation,
    )


def check_arguments(
    logits: Array,
    *,
    losses: Mapping[str, Loss] | HeadSpec | None,
    labels: Array | None,
    mask: Array | None,
    teacher_logits: Any,
    advantages: Array | None,
    old_logprobs: Array | None,
    ref_logprobs: Any,
    importance_weights: Array | None,
    segment_ids: Array | None,
    preference_pairs: Array | None,
    num_segments: int | None,
    num_tokens: Number | None,
    num_sequences: Number | None,
    num_pairs: Number | None,
    logits_scale_factor: Number,
    final_logit_softcap: Number | None,
    vocab_size: int | None,
    metrics: Sequence[str],
    tokens: Sequence[str],
    implementation: str,
    sequence_ranks: int = 1,
) -> Arguments:
    """Checks every argument; each fault is one error that names it and says what would be right."""
    losses, logits_scale_factor, final_logit_softcap, vocab_size, metrics, tokens, implementation = take_apart(
        losses, logits_scale_factor, final_logit_softcap, vocab_size, metrics, tokens, implementation
    )
    checks.check_logits(logits, vocab_size)
    checks.check_losses(losses)
    metrics, tokens = checks.check_requests(metrics, tokens)
    checks.check_scale(logits_scale_factor, final_logit_softcap)
    checks.check_rows(labels, mask, logits)
    teachers = checks.by_name(
        "teacher_logits", teacher_logits, [loss.teacher[0] for loss in losses.values() if loss.teacher is not None]
    )
    checks.check_teachers(teachers, logits)
    references = (
        dict(ref_logprobs)
        if isinstance(ref_logprobs, Mapping)
        else ({} if ref_logprobs is None else {"": ref_logprobs})
    )
    for model, array in references.items():
        checks.check_tokens(f"ref_logprobs[{model!r}]" if model else "ref_logprobs", array, logits)
    if segment_ids is not None:
        checks.check_tokens("segment_ids", segment_ids, logits, integer=True)
    if preference_pairs is not None:
        checks.check_pairs(preference_pairs)
    inputs = {
        "advantages": advantages,
        "old_logprobs": old_logprobs,
        "importance_weights": importance_weights,
    }
    for name, array in inputs.items():
        if array is None:
            continue
        if name == "advantages" and checks.is_per_segment(array, logits):
            if segment_ids is None:
                raise ValueError(
                    f"advantages: one per segment ({checks.describe(array)}) needs segment_ids; one per token "
                    f"has shape {tuple(logits.shape[:-1])}"
                )
            num_segments = array.shape[0] if num_segments is None else num_segments
            continue
        checks.check_tokens(name, array, logits)
    counts = {"num_tokens": num_tokens, "num_sequences": num_sequences, "num_pairs": num_pairs}
    for name, count in counts.items():
        checks.check_count(name, count)
    if num_segments is None:
        num_segments = sequence_ranks * checks.token_count(logits)
    return Arguments(
        losses,
        labels,
        mask,
        teachers,
        references,
        inputs,
        segment_ids,
        preference_pairs,
        num_segments,
        counts,
        logits_scale_factor,
        final_logit_softcap,
        vocab_size,
        metrics,
        tokens,
        implementation,
    )


_PLANS: dict[Any, tuple[Plan, list[Number]]] = {}
_MOST_PLANS = 256


def remembered_plan(losses: Mapping[str, Loss], given: Given, **settings: Any) -> tuple[Plan, list[Number]]:
    """``make_plan``, kept for calls that repeat every setting: planning costs more than launching a kernel."""
    key = (tuple(losses.items()), given, tuple(settings.items()))
    try:
        found = _PLANS.get(key)
    except TypeError:  # a hyperparameter that is an array
        return make_plan(losses, given, **settings)
    if found is None:
        found = make_plan(losses, given, **settings)
        if all(isinstance(value, (int, float)) for value in found[1]):
            if len(_PLANS) >= _MOST_PLANS:
                _PLANS.clear()
            _PLANS[key] = found
    return found


def make_pass(arguments: Arguments, losses: Mapping[str, Loss], with_head: bool = True, remember: bool = False) -> Pass:
    """The pass over some of the call's losses; ``with_head``: also over the head's metrics and token outputs."""
    present = {
        **arguments.inputs,
        "labels": arguments.labels,
        "segment_ids": arguments.segment_ids,
        "preference_pairs": arguments.preference_pairs,
    }
    given = checks.given_inputs(present, arguments.teacher_logits, arguments.ref_logprobs)
    settings = {
        "logits_scale_factor": arguments.logits_scale_factor,
        "final_logit_softcap": arguments.final_logit_softcap,
        "head_metrics": arguments.metrics if with_head else (),
        "tokens": arguments.tokens if with_head else (),
        **arguments.counts,
    }
    plan, hyper = (remembered_plan if remember else make_plan)(losses, given, **settings)
    check_labels_given(arguments, losses, plan)
    return Pass(
        plan,
        hyper,
        tuple(arguments.teacher_logits[name] for name in plan.teacher_names),
        tuple(_token_array(arguments, name) for name in plan.input_names),
    )


def _token_array(arguments: Arguments, name: str) -> Array:
    if name.startswith("ref_logprobs"):
        _, _, reference = name.partition("/")
        return arguments.ref_logprobs[reference]
    return arguments.inputs[name]


def check_labels_given(arguments: Arguments, losses: Mapping[str, Loss], plan: Plan) -> None:
    """Labels may be absent only where nothing needs the label's log-probability."""
    if arguments.labels is not None or not plan.needs_labels:
        return
    for name, loss in losses.items():
        planned = next(item for item in plan.losses if item.name == name)
        operands = [operand for part in planned.parts for operand in part.operands]
        sums = [plan.sums[operand.index - 1].base for operand in operands if _is_sum(operand)]
        if any(operand.name == "logprob" for operand in (*operands, *sums)):
            raise ValueError(f"labels: loss {name!r} ({loss.type}) needs them, none were given")
    raise ValueError("labels: a metric or token output that was asked for needs them, none were given")


def _is_sum(operand: Any) -> bool:
    return operand.source in ("sequence", "carried", "chosen", "rejected") and operand.index > 0


def make_passes(arguments: Arguments, remember: bool = False) -> list[Pass]:
    """One pass over everything, or with ``per_loss`` one for each loss; ``remember``: plans may come from a cache."""
    if arguments.implementation != "per_loss":
        return [make_pass(arguments, arguments.losses, remember=remember)]
    return [
        make_pass(arguments, {name: loss}, with_head=i == 0, remember=remember)
        for i, (name, loss) in enumerate(arguments.losses.items())
    ]
