"""A small JSON Schema validator for the keywords that duohead's schema uses; another keyword fails the test."""

from __future__ import annotations

import re
from typing import Any

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}
ANNOTATIONS = {"$schema", "title", "description", "default", "$defs"}


def is_type(value: Any, name: str) -> bool:
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if name == "integer":
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value)
    return isinstance(value, TYPES[name])


def is_valid(value: Any, schema: Any, root: dict[str, Any]) -> bool:
    """Whether ``value`` meets ``schema``, whose references lead into ``root``."""
    if isinstance(schema, bool):
        return schema
    checks = {keyword: item for keyword, item in schema.items() if keyword not in ANNOTATIONS}
    return all(_keyword(value, keyword, item, schema, root) for keyword, item in checks.items())


def _keyword(value: Any, keyword: str, item: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    if keyword in ("then", "else"):
        return True  # with their `if`
    if keyword == "if":
        branch = "then" if is_valid(value, item, root) else "else"
        return is_valid(value, schema.get(branch, True), root)
    if keyword == "$ref":
        target: Any = root
        for part in item.removeprefix("#/").split("/"):
            target = target[part]
        return is_valid(value, target, root)
    if keyword == "type":
        return any(is_type(value, name) for name in ([item] if isinstance(item, str) else item))
    if keyword == "enum":
        return any(value == choice and type(value) is type(choice) for choice in item)
    if keyword == "const":
        return bool(value == item)
    if keyword == "allOf":
        return all(is_valid(value, part, root) for part in item)
    if keyword == "not":
        return not is_valid(value, item, root)
    if keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        return not is_type(value, "number") or _in_bound(value, keyword, item)
    if keyword in ("minLength", "pattern"):
        text_is_right = isinstance(value, str) and (
            len(value) >= item if keyword == "minLength" else re.search(item, value) is not None
        )
        return not isinstance(value, str) or text_is_right
    if keyword == "items":
        return not isinstance(value, list) or all(is_valid(part, item, root) for part in value)
    return not isinstance(value, dict) or _object(value, keyword, item, schema, root)


def _in_bound(value: float, keyword: str, bound: float) -> bool:
    return {
        "minimum": value >= bound,
        "exclusiveMinimum": value > bound,
        "maximum": value <= bound,
        "exclusiveMaximum": value < bound,
    }[keyword]


def _object(value: dict[str, Any], keyword: str, item: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    if keyword == "properties":
        return all(is_valid(value[name], part, root) for name, part in item.items() if name in value)
    if keyword == "required":
        return all(name in value for name in item)
    if keyword == "additionalProperties":
        others = [part for name, part in value.items() if name not in schema.get("properties", {})]
        return all(is_valid(part, item, root) for part in others)
    if keyword == "propertyNames":
        return all(is_valid(name, item, root) for name in value)
    if keyword == "minProperties":
        return len(value) >= item
    if keyword == "dependentRequired":
        return all(name not in value or all(other in value for other in others) for name, others in item.items())
    raise AssertionError(f"the schema uses the keyword {keyword!r}, which this check does not know")
