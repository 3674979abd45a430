"""Everything in the README runs: its Python blocks in order, its files exist, its commands are the Makefile's."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_blocks_run_in_order() -> None:
    found = blocks("python")
    assert len(found) >= 4
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(found):
        exec(compile(block, f"README.md block {number}", "exec"), namespace)


def test_the_yaml_blocks_are_heads_that_plan() -> None:
    from duohead import HeadSpec

    found = blocks("yaml")
    assert found
    for block in found:
        spec = HeadSpec.from_yaml(block)
        assert spec.losses
        assert HeadSpec.from_dict(spec.to_dict()) == spec


def test_the_linked_files_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_commands_are_those_of_the_makefile_and_the_scripts() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    scripts = re.findall(r"^(duohead-[a-z]+) =", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    commands = " ".join(blocks("bash"))
    used_targets = re.findall(r"^make ([a-z]+)", "\n".join(blocks("bash")), re.MULTILINE)
    assert set(used_targets) <= set(targets)
    assert {"demo", "test"} <= set(used_targets)
    assert set(re.findall(r"\b(duohead-[a-z]+)\b", commands)) <= set(scripts)
