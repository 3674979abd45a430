"""A configuration, as plain data → the arguments of a HeadSpec. Every refusal begins with the path of its key.

Three forms mean the same: flat losses, one or more groups ``{type: monolithic, losses: …}`` among them, and such a
group as the head itself. A group's losses join the flat ones under their own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from duohead.fields import nearest
from duohead.loss import LOSS_TYPES, Loss

GROUP = "monolithic"
_GROUP_KEYS = ("type", "use_triton", "losses")
#: what others call a type
_KNOWN_AS = {
    "cross_entropy": "label",
    "nll": "label",
    "kl": "distillation",
    **dict.fromkeys(("forward_kl", "reverse_kl", "jsd"), "distillation"),
    **dict.fromkeys(("ppo", "cispo", "sapo", "reinforce", "dapo"), "grpo"),
    "ipo": "dpo",
}
_USE_TRITON = {True: "triton", False: "compiled"}


class _Found(NamedTuple):
    """What has been read so far: losses with the paths they stand at, and the groups' ``use_triton`` by path."""

    losses: dict[str, Loss]
    paths: dict[str, str]
    use_triton: dict[str, bool]


def head_arguments(config: Mapping[str, Any] | None, head_keys: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a HeadSpec from a whole document or from what stands under ``head:``."""
    body = _head_of(config, head_keys)
    found = _Found({}, {}, {})
    is_group = "type" in body
    known = (*head_keys, "type", "use_triton") if is_group else head_keys
    for key in body:
        if key == "use_triton" and not is_group:
            raise ValueError(f"use_triton: belongs to {{type: {GROUP}}}; elsewhere it is loss_implementation")
        if key not in known:
            raise ValueError(f"{key}: unknown key of the head{nearest(str(key), known)}")
    if is_group:
        _check_group_type(body["type"], "")
        _read_use_triton(body, "", found)
    _read_losses(body.get("losses"), "losses", found, in_group=is_group)
    if is_group:
        _check_one_scale(tuple(found.losses), found)
    arguments = {key: value for key, value in body.items() if key in head_keys}
    arguments["losses"] = found.losses
    implementation = _implementation(arguments.get("loss_implementation"), found)
    if implementation is not None:
        arguments["loss_implementation"] = implementation
    return arguments


def loss_from_dict(config: Any, path: str = "") -> Loss:
    """One loss from its configuration; ``path`` is its key's, with a dot behind it."""
    if not isinstance(config, Mapping):
        raise TypeError(f"{path.rstrip('.')}: must be a mapping with a type, got {config!r}")
    if "type" not in config:
        raise ValueError(f"{path}type: missing; a loss names its type, one of {', '.join(sorted(LOSS_TYPES))}")
    try:
        cls = _loss_type(config["type"])
        names = [rule.name for rule in cls.rules]
        for key in config:
            if key == "use_triton":
                raise ValueError(
                    "use_triton: a loss has no implementation of its own, all share one pass; "
                    "set loss_implementation on the head"
                )
            if key != "type" and key not in names:
                raise ValueError(f"{key}: unknown key of {cls.type!r}{nearest(str(key), names)}")
        return cls(**{key: value for key, value in config.items() if key != "type"})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{path}{error}") from None


def _loss_type(name: Any) -> type[Loss]:
    """The spec class of a type name, or a ValueError that names the one that was meant."""
    if isinstance(name, str) and name in LOSS_TYPES:
        return LOSS_TYPES[name]
    meant = _KNOWN_AS.get(name) if isinstance(name, str) else None
    hint = f"; did you mean {meant!r}?" if meant else nearest(str(name), (*LOSS_TYPES, GROUP))
    raise ValueError(f"type: got {name!r}{hint}")


def is_losses(config: Any) -> bool:
    """Whether this is what stands under ``losses:``: names with typed mappings, or a group."""
    if not isinstance(config, Mapping) or not config:
        return False
    return all(isinstance(item, Mapping) and "type" in item for item in config.values())


def _head_of(config: Any, head_keys: tuple[str, ...]) -> Mapping[str, Any]:
    """What stands under ``head:``, or all of it where there is no such key."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise TypeError(f"configuration: must be a mapping, got {config!r}")
    if "head" not in config:
        return config
    for key in config:
        # Other sections of a training framework's document are not ours; a misplaced or misspelt key of the head is.
        meant = get_close_matches(str(key), head_keys, 1, 0.8)
        if meant:
            raise ValueError(f"{key}: stands beside `head`; {meant[0]!r} belongs under it")
    head = config["head"]
    if head is not None and not isinstance(head, Mapping):
        raise TypeError(f"head: must be a mapping, got {head!r}")
    return head or {}


def _read_losses(config: Any, path: str, found: _Found, *, in_group: bool) -> None:
    """Enters the losses at ``path``: flat ones, groups among them, or one group as the whole of it."""
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise TypeError(f"{path}: must be a mapping from name to loss, got {config!r}")
    if isinstance(config.get("type"), str):
        _read_group(config, f"{path}.", found, in_group)
        return
    for name, item in config.items():
        where = f"{path}.{name}."
        check_name(name, path)
        if isinstance(item, Mapping) and item.get("type") == GROUP:
            _read_group(item, where, found, in_group)
            continue
        if name in found.losses:
            raise ValueError(
                f"{where[:-1]}: the name is taken by {found.paths[name]}; all losses of a head share one space of names"
            )
        found.losses[name] = loss_from_dict(item, where)
        found.paths[name] = where[:-1]


def _read_group(config: Mapping[str, Any], path: str, found: _Found, in_group: bool) -> None:
    _check_group_type(config["type"], path)
    if in_group:
        raise ValueError(f"{path}type: a {GROUP} group holds losses, not another group")
    for key in config:
        if key not in _GROUP_KEYS:
            raise ValueError(f"{path}{key}: unknown key of {GROUP!r}{nearest(str(key), _GROUP_KEYS)}")
    _read_use_triton(config, path, found)
    if not config.get("losses"):
        raise ValueError(f"{path}losses: missing; a {GROUP} group needs at least one loss")
    before = set(found.losses)
    _read_losses(config["losses"], f"{path}losses", found, in_group=True)
    _check_one_scale(tuple(name for name in found.losses if name not in before), found)


def _check_group_type(group_type: Any, path: str) -> None:
    if group_type != GROUP:
        raise ValueError(f"{path}type: must be {GROUP!r} where losses stand beside it, got {group_type!r}")


def _read_use_triton(config: Mapping[str, Any], path: str, found: _Found) -> None:
    value = config.get("use_triton")
    if value is None:
        return
    if not isinstance(value, bool):
        raise TypeError(f"{path}use_triton: must be true, false or null, got {value!r}")
    found.use_triton[f"{path}use_triton"] = value


def _check_one_scale(names: tuple[str, ...], found: _Found) -> None:
    """A group was one softmax, so its losses agree in their scale; flat losses need not."""
    first = names[0] if names else ""
    for name in names[1:]:
        scale, expected = found.losses[name].logits_scale_factor, found.losses[first].logits_scale_factor
        if scale is not expected and scale != expected:
            raise ValueError(
                f"{found.paths[name]}.logits_scale_factor: a {GROUP} group has one scale, got {scale!r} here and "
                f"{expected!r} in {found.paths[first]}; flat losses may differ"
            )


def _implementation(given: Any, found: _Found) -> Any:
    """The head's implementation, from its own key and the groups' ``use_triton``, which must agree."""
    said = "" if given in (None, "auto") else f"loss_implementation: {given}"
    for path, value in found.use_triton.items():
        wanted = _USE_TRITON[value]
        if said and wanted != given:
            raise ValueError(f"{path}: {str(value).lower()} disagrees with {said}; the losses of a head share one pass")
        given, said = wanted, f"{path}: {str(value).lower()}"
    return given


def check_name(name: Any, path: str) -> None:
    """Refuses a loss name that could not be told apart in ``name/metric``."""
    if not isinstance(name, str) or not name or "/" in name or name == "head":
        raise ValueError(f"{path}: a name is a non-empty string without '/', and not 'head', got {name!r}")
