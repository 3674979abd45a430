"""Generates docs/configuration.md from the specs: ``python -m duohead.config_docs`` rewrites the page."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from duohead.fields import Rule, rules_of
from duohead.loss import LOSS_TYPES, Loss
from duohead.plan import HEAD_METRICS, TOKENS
from duohead.spec import HeadSpec
from duohead.table import markdown_table

#: the fields that every loss has
LOSS_RULES = rules_of(Loss)
PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

_INTRODUCTION = """# Configuration

<!-- Generated from the specs by `python -m duohead.config_docs`; a test checks that it is up to date. -->

A head is configured in YAML, JSON or as plain Python data, under the key `head` of a document or by itself:

```yaml
head:
  loss_implementation: auto
  losses:
    ce:      {type: label}
    z:       {type: z_loss, weight: 1e-4}
    distill: {type: distillation, reference_model: teacher, temperature: 2.0}
```

```python
from duohead import HeadSpec

head = HeadSpec.from_yaml("config.yaml")       # a path or YAML text; HeadSpec.from_dict takes plain data
print(head.plan("torch", "cuda"))              # what would run, and why; `duohead-plan config.yaml` prints the same
```

`MonolithicLoss(head)` of `duohead_torch`, `make_loss(head)` of `duohead_jax`, and `monolithic_loss(logits, head,
...)` of both take it. `head.to_dict()` is the configuration again, without what is at its default. `duohead-plan
--schema` prints a JSON Schema, with which editors complete and check a configuration.

Names of losses are free: a non-empty string without `/`, and not `head`. Two losses of one type are fine, a name
given twice is not. No losses at all means plain cross-entropy, named `ce`. A loss of weight 0 is reported and has no
gradient. Other sections of the document, beside `head`, are left alone. Whatever is wrong is refused when the
configuration is read, with the path of the key, the reason and the nearest valid name:

```
losses.rl.epsilon: unknown key of 'grpo'; did you mean 'epsilon_low'?
```
"""

_IMPLEMENTATIONS = """## Implementations

| `loss_implementation` | |
| --- | --- |
| `auto` | the Triton kernel on a GPU where it takes every loss, else the compiled path |
| `compiled` | `torch.compile` in PyTorch, XLA in JAX |
| `triton` | the Triton kernel; a set that it cannot take is refused when the configuration is read |
| `per_loss` | each loss by itself: the escape hatch, and the oracle that the others are compared with |

## Groups

Losses of one effective logits scale (the head's times the loss's, over a student temperature) share one softmax.
Losses of several scales still share one pass: the logits are read once for all softmaxes, and one gradient is
written. The plan names the groups `monolithic`, or `monolithic_0`, `monolithic_1` and so on where there are several.

## The older nested form

A group `{type: monolithic, use_triton: null, losses: {...}}` is read among the losses, in their place, or as the head
itself. Its losses join the others under their own names, and must agree in `logits_scale_factor`. `use_triton: true`
means `loss_implementation: triton`, `false` means `compiled`, `null` means `auto`; a loss in a group has no
`use_triton` of its own.
"""

_OWN_TYPES = """## Types of your own

A loss type that is registered is valid here, in the plan, in the JSON Schema and in `duohead-parity`:

```python
from dataclasses import dataclass
import duohead
from duohead.fields import Number, number
from duohead.loss import Part
from duohead.term import Term

def squared_surprise(logprob, threshold):
    surprise = -logprob - threshold
    return surprise * surprise, -2.0 * surprise      # the value, and its derivative in logprob

TERM = Term(squared_surprise)

@duohead.register("squared_surprise")
@dataclass(frozen=True, kw_only=True)
class SquaredSurprise(duohead.Loss):
    threshold: Number = number(0.0, "nats of surprise that cost nothing", minimum=0.0)

    def parts(self, given):
        return (Part(TERM, {"threshold": self.threshold}),)
```
"""


def page() -> str:
    """The page, in Markdown."""
    sections = [
        _INTRODUCTION,
        "## The head\n\n" + _fields(HeadSpec.rules, [("`losses`", "none: cross-entropy", "name → loss", "the losses")]),
        f"`metrics` are reported as `head/<name>`: {_words(HEAD_METRICS)}. "
        f"`tokens` are returned per token in `aux.tokens`: {_words(TOKENS)}.\n",
        _IMPLEMENTATIONS,
        "## Fields of every loss\n\n" + _fields(LOSS_RULES),
        "Metrics are named `<name of the loss>/<metric>`.\n",
        *(_type(cls) for cls in built_in()),
        _OWN_TYPES,
    ]
    return "\n".join(sections)


def built_in() -> list[type[Loss]]:
    """The loss types that come with duohead, a user's own left out."""
    return [cls for cls in LOSS_TYPES.values() if cls.__module__.startswith("duohead.terms.")]


def _type(cls: type[Loss]) -> str:
    common = {rule.name: rule for rule in LOSS_RULES}
    own = [rule for rule in cls.rules if rule != common.get(rule.name)]
    parts = [f"## `{cls.type}`\n", _description(cls)]
    parts.append(_fields(own) if own else "No fields beside those of every loss.\n")
    for item in cls.only_with[len(Loss.only_with) :]:
        parts.append(f"`{item.field}` belongs to `{item.other}: {item.value}` and is refused elsewhere.\n")
    if cls.metric_names:
        parts.append(f"Metrics: {_words(cls.metric_names)}.\n")
    return "\n".join(parts)


def _description(cls: type[Loss]) -> str:
    """The class's docstring without its doctest."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return text.split("\n\n>>> ")[0] + "\n"


def _fields(rules: Any, first: Any = ()) -> str:
    rows = [(f"`{rule.name}`", _default(rule), _range(rule), rule.doc) for rule in rules]
    return markdown_table(("key", "default", "range", "meaning"), [*first, *rows]) + "\n"


def _default(rule: Rule) -> str:
    value = list(rule.default) if isinstance(rule.default, tuple) else rule.default
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _range(rule: Rule) -> str:
    if rule.choices is None:
        return rule.range
    return ("a list of " if rule.many else "") + _words(rule.choices)


def _words(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> int:
    """Rewrites the page of a source checkout."""
    if not PAGE.parent.is_dir():
        print(f"{PAGE.parent}: no such folder; the page belongs to a source checkout", file=sys.stderr)
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
