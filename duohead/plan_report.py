"""What a configured head would run on a backend and a device, as data and as a table.

Nothing is computed and no framework is imported: the report reads the same plan that a call makes. One pass reads the
logits once per sweep for all groups together; a group is one softmax of that pass, the one of its effective scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from duohead.checks import FLOATS
from duohead.fields import Number, Rule, nearest
from duohead.loss import Loss
from duohead.plan import Given, Operand, Plan, PlannedLoss, make_plan
from duohead.statistics import rows_of
from duohead.table import table
from duohead.term import INPUTS, TEACHER_STATISTICS

if TYPE_CHECKING:
    from duohead.spec import HeadSpec

BACKENDS = ("torch", "jax")
DEVICES = ("cpu", "cuda")
#: what `compiled` is called in each backend
COMPILED = {"torch": "compiled", "jax": "xla"}
#: what the kernel needs beside the framework
PACKAGES = {"torch": "triton", "jax": "jax-triton"}
ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_OPTIONAL_INPUTS = (*INPUTS, "segment_ids", "preference_pairs")


@dataclass(frozen=True)
class Columns:
    """A number of bytes for one row: ``per_column`` · V."""

    per_column: int
    vocab_size: int | None

    @property
    def bytes(self) -> int | None:
        """The number, or None where V is not known."""
        return None if self.vocab_size is None else self.per_column * self.vocab_size

    def __str__(self) -> str:
        return f"{self.per_column}·V" if self.bytes is None else f"{self.bytes}"


@dataclass(frozen=True)
class Group:
    """One softmax: the losses of one effective logits scale, what they want of it, and what runs them."""

    name: str
    scale: Number
    losses: tuple[str, ...]
    statistics: tuple[str, ...]
    implementation: str
    why: str


@dataclass(frozen=True)
class LossReport:
    """One loss: its group, whether it has a gradient, the inputs it needs and those it uses where given."""

    name: str
    type: str
    group: str
    weight: Number
    has_gradient: bool
    needs: tuple[str, ...]
    optional: tuple[str, ...]
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Pass:
    """One pass over the logits. ``rows``: its float32 statistics, which the one gather of a split vocabulary carries.

    ``read`` counts the logits and teachers once per sweep (statistics, a second for the JSD, the gradient), ``written``
    the gradient, ``floor`` every array once: what a perfect cache would leave.
    """

    losses: tuple[str, ...]
    sweeps: tuple[str, ...]
    teachers: tuple[str, ...]
    rows: tuple[str, ...]
    read: Columns
    written: Columns
    floor: Columns


@dataclass(frozen=True)
class Collective:
    """One collective: where it is needed, which, and how many float32 rows it carries."""

    split: str
    kind: str
    rows: int
    per: str


@dataclass(frozen=True)
class PlanReport:
    """The plan of a head; ``print`` it, or read its fields."""

    backend: str
    device: str
    dtype: str
    vocab_size: int | None
    groups: tuple[Group, ...]
    losses: tuple[LossReport, ...]
    passes: tuple[Pass, ...]
    collectives: tuple[Collective, ...]

    @property
    def implementation(self) -> str:
        """What runs all groups."""
        return self.groups[0].implementation

    def __str__(self) -> str:
        size = "V not given" if self.vocab_size is None else f"V = {self.vocab_size}"
        count = f"{len(self.passes)} pass{'es' if len(self.passes) > 1 else ''} over the logits"
        parts = [
            f"{self.backend} on {self.device}, {self.dtype}, {size}: {count}, one gradient",
            table(
                ("group", "scale", "losses", "implementation", "statistics"),
                [
                    (
                        group.name,
                        show_number(group.scale),
                        ", ".join(group.losses) or "(the head's own)",
                        group.implementation,
                        ", ".join(group.statistics),
                    )
                    for group in self.groups
                ],
            ),
            self._reasons(),
            table(
                ("loss", "type", "group", "weight", "gradient", "needs", "uses where given"),
                [
                    (
                        loss.name,
                        loss.type,
                        loss.group,
                        show_number(loss.weight),
                        "yes" if loss.has_gradient else "no, reported alone",
                        ", ".join(loss.needs) or "-",
                        ", ".join(loss.optional) or "-",
                    )
                    for loss in self.losses
                ],
            ),
            table(
                ("pass over the logits", "sweeps", "statistics rows", "bytes read/row", "written/row", "floor/row"),
                [
                    (
                        ", ".join(item.losses),
                        ", ".join(item.sweeps),
                        str(len(item.rows)),
                        str(item.read),
                        str(item.written),
                        str(item.floor),
                    )
                    for item in self.passes
                ],
            ),
            table(
                ("collective", "where split", "float32 rows"),
                [(item.kind, item.split, f"{item.rows} per {item.per}") for item in self.collectives],
            ),
        ]
        return "\n\n".join(parts)

    def _reasons(self) -> str:
        reasons = dict.fromkeys(f"{group.implementation}: {group.why}" for group in self.groups)
        return "\n".join(reasons)


def report(
    head: HeadSpec, backend: str, device: str, *, vocab_size: int | None = None, dtype: str = "bfloat16"
) -> PlanReport:
    """The plan of ``head``; see ``HeadSpec.plan``."""
    for name, value, valid in (("backend", backend, BACKENDS), ("device", device, DEVICES), ("dtype", dtype, FLOATS)):
        if value not in valid:
            raise ValueError(f"{name}: got {value!r}{nearest(str(value), valid)}")
    size = head.vocab_size if vocab_size is None else vocab_size
    Rule("vocab_size", "", None, minimum=1, whole=True, optional=True).check(size, "")
    implementation, why = choose(head, backend, device, dtype)
    sets = [head.losses]
    if implementation == "per_loss":
        sets = [{name: loss} for name, loss in head.losses.items()]
    everything = everything_given(head.losses)
    plans = [_plan(head, losses, everything, with_head=i == 0) for i, losses in enumerate(sets)]
    groups: list[Group] = []
    for plan, hyper in plans:
        groups += _groups(plan, hyper, implementation, why)
    groups = [_named(group, i, len(groups)) for i, group in enumerate(groups)]
    return PlanReport(
        backend,
        device,
        dtype,
        size,
        tuple(groups),
        tuple(_loss_report(head, name, loss, groups, everything) for name, loss in head.losses.items()),
        tuple(_pass(plan, ITEM_SIZES[dtype], size) for plan, _ in plans),
        tuple(item for plan, _ in plans for item in _collectives(plan)),
    )


def choose(head: HeadSpec, backend: str, device: str, dtype: str) -> tuple[str, str]:
    """(implementation, why) of a head on a backend and a device, for logits of a dtype."""
    wanted, compiled = head.loss_implementation, COMPILED[backend]
    if wanted == "per_loss":
        return "per_loss", "loss_implementation is per_loss: each loss by itself"
    if wanted == "compiled":
        return compiled, "loss_implementation is compiled"
    if wanted == "triton":
        if dtype == "float64":
            raise ValueError("dtype: the kernel computes in float32, and loss_implementation is triton; got 'float64'")
        where = "" if device == "cuda" else "; on the CPU that is Triton's interpreter (TRITON_INTERPRET=1)"
        return "triton", f"loss_implementation is triton{where}"
    if device != "cuda":
        return compiled, "auto: no GPU"
    if dtype == "float64":
        return compiled, "auto: float64 logits, and the kernel computes in float32"
    for name, reason in why_not(head.losses).items():
        return compiled, f"auto: the kernel cannot take {name} ({head.losses[name].type}): {reason}"
    return "triton", f"auto: a GPU, and the kernel takes every loss (where {PACKAGES[backend]} is installed)"


def why_not(losses: Mapping[str, Loss]) -> dict[str, str]:
    """Loss name → why the Triton kernel cannot take it; empty where it takes the set."""
    from duohead.kernels.eligible import why_not as kernel_why_not

    return dict(kernel_why_not(losses))


def everything_given(losses: Mapping[str, Loss]) -> Given:
    """A call with every input that these losses could ask for."""
    teachers = dict.fromkeys(loss.teacher[0] for loss in losses.values() if loss.teacher is not None)
    references = dict.fromkeys(loss.reference for loss in losses.values() if loss.reference is not None)
    inputs = frozenset(("labels", *_OPTIONAL_INPUTS))
    return Given(inputs, tuple(teachers), tuple(references) or ("",))


def _plan(
    head: HeadSpec, losses: Mapping[str, Loss], given: Given, *, with_head: bool
) -> tuple[Plan, Sequence[Number]]:
    return make_plan(
        losses,
        given,
        logits_scale_factor=head.logits_scale_factor,
        final_logit_softcap=head.final_logit_softcap,
        head_metrics=head.metrics if with_head else (),
        tokens=head.tokens if with_head else (),
    )


def _groups(plan: Plan, hyper: Sequence[Number], implementation: str, why: str) -> list[Group]:
    return [
        Group(
            "",
            hyper[softmax.scale],
            tuple(loss.name for loss in plan.losses if i in softmaxes_of(plan, loss)),
            _statistics(plan, i),
            implementation,
            why,
        )
        for i, softmax in enumerate(plan.softmaxes)
    ]


def _named(group: Group, index: int, count: int) -> Group:
    name = "monolithic" if count == 1 else f"monolithic_{index}"
    if group.implementation == "per_loss":
        name = ", ".join(group.losses) or "head"
    return Group(name, group.scale, group.losses, group.statistics, group.implementation, group.why)


def softmaxes_of(plan: Plan, loss: PlannedLoss) -> set[int]:
    """The softmaxes that a planned loss takes statistics from."""
    operands = [operand for part in loss.parts for operand in part.operands]
    return {index for operand in operands for index in _softmaxes_of_operand(plan, operand)}


def _softmaxes_of_operand(plan: Plan, operand: Operand) -> set[int]:
    if operand.source in ("sequence", "carried", "chosen", "rejected"):
        return _softmaxes_of_operand(plan, plan.sums[operand.index - 1].base) if operand.index > 0 else set()
    if operand.source != "statistic":
        return set()
    if operand.name in TEACHER_STATISTICS:
        return {plan.pairings[operand.index].softmax}
    return {operand.index}


def _statistics(plan: Plan, index: int) -> tuple[str, ...]:
    softmax = plan.softmaxes[index]
    found = ["lse"]
    for name in ("logprob", "entropy", "mean_logprob"):
        if getattr(softmax, name):
            found.append(name)
    for pairing in plan.pairings:
        if pairing.softmax != index:
            continue
        model = plan.teacher_names[plan.teachers[pairing.teacher].array]
        found += [f"{name}({model})" for name in TEACHER_STATISTICS if getattr(pairing, name)]
    return tuple(dict.fromkeys(found))


def _loss_report(head: HeadSpec, name: str, loss: Loss, groups: Sequence[Group], everything: Given) -> LossReport:
    plan, _ = _plan(head, {name: loss}, everything, with_head=False)
    needs = ["labels"] if plan.needs_labels else []
    if loss.teacher is not None:
        needs.append(f"teacher_logits[{loss.teacher[0]!r}]")
    optional = []
    for item in _OPTIONAL_INPUTS:
        without = _plan_without(head, name, loss, everything, item)
        if without is None:
            needs.append(item)
        elif without != plan:
            optional.append(item)
    planned = plan.losses[0]
    outputs = [output for item in planned.measurements for output in item.outputs]
    metrics = [*(metric for output in outputs for metric, _ in output.metrics), *planned.counts]
    group = next((group.name for group in groups if name in group.losses), "-")
    is_zero = isinstance(loss.weight, (int, float)) and loss.weight == 0
    return LossReport(name, loss.type, group, loss.weight, not is_zero, tuple(needs), tuple(optional), tuple(metrics))


def _plan_without(head: HeadSpec, name: str, loss: Loss, everything: Given, item: str) -> Plan | None:
    """The loss's plan in a call that lacks one input, or None where the loss cannot do without."""
    references = () if item == "ref_logprobs" else everything.references
    given = Given(everything.inputs - {item}, everything.teachers, references)
    try:
        return _plan(head, {name: loss}, given, with_head=False)[0]
    except ValueError:
        return None


def _pass(plan: Plan, item_size: int, vocab_size: int | None) -> Pass:
    sweeps = ("statistics", "jsd", "gradient") if plan.has_jsd else ("statistics", "gradient")
    arrays = 1 + len(plan.teacher_names)
    return Pass(
        tuple(loss.name for loss in plan.losses),
        sweeps,
        plan.teacher_names,
        tuple(f"{name}[{i}]" for name, i in rows_of(plan)),
        Columns(len(sweeps) * arrays * item_size, vocab_size),
        Columns(item_size, vocab_size),
        Columns((arrays + 1) * item_size, vocab_size),
    )


def _collectives(plan: Plan) -> list[Collective]:
    found = [Collective("vocabulary", "all-gather, forward", len(rows_of(plan)), "token")]
    if plan.has_jsd:
        rows = sum(2 * len(pairing.jsd) for pairing in plan.pairings)
        found.append(Collective("vocabulary", "all-reduce, forward", rows, "token"))
    if plan.needs_segments:
        found.append(Collective("sequences", "all-reduce, forward", 1 + len(plan.sums), "segment"))
    return found


def show_number(value: Any) -> str:
    """A number, or that it is known at run time only."""
    return f"{value:g}" if isinstance(value, (int, float)) else "runtime"
