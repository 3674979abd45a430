"""Refuses the other framework's arrays: they cross only through the explicit zero-copy helpers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ARRAYS = (
    "logits",
    "labels",
    "mask",
    "teacher_logits",
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "importance_weights",
    "segment_ids",
    "preference_pairs",
)
JAX = ("jax", "jaxlib")
TORCH = ("torch",)
_SHARE = {"torch": "duohead_jax.from_torch", "jax": "duohead_torch.from_jax", "jaxlib": "duohead_torch.from_jax"}


def refuse_foreign(arguments: Mapping[str, Any], kind: str, refused: tuple[str, ...]) -> None:
    """Raises a TypeError for an array whose class comes from one of the packages ``refused``."""
    for name, array in _arrays(arguments):
        package = type(array).__module__.partition(".")[0]
        if package in refused:
            share = _SHARE.get(package)
            raise TypeError(
                f"{name}: must be {kind}, got {type(array).__module__}.{type(array).__name__}"
                + (f"; {share}({name}) shares its memory" if share else "")
            )


def _arrays(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ARRAYS:
        value = arguments.get(name)
        if isinstance(value, Mapping):
            yield from ((f"{name}[{key!r}]", array) for key, array in value.items())
        elif value is not None:
            yield name, value
