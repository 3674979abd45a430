"""The elementwise functions a term may use, as placeholders until a term is bound.

A term is written once against these names and bound (``duohead.bind``) to NumPy, torch, jax.numpy or
Triton. Calling a placeholder that was never bound raises, so an unbound term cannot compute anything.
"""

from __future__ import annotations

from typing import Any

NAMES = ("exp", "log", "where", "minimum", "maximum", "abs", "sqrt", "sigmoid")


class Unbound:
    """A placeholder for one namespace function."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        raise RuntimeError(
            f"duohead.namespace.{self.name} is a placeholder: bind the term to a framework first "
            f"(duohead.bind.bind), or pass it to monolithic_loss, which does"
        )

    def __repr__(self) -> str:
        return f"<unbound {self.name}>"


# Declared as Any so that a type checker lets terms do array arithmetic on their results.
exp: Any = Unbound("exp")
log: Any = Unbound("log")
where: Any = Unbound("where")
minimum: Any = Unbound("minimum")
maximum: Any = Unbound("maximum")
abs: Any = Unbound("abs")
sqrt: Any = Unbound("sqrt")
sigmoid: Any = Unbound("sigmoid")
