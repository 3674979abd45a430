"""YAML text → plain data, stricter and less surprising than the YAML 1.1 default.

A key given twice is refused instead of the last one winning, and ``1e-4`` is a number, as in YAML 1.2 and JSON.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_FILE_ENDINGS = (".yaml", ".yml", ".json")


def load(source: str | Path) -> Any:
    """The data of a YAML file (a path, or a string that names one) or of YAML text.

    Raises:
        FileNotFoundError: a path that is not there.
        ValueError: text that is not YAML, or that gives a key twice; the message names the line.
    """
    text, where = _text(source)
    import yaml

    try:
        return yaml.load(text, _loader(yaml))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"{where}{line}: {getattr(error, 'problem', None) or error}") from None


def _text(source: str | Path) -> tuple[str, str]:
    """(YAML text, what to call it in a message)."""
    if isinstance(source, Path) or _names_a_file(source):
        return Path(source).read_text(encoding="utf-8"), str(source)
    return source, "YAML text"


def _names_a_file(source: str) -> bool:
    if not isinstance(source, str):
        raise TypeError(f"configuration: must be YAML text or the path of a file, got {source!r}")
    return "\n" not in source and ":" not in source and source.strip().endswith(_FILE_ENDINGS)


def _loader(yaml: Any) -> Any:
    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """SafeLoader that refuses a key given twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value}: given twice", key.start_mark)
                if isinstance(key.value, str):
                    seen.add(key.value)
            return super().construct_mapping(node, deep)  # type: ignore[no-any-return]

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    return Loader
