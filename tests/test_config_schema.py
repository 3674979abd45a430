"""The JSON Schema accepts what is read and refuses what is refused, and the page of the keys is up to date."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from config_inputs import CONFIGS
from schema_check import is_valid
from test_config_refusals import REFUSED

import duohead
from duohead import HeadSpec
from duohead.config_docs import PAGE, built_in, page
from duohead.config_schema import DRAFT, schema
from duohead.fields import Number, number
from duohead.loss import LOSS_TYPES
from duohead.plan import HEAD_METRICS, TOKENS
from duohead.yaml_text import load

#: refused for what one key alone cannot show: names, numbers without a text, several losses taken together
BEYOND_A_SCHEMA = {
    "beside head",
    "beside head misspelt",
    "weight nan",
    "weight inf",
    "number name",
    "several references",
    "group collides",
    "flat collides",
    "mixed scales",
    "mixed scales head",
    "groups disagree",
    "group and head disagree",
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    found = schema()
    config = load(path)
    assert is_valid(config, found, found)
    assert is_valid(config["head"], found, found)
    assert is_valid(HeadSpec.from_dict(config).to_dict(), found, found)


def test_what_is_read_in_other_forms_is_valid() -> None:
    found = schema()
    group = {"type": "monolithic", "use_triton": None, "losses": {"ce": {"type": "label"}}}
    for config in (None, {}, {"head": None}, {"losses": None}, group, {"losses": group}, {"losses": {"g": group}}):
        HeadSpec.from_dict(config)
        assert is_valid(config, found, found), config


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in BEYOND_A_SCHEMA])
def test_what_is_refused_is_invalid(name: str) -> None:
    found = schema()
    assert not is_valid(REFUSED[name][0], found, found)


def test_schema_is_plain_json_of_the_draft() -> None:
    found = schema()
    assert found["$schema"] == DRAFT == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(found)) == found
    for cls in LOSS_TYPES.values():
        described = found["$defs"][f"type_{cls.type}"]["properties"]
        assert set(described) == {"type", *(rule.name for rule in cls.rules)}


def test_a_registered_type_enters_the_schema() -> None:
    @duohead.register("short_lived")
    @dataclass(frozen=True, kw_only=True)
    class ShortLived(duohead.ZLoss):
        """A z-loss with a margin."""

        margin: Number = number(0.5, "what costs nothing", minimum=0.0, below=2.0)

    try:
        found = schema()
        assert is_valid({"losses": {"m": {"type": "short_lived", "margin": 1.0}}}, found, found)
        assert not is_valid({"losses": {"m": {"type": "short_lived", "margin": 2.0}}}, found, found)
        assert found["$defs"]["type_short_lived"]["description"] == "A z-loss with a margin."
        assert "short_lived" not in page()
    finally:
        del LOSS_TYPES["short_lived"]
    assert not is_valid({"losses": {"m": {"type": "short_lived"}}}, schema(), schema())


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m duohead.config_docs"


def test_the_page_names_every_type_key_and_metric() -> None:
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", page(), re.MULTILINE | re.DOTALL))
    assert set(sections) == {cls.type for cls in built_in()}
    common = {rule.name for rule in duohead.ZLoss.rules}
    for cls in built_in():
        for rule in cls.rules:
            assert rule.name in common or f"| `{rule.name}` | " in sections[cls.type]
        for metric in cls.metric_names:
            assert f"`{metric}`" in sections[cls.type]
    for name in (*HEAD_METRICS, *TOKENS, *common, *(rule.name for rule in HeadSpec.rules)):
        assert f"`{name}`" in page()


def test_the_pages_own_type_works() -> None:
    code = re.findall(r"```python\n(.*?)```", page(), re.DOTALL)[-1]
    assert "@duohead.register" in code
    check = "print(duohead.HeadSpec.from_dict({'losses': {'s': {'type': 'squared_surprise'}}}).plan())"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, check=False)
    # A term's source must be readable for the kernel: code given with -c is not, and the plan says so.
    assert done.returncode == 0, done.stderr
    assert "squared_surprise" in done.stdout


def test_metrics_that_the_page_lists_are_those_reported() -> None:
    """Every metric that a plan would report is one that its type declares."""
    for cls in built_in():
        reported: Any = HeadSpec(losses={"it": cls()}).plan("torch", "cpu").losses[0].metrics
        assert sorted(reported) == sorted(cls.metric_names), cls.type
