"""Distillation from a teacher's logits: soft cross-entropy, forward KL, reverse KL, Jensen-Shannon."""

from __future__ import annotations

from dataclasses import dataclass

from duohead.fields import Number, choice, number, text
from duohead.loss import Loss, Part, register
from duohead.namespace import where
from duohead.term import Term


def teacher_cross_entropy_loss(teacher_cross_entropy):  # type: ignore[no-untyped-def]
    return teacher_cross_entropy, 1.0


def forward_kl_loss(forward_kl):  # type: ignore[no-untyped-def]
    return forward_kl, 1.0


def reverse_kl_loss(reverse_kl):  # type: ignore[no-untyped-def]
    return reverse_kl, 1.0


def jsd_loss(jsd, forward_kl, reverse_kl, jsd_beta):  # type: ignore[no-untyped-def]
    is_forward = where(jsd_beta <= 0.0, 1.0, 0.0)
    is_reverse = where(jsd_beta >= 1.0, 1.0, 0.0)
    value = where(is_forward > 0.5, forward_kl, where(is_reverse > 0.5, reverse_kl, jsd))
    return value, 1.0 - is_forward - is_reverse, is_forward, is_reverse


TERMS = {
    "cross_entropy": Term(teacher_cross_entropy_loss),
    "forward_kl": Term(forward_kl_loss),
    "reverse_kl": Term(reverse_kl_loss),
    "jsd": Term(jsd_loss),
}


@register("distillation")
@dataclass(frozen=True, kw_only=True)
class Distillation(Loss):
    """Distance from the student p = softmax(x/T_s) to the teacher q = softmax(y/T), in nats.

    ``cross_entropy`` −Σ q log p, ``forward_kl`` Σ q log(q/p), ``reverse_kl`` Σ p log(p/q), ``jsd``
    β·KL(q‖M) + (1−β)·KL(p‖M) with M = βq + (1−β)p, where β = 0 is forward and β = 1 reverse KL
    (Agarwal et al., 2024, arXiv:2306.13649). Hinton's form (2015, arXiv:1503.02531) sets both temperatures to T
    and the weight to T².

    >>> Distillation(loss_type="forward_kl", temperature=2.0).reference_model
    'teacher'
    """

    loss_type: str = choice("cross_entropy", "which distance", tuple(TERMS))
    reference_model: str = text("teacher", "the name of the teacher in `teacher_logits`")
    temperature: Number = number(1.0, "T, divides the teacher's scaled logits", above=0.0)
    student_temperature: Number = number(1.0, "T_s, divides the student's scaled logits", above=0.0)
    jsd_beta: Number = number(0.5, "β, the teacher's weight in the mixture of `jsd`", minimum=0.0, maximum=1.0)

    @property
    def student_scale(self) -> tuple[Number, Number]:
        return (self.logits_scale_factor, self.student_temperature)

    @property
    def teacher(self) -> tuple[str, Number]:
        return (self.reference_model, self.temperature)

    def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
        values = {"jsd_beta": self.jsd_beta} if self.loss_type == "jsd" else {}
        return (Part(TERMS[self.loss_type], values),)
