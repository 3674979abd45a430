"""Random configurations, drawn from the JSON Schema."""

from __future__ import annotations

from typing import Any

from config_inputs import VOCAB
from hypothesis import strategies as st
from schema_check import is_valid

from duohead.config_docs import built_in
from duohead.config_schema import schema

SCHEMA = schema()
#: numbers stay where float32 is well conditioned
SMALLEST, LARGEST = 0.25, 1.5
NAMES = ("teacher", "ref")


def heads() -> st.SearchStrategy[dict[str, Any]]:
    """A head with one to four losses of the built-in types."""
    types = [cls.type for cls in built_in()]
    loss = st.sampled_from(types).flatmap(lambda name: of_object(SCHEMA["$defs"][f"type_{name}"]))
    losses = st.dictionaries(st.sampled_from(("a", "b", "c", "d")), loss, min_size=1, max_size=4)
    fields = {name: item for name, item in SCHEMA["$defs"]["head"]["properties"].items() if "$ref" not in item}
    for name in ("type", "use_triton", "loss_implementation"):
        del fields[name]
    rest = st.fixed_dictionaries({}, optional={name: of_field(name, item) for name, item in fields.items()})
    return st.builds(lambda losses, rest: {"losses": losses, **rest}, losses, rest)


def of_object(definition: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with its required and some of its other properties, that meets all of the definition."""
    fields = {name: of_field(name, item) for name, item in definition["properties"].items()}
    required = {name: fields.pop(name) for name in definition["required"]}
    drawn = st.fixed_dictionaries(required, optional=fields)
    return drawn.filter(lambda value: is_valid(value, definition, SCHEMA))


def of_field(name: str, item: dict[str, Any]) -> st.SearchStrategy[Any]:
    """A value of one property."""
    if "const" in item:
        return st.just(item["const"])
    if "enum" in item:
        return st.sampled_from(item["enum"])
    kinds = [item["type"]] if isinstance(item["type"], str) else item["type"]
    return st.one_of([_of_kind(kind, name, item) for kind in kinds])


def _of_kind(kind: str, name: str, item: dict[str, Any]) -> st.SearchStrategy[Any]:
    if kind == "null":
        return st.none()
    if kind == "string":
        return st.sampled_from(NAMES)
    if kind == "array":
        return st.lists(st.sampled_from(item["items"]["enum"]), unique=True)
    if kind == "integer":
        return st.integers(max(item.get("minimum", 1), 2), VOCAB)
    assert kind == "number", kind
    low = item.get("minimum", SMALLEST if "exclusiveMinimum" in item else -LARGEST)
    high = min(item.get("maximum", LARGEST), item.get("exclusiveMaximum", LARGEST) - 0.125)
    return st.floats(low, high, width=16).map(float)
