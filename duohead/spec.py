"""The configuration of a head: which losses, at which scale, run how."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from duohead.checks import SCALE, SOFTCAP, check_losses
from duohead.configuration import head_arguments, is_losses, loss_from_dict
from duohead.fields import Number, Rule, choice, declared, names, rules_of, whole_number
from duohead.loss import LOSS_TYPES, Loss
from duohead.plan import HEAD_METRICS, TOKENS
from duohead.terms import CrossEntropy

if TYPE_CHECKING:
    from duohead.plan_report import PlanReport

IMPLEMENTATIONS = ("auto", "compiled", "triton", "per_loss")
__all__ = ["IMPLEMENTATIONS", "HeadSpec", "loss_from_dict", "losses_from_config"]


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A head's losses and the scale, softcap and vocabulary that they share.

    No losses means plain cross-entropy, named ``ce``. Whatever can be refused is refused here, before any array is
    seen; messages begin with the path of the key.

    >>> HeadSpec.from_dict({"losses": {"z": {"type": "z_loss", "weight": 0.1}}}).losses["z"].weight
    0.1
    >>> HeadSpec.from_yaml("losses: {z: {type: z_loss, wieght: 0.1}}")
    Traceback (most recent call last):
        ...
    ValueError: losses.z.wieght: unknown key of 'z_loss'; did you mean 'weight'?
    """

    rules: ClassVar[tuple[Rule, ...]] = ()

    losses: Mapping[str, Loss] = field(default_factory=dict)
    loss_implementation: str = choice("auto", "how the losses run", IMPLEMENTATIONS)
    logits_scale_factor: Number = declared(SCALE)
    final_logit_softcap: Number = declared(SOFTCAP)
    vocab_size: int | None = whole_number(None, "columns at and past it are padding", minimum=1, optional=True)
    metrics: tuple[str, ...] = names("metrics of the head itself, reported as `head/<name>`", HEAD_METRICS)
    tokens: tuple[str, ...] = names("values to return per token", TOKENS)

    def __post_init__(self) -> None:
        check_losses(self.losses)
        losses = dict(self.losses) or {"ce": CrossEntropy()}
        for rule in self.rules:
            rule.check(getattr(self, rule.name), "")
        _check_references(losses)
        if self.loss_implementation == "triton":
            _check_triton(losses)
        object.__setattr__(self, "losses", losses)
        object.__setattr__(self, "metrics", tuple(self.metrics))
        object.__setattr__(self, "tokens", tuple(self.tokens))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any] | None) -> HeadSpec:
        """The spec of a configuration: the whole document, or what stands under its ``head:``.

        Other sections of a document (``optimizer: …``) are left alone. The older form
        ``{type: monolithic, use_triton: …, losses: {…}}`` is read under ``losses:`` and as the head itself.

        Raises:
            TypeError, ValueError: with the path of the key, the reason and the nearest valid name.
        """
        return cls(**head_arguments(config, tuple(item.name for item in dataclasses.fields(cls))))

    @classmethod
    def from_yaml(cls, source: str | Path) -> HeadSpec:
        """The spec of a YAML (or JSON) file, or of YAML text.

        A ``Path``, or a string that ends in ``.yaml``, ``.yml`` or ``.json``, is a file.
        """
        from duohead.yaml_text import load

        return cls.from_dict(load(source))

    @classmethod
    def of(cls, source: HeadSpec | Mapping[str, Any] | str | Path) -> HeadSpec:
        """A HeadSpec as it is, or that of a mapping, a YAML file or YAML text."""
        if isinstance(source, HeadSpec):
            return source
        if isinstance(source, (str, Path)):
            return cls.from_yaml(source)
        return cls.from_dict(source)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain data: every loss with its type, and whatever is not at its default.

        >>> HeadSpec(losses={"z": CrossEntropy(weight=0.5)}).to_dict()
        {'losses': {'z': {'type': 'label', 'weight': 0.5}}}
        """
        for name, loss in self.losses.items():
            if LOSS_TYPES.get(loss.type) is not type(loss):
                raise ValueError(
                    f"losses.{name}: {type(loss).__name__} has no name in configurations; register it with "
                    "duohead.register, or with register= of the decorator that made it"
                )
        losses = {name: {"type": loss.type, **_changed(loss, loss.rules)} for name, loss in self.losses.items()}
        return {"losses": losses, **_changed(self, self.rules)}

    def plan(
        self,
        backend: str = "torch",
        device: str = "cuda",
        *,
        vocab_size: int | None = None,
        dtype: str = "bfloat16",
    ) -> PlanReport:
        """What would run: groups, implementation and why, statistics, collectives and bytes; ``print`` shows a table.

        Args:
            backend: ``torch`` or ``jax``.
            device: ``cpu`` or ``cuda``.
            vocab_size: V for the bytes (default: the spec's own; without one they are given per column).
            dtype: that of the logits, and of the teachers' logits.
        """
        from duohead.plan_report import report

        return report(self, backend, device, vocab_size=vocab_size, dtype=dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.losses)


HeadSpec.rules = rules_of(HeadSpec)


def losses_from_config(config: HeadSpec | Mapping[str, Any] | str | Path) -> dict[str, Loss]:
    """The losses of a configuration by name: of a document, a head, what stands under ``losses:``, or YAML of these.

    >>> losses_from_config({"z": {"type": "z_loss"}, "ce": {"type": "label"}})["ce"].type
    'label'
    """
    if isinstance(config, (str, Path)):
        from duohead.yaml_text import load

        config = load(config)
    if is_losses(config):
        config = {"losses": config}
    return dict(HeadSpec.of(config).losses)  # type: ignore[arg-type]


def _changed(holder: Any, rules: tuple[Rule, ...]) -> dict[str, Any]:
    """The fields that are not at their defaults, as plain data."""
    found = {}
    for rule in rules:
        value = getattr(holder, rule.name)
        if isinstance(value, tuple):
            value = list(value)
        elif hasattr(value, "item"):
            value = value.item()  # a scalar array or NumPy number
        default = list(rule.default) if isinstance(rule.default, tuple) else rule.default
        if value != default:
            found[rule.name] = value
    return found


def _check_references(losses: Mapping[str, Loss]) -> None:
    """With several references, a loss that reads ``ref_logprobs`` must say which."""
    references = sorted({loss.reference for loss in losses.values() if loss.reference is not None})
    if len(references) < 2:
        return
    for name, loss in losses.items():
        if loss.reference is None and _reads_reference(loss):
            raise ValueError(
                f"losses.{name}.reference_model: missing; the other losses name several references "
                f"({', '.join(references)}), so {loss.type!r} must name its own"
            )


def _reads_reference(loss: Loss) -> bool:
    given = frozenset(("ref_logprobs", "old_logprobs", "advantages", "importance_weights", "segment_ids"))
    terms = [part.term for part in loss.parts(given)] + [item.measure for item in loss.measurements(given)]
    return any("ref_log" in operand for term in terms for operand in term.operands.values())


def _check_triton(losses: Mapping[str, Loss]) -> None:
    """Refuses a forced kernel that cannot take one of the losses."""
    from duohead.plan_report import why_not

    for name, reason in why_not(losses).items():
        raise ValueError(f"loss_implementation: 'triton' cannot take losses.{name} ({losses[name].type}): {reason}")
