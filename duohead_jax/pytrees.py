"""Loss specs and HeadSpec as pytrees: their numbers are leaves, so a jitted step may take them as arguments.

A scale or student temperature that is exactly 1 stays static: losses that leave it alone then keep sharing a softmax.
"""

from __future__ import annotations

from typing import Any

import jax

from duohead.loss import Loss, on_declared
from duohead.spec import HeadSpec

_KEEP_ONE = ("logits_scale_factor", "student_temperature")


def _is_leaf(name: str, value: Any) -> bool:
    if value is None or isinstance(value, (str, bool)):
        return False
    return not (name in _KEEP_ONE and isinstance(value, (int, float)) and value == 1)


def _flatten_loss(loss: Loss) -> tuple[tuple[Any, ...], Any]:
    fields = [(rule.name, getattr(loss, rule.name)) for rule in loss.rules]
    dynamic = [(name, value) for name, value in fields if _is_leaf(name, value)]
    static = tuple((name, value) for name, value in fields if not _is_leaf(name, value))
    return tuple(value for _, value in dynamic), (tuple(name for name, _ in dynamic), static)


def _unflatten(cls: type) -> Any:
    def build(structure: Any, children: Any) -> Any:
        names, static = structure
        # Past the checks of __init__: a leaf may be a tracer, a sentinel or a sharding.
        made: Any = object.__new__(cls)
        for name, value in (*static, *zip(names, children, strict=True)):
            object.__setattr__(made, name, value)
        return made

    return build


_HEAD_LEAVES = ("losses", "logits_scale_factor", "final_logit_softcap")
_HEAD_STATIC = ("loss_implementation", "vocab_size", "metrics", "tokens")


def _flatten_head(head: HeadSpec) -> tuple[tuple[Any, ...], Any]:
    static = tuple((name, getattr(head, name)) for name in _HEAD_STATIC)
    return tuple(getattr(head, name) for name in _HEAD_LEAVES), (_HEAD_LEAVES, static)


def register_loss_class(cls: type) -> None:
    """Makes one loss class a pytree."""
    jax.tree_util.register_pytree_node(cls, _flatten_loss, _unflatten(cls))


jax.tree_util.register_pytree_node(HeadSpec, _flatten_head, _unflatten(HeadSpec))
on_declared(register_loss_class)
