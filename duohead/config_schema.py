"""The configuration as a JSON Schema (draft 2020-12), generated from the registered loss types.

Editors complete and check a configuration with it; ``duohead-plan --schema`` prints it. A type that is registered
before the call is part of it.
"""

from __future__ import annotations

from typing import Any

from duohead.configuration import GROUP
from duohead.fields import Rule
from duohead.loss import LOSS_TYPES, Loss
from duohead.spec import HeadSpec

DRAFT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]


def schema() -> Schema:
    """The schema of a document with a ``head:``, or of what stands under it."""
    return {
        "$schema": DRAFT,
        "title": "duohead head",
        "description": "The losses of a language-model head. A document holds it under `head`, or is it.",
        "type": ["object", "null"],
        "if": {"required": ["head"]},
        "then": {"properties": {"head": {"$ref": "#/$defs/head"}}},
        "else": {"$ref": "#/$defs/head"},
        "$defs": {
            "head": _head(),
            "losses": _losses(f"A loss, or a {GROUP} group of losses.", _by_type((*LOSS_TYPES, GROUP))),
            "grouped_losses": _losses("A loss of the group.", _by_type(tuple(LOSS_TYPES))),
            f"type_{GROUP}": _group(),
            **{f"type_{name}": _loss(cls) for name, cls in LOSS_TYPES.items()},
        },
    }


def rule_schema(rule: Rule) -> Schema:
    """One field."""
    found: Schema = {"description": rule.doc}
    if not _is_required(rule):
        found["default"] = rule.default
    if rule.many:
        return {**found, "type": "array", "items": {"enum": list(rule.choices or ())}, "default": list(rule.default)}
    if rule.choices is not None:
        return {**found, "enum": list(rule.choices)}
    kind = "string" if rule.text else "integer" if rule.whole else "number"
    found["type"] = [kind, "null"] if rule.optional else kind
    if rule.text:
        found["minLength"] = 1
    for keyword, bound in (
        ("minimum", rule.minimum),
        ("exclusiveMinimum", rule.above),
        ("maximum", rule.maximum),
        ("exclusiveMaximum", rule.below),
    ):
        if bound is not None:
            found[keyword] = bound
    return found


def _head() -> Schema:
    fields = {rule.name: rule_schema(rule) for rule in HeadSpec.rules}
    return {
        "type": ["object", "null"],
        "properties": {
            "losses": {"$ref": "#/$defs/losses"},
            **fields,
            "type": {"const": GROUP, "description": "The older form: the head as one group."},
            "use_triton": _use_triton(),
        },
        "dependentRequired": {"use_triton": ["type"]},
        "if": {"required": ["type"]},
        "then": {"properties": {"losses": {"$ref": "#/$defs/grouped_losses"}}},
        "additionalProperties": False,
    }


def _losses(description: str, item: Schema) -> Schema:
    """A mapping from name to loss, or a group in its place."""
    return {
        "description": "Name → loss; none means plain cross-entropy, named `ce`.",
        "type": ["object", "null"],
        "if": {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]},
        "then": {"$ref": f"#/$defs/type_{GROUP}"} if GROUP in item["properties"]["type"]["enum"] else False,
        "else": {
            "propertyNames": {"pattern": "^[^/]+$", "not": {"const": "head"}},
            "additionalProperties": {"description": description, **item},
        },
    }


def _by_type(types: tuple[str, ...]) -> Schema:
    """A mapping whose ``type`` says which definition it must meet."""
    return {
        "type": "object",
        "properties": {"type": {"enum": list(types)}},
        "required": ["type"],
        "allOf": [
            {
                "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
                "then": {"$ref": f"#/$defs/type_{name}"},
            }
            for name in types
        ],
    }


def _group() -> Schema:
    return {
        "description": "The older form: losses of one scale, in a group.",
        "type": "object",
        "properties": {
            "type": {"const": GROUP},
            "use_triton": _use_triton(),
            "losses": {"$ref": "#/$defs/grouped_losses", "type": "object", "minProperties": 1},
        },
        "required": ["type", "losses"],
        "additionalProperties": False,
    }


def _use_triton() -> Schema:
    return {
        "description": "true: loss_implementation triton; false: compiled; null: auto.",
        "type": ["boolean", "null"],
        "default": None,
    }


def _loss(cls: type[Loss]) -> Schema:
    summary = (cls.__doc__ or cls.__name__).strip().split("\n\n")[0]
    found: Schema = {
        "description": " ".join(summary.split()),
        "type": "object",
        "properties": {
            "type": {"const": cls.type},
            **{rule.name: rule_schema(rule) for rule in cls.rules},
        },
        "required": ["type", *(rule.name for rule in cls.rules if _is_required(rule))],
        "additionalProperties": False,
    }
    conditions = [_only_with(cls, *item) for item in cls.only_with]
    if conditions:
        found["allOf"] = conditions
    return found


def _is_required(rule: Rule) -> bool:
    """A field that may not be null and has no other default: a user's term needs the number."""
    return rule.default is None and not rule.optional


def _only_with(cls: type[Loss], field: str, other: str, value: str, required: bool) -> Schema:
    """``field`` is null unless ``other`` is ``value``; where ``required`` it is then given."""
    rule = next(rule for rule in cls.rules if rule.name == other)
    is_value: Schema = {"properties": {other: {"const": value}}}
    if rule.default != value:
        is_value["required"] = [other]
    then: Schema = {"required": [field], "properties": {field: {"not": {"type": "null"}}}} if required else {}
    return {"if": is_value, "then": then, "else": {"properties": {field: {"type": "null"}}}}
