"""The configuration of a head: which losses, at which scale, run how."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from duohead.checks import check_losses, check_requests, check_scale
from duohead.fields import Number, nearest
from duohead.loss import Loss, loss_type
from duohead.terms import CrossEntropy

IMPLEMENTATIONS = ("auto", "compiled", "triton", "per_loss")


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A head's losses and the scale, softcap and vocabulary that they share.

    No losses means plain cross-entropy, named ``ce``.

    >>> HeadSpec.from_dict({"losses": {"z": {"type": "z_loss", "weight": 0.1}}}).losses["z"].weight
    0.1
    """

    losses: Mapping[str, Loss] = field(default_factory=dict)
    loss_implementation: str = "auto"
    logits_scale_factor: Number = 1.0
    final_logit_softcap: Number = None
    vocab_size: int | None = None
    metrics: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        losses = dict(self.losses) or {"ce": CrossEntropy()}
        check_losses(losses)
        object.__setattr__(self, "losses", losses)
        if self.loss_implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"loss_implementation: got {self.loss_implementation!r}"
                f"{nearest(str(self.loss_implementation), IMPLEMENTATIONS)}"
            )
        check_scale(self.logits_scale_factor, self.final_logit_softcap)
        metrics, tokens = check_requests(self.metrics, self.tokens)
        object.__setattr__(self, "metrics", metrics)
        object.__setattr__(self, "tokens", tokens)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> HeadSpec:
        """The spec of a configuration: the whole document or what stands under ``head:``."""
        body = config["head"] if set(config) == {"head"} else config
        losses = {
            name: loss_from_dict(item, f"losses.{name}.") for name, item in (body.get("losses") or {}).items()
        }
        rest = {key: value for key, value in body.items() if key != "losses"}
        names = [item.name for item in dataclasses.fields(cls)]
        for key in rest:
            if key not in names:
                raise ValueError(f"{key}: unknown key of the head{nearest(key, names)}")
        return cls(losses=losses, **rest)

    def __iter__(self) -> Iterator[str]:
        return iter(self.losses)


def loss_from_dict(config: Mapping[str, Any], path: str = "") -> Loss:
    """One loss from its configuration; every message begins with the path of the key."""
    if not isinstance(config, Mapping):
        raise TypeError(f"{path.rstrip('.')}: must be a mapping with a type, got {config!r}")
    if "type" not in config:
        raise ValueError(f"{path}type: missing; a loss names its type")
    try:
        cls = loss_type(config["type"])
        names = [rule.name for rule in cls.rules]
        for key in config:
            if key != "type" and key not in names:
                raise ValueError(f"{key}: unknown key of {cls.type!r}{nearest(str(key), names)}")
        return cls(**{key: value for key, value in config.items() if key != "type"})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}{error}") from None
