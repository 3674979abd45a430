"""Nested tuples of tensors ↔ a flat list: what an autograd node saves between forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from duohead.plan import Plan


def flatten(tree: Any) -> list[torch.Tensor]:
    """All tensors of nested tuples, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    # A plan is a deep tree without a tensor: walking it would cost more than launching a kernel.
    if isinstance(tree, tuple) and not isinstance(tree, Plan):
        found: list[torch.Tensor] = []
        for item in tree:
            found += flatten(item)
        return found
    return []


def structure(tree: Any) -> Any:
    """The tree with every tensor left out (True in its place): static, and hashable where its other leaves are."""
    if isinstance(tree, torch.Tensor):
        return True
    if isinstance(tree, tuple) and not isinstance(tree, Plan):
        return type(tree), tuple(structure(item) for item in tree)
    return ("static", tree)


def rebuild(shape: Any, tensors: list[torch.Tensor]) -> Any:
    """The tree of a structure, taking tensors from the front of the list."""
    if shape is True:
        return tensors.pop(0)
    kind, items = shape
    if kind == "static":
        return items
    children = [rebuild(item, tensors) for item in items]
    return tuple(children) if kind is tuple else kind(*children)
