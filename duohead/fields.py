"""Declared fields of a loss: default, range and meaning in one place.

The same declaration checks a value when a spec is made, generates the JSON Schema and fills the docs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

Number = Any  # a Python number, or a scalar array: hyperparameters are runtime values


def nearest(name: str, names: Sequence[str]) -> str:
    """``"; did you mean 'z_loss'?"`` where a valid name is near, else the list of valid names."""
    close = get_close_matches(str(name), list(names), 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; valid: {', '.join(sorted(names))}"


@dataclass(frozen=True)
class Rule:
    """What one field may hold."""

    name: str
    doc: str
    default: Any
    choices: tuple[str, ...] | None = None
    text: bool = False
    optional: bool = False
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    whole: bool = False
    many: bool = False

    @property
    def range(self) -> str:
        """The allowed values in words, as in messages and docs."""
        if self.many:
            return "a list of " + ", ".join(self.choices or ())
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.text:
            return "a name" + (" or null" if self.optional else "")
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in ((">=", self.minimum), (">", self.above), ("<=", self.maximum), ("<", self.below))
            if bound is not None
        ]
        kind = "a whole number" if self.whole else "a number"
        words = f"{kind} " + " and ".join(bounds) if bounds else kind
        return words + (" or null" if self.optional else "")

    def check(self, value: Any, path: str) -> None:
        """Raises ValueError or TypeError unless ``value`` is allowed; scalar arrays pass unread."""
        if value is None and self.optional:
            return
        if self.many:
            self._check_many(value, path)
            return
        if self.choices is not None:
            if not isinstance(value, str) or value not in self.choices:
                raise ValueError(f"{path}{self.name}: got {value!r}{nearest(str(value), self.choices)}")
            return
        if self.text:
            if not isinstance(value, str) or not value:
                raise TypeError(f"{path}{self.name}: must be {self.range}, {self.doc}, got {value!r}")
            return
        if self.whole and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{path}{self.name}: must be {self.range}, got {value!r}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not self._in_range(value):
                raise ValueError(f"{path}{self.name}: must be {self.range}, got {value!r}")
            return
        if isinstance(value, (str, bytes, bool, list, tuple, dict)) or getattr(value, "shape", None) != ():
            raise TypeError(f"{path}{self.name}: must be {self.range}, got {value!r}")

    def _check_many(self, value: Any, path: str) -> None:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{path}{self.name}: must be {self.range}, got {value!r}")
        for item in value:
            if item not in (self.choices or ()):
                raise ValueError(f"{path}{self.name}: got {item!r}{nearest(str(item), self.choices or ())}")

    def _in_range(self, value: float) -> bool:
        if value != value or value in (math.inf, -math.inf):
            return False
        if self.minimum is not None and value < self.minimum:
            return False
        if self.above is not None and value <= self.above:
            return False
        if self.maximum is not None and value > self.maximum:
            return False
        return not (self.below is not None and value >= self.below)


def number(
    default: float | None,
    doc: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    optional: bool = False,
) -> Any:
    """A numeric field: a runtime value that may change each step."""
    return declared(
        Rule("", doc, default, minimum=minimum, above=above, maximum=maximum, below=below, optional=optional)
    )


def choice(default: str, doc: str, choices: Sequence[str]) -> Any:
    """A field that takes one of a few words; it is part of the program's structure."""
    return declared(Rule("", doc, default, choices=tuple(choices)))


def text(default: str | None, doc: str, *, optional: bool = False) -> Any:
    """A field that takes a name."""
    return declared(Rule("", doc, default, text=True, optional=optional))


def whole_number(default: int | None, doc: str, *, minimum: float | None = None, optional: bool = False) -> Any:
    """A field that takes an integer of the program's structure."""
    return declared(Rule("", doc, default, minimum=minimum, optional=optional, whole=True))


def names(doc: str, choices: Sequence[str]) -> Any:
    """A field that takes a list of a few words; none by default."""
    return declared(Rule("", doc, (), choices=tuple(choices), many=True))


def declared(rule: Rule) -> Any:
    """A dataclass field that carries its rule."""
    return dataclasses.field(default=rule.default, metadata={"rule": rule})


def rules_of(cls: type) -> tuple[Rule, ...]:
    """The declared rules of a dataclass, in field order."""
    return tuple(
        dataclasses.replace(field.metadata["rule"], name=field.name)
        for field in dataclasses.fields(cls)
        if "rule" in field.metadata
    )
