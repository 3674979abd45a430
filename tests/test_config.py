"""The forms of a configuration: what they mean, and that each example runs in both frameworks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_inputs import CONFIGS, assert_same, inputs_for, run_jax, run_torch

import duohead
from duohead import CrossEntropy, Distillation, HeadSpec, ZLoss, losses_from_config
from duohead.fields import Number, number
from duohead.loss import LOSS_TYPES, Part
from duohead.term import Term

DESIGN = """
head:
  loss_implementation: auto          # auto | compiled | triton | per_loss
  logits_scale_factor: 1.0
  final_logit_softcap: null
  losses:
    ce:      {type: label}
    z:       {type: z_loss, weight: 0.1}
    distill: {type: distillation, reference_model: teacher, temperature: 2.0}
    rl:      {type: grpo, epsilon_low: 0.2, epsilon_high: 0.28, metrics: basic}
    dpo:     {type: dpo, reference_model: ref}
"""


def test_there_are_examples_of_every_type() -> None:
    types = {loss.type for path in CONFIGS for loss in HeadSpec.from_yaml(path).losses.values()}
    assert types == {cls.type for cls in LOSS_TYPES.values() if cls.__module__.startswith("duohead.terms.")}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_example_reads_plans_runs_and_round_trips(path: Path) -> None:
    head = HeadSpec.from_yaml(path)
    assert HeadSpec.from_dict(head.to_dict()) == head
    assert HeadSpec.from_dict({"head": head.to_dict()}) == head
    for backend in ("torch", "jax"):
        for device in ("cpu", "cuda"):
            report = str(head.plan(backend, device))
            assert all(name in report for name in head.losses)
    vocab = 7 if head.vocab_size is None else head.vocab_size + 3
    inputs = inputs_for(head, vocab=vocab)
    found = run_torch(head, inputs, "eager", "float64")
    assert np.isfinite(found[1]).all()
    assert np.abs(found[1]).sum() > 0
    assert_same(run_jax(head, inputs, "auto", "float64"), found, 1e-12)


def test_the_design_document() -> None:
    head = HeadSpec.from_yaml(DESIGN)
    assert list(head.losses) == ["ce", "z", "distill", "rl", "dpo"]
    assert head.losses["distill"] == Distillation(temperature=2.0)
    assert head.to_dict() == {
        "losses": {
            "ce": {"type": "label"},
            "z": {"type": "z_loss", "weight": 0.1},
            "distill": {"type": "distillation", "temperature": 2.0},
            "rl": {"type": "grpo", "epsilon_high": 0.28, "metrics": "basic"},
            "dpo": {"type": "dpo", "reference_model": "ref"},
        }
    }


@pytest.mark.parametrize("nothing", [None, {}, {"head": None}, {"head": {}}, {"losses": None}, {"losses": {}}])
def test_no_losses_means_cross_entropy(nothing: Any) -> None:
    assert HeadSpec.from_dict(nothing) == HeadSpec()
    assert HeadSpec().losses == {"ce": CrossEntropy()}
    assert losses_from_config(nothing or {}) == {"ce": CrossEntropy()}


def group(**more: Any) -> dict[str, Any]:
    return {"type": "monolithic", "losses": {"ce": {"type": "label"}, "z": {"type": "z_loss", "weight": 0.1}}, **more}


@pytest.mark.parametrize(
    ("use_triton", "implementation"), [(True, "triton"), (False, "compiled"), (None, "auto"), ("absent", "auto")]
)
def test_the_nested_form_means_the_flat_one(use_triton: Any, implementation: str) -> None:
    nested = group() if use_triton == "absent" else group(use_triton=use_triton)
    losses = {"ce": CrossEntropy(), "z": ZLoss(weight=0.1)}
    expected = HeadSpec(losses=losses, loss_implementation=implementation)
    for config in (nested, {"head": nested}, {"losses": nested}, {"losses": {"lm": nested}}):
        assert HeadSpec.from_dict(config) == expected
    # Beside flat losses it keeps its place.
    mixed = HeadSpec.from_dict({"losses": {"a": {"type": "entropy"}, "lm": nested, "b": {"type": "entropy"}}})
    assert list(mixed.losses) == ["a", "ce", "z", "b"]


def test_a_group_may_repeat_what_the_head_says_and_have_a_scale_of_its_own() -> None:
    config = {"loss_implementation": "triton", "losses": {"lm": group(use_triton=True), "b": {"type": "entropy"}}}
    assert HeadSpec.from_dict(config).loss_implementation == "triton"
    scaled = {
        "a": {"type": "monolithic", "losses": {"ce": {"type": "label", "logits_scale_factor": 2.0}}},
        "b": {"type": "monolithic", "losses": {"z": {"type": "z_loss"}}},
    }
    assert len(HeadSpec.from_dict({"losses": scaled}).plan("torch", "cpu").groups) == 2


def test_other_sections_of_a_document_are_left_alone() -> None:
    document = {"optimizer": {"lr": 1e-3}, "head": {"losses": {"z": {"type": "z_loss"}}}, "seed": 3}
    assert HeadSpec.from_dict(document).losses == {"z": ZLoss()}


def test_losses_from_every_form() -> None:
    losses = {"ce": {"type": "label"}, "z": {"type": "z_loss"}}
    expected = {"ce": CrossEntropy(), "z": ZLoss()}
    forms: list[Any] = [losses, {"losses": losses}, {"head": {"losses": losses}}, {"lm": group()}]
    assert [losses_from_config(form) for form in forms[:3]] == [expected] * 3
    assert losses_from_config(forms[3])["z"] == ZLoss(weight=0.1)
    assert losses_from_config("{ce: {type: label}, z: {type: z_loss}}") == expected
    assert losses_from_config(HeadSpec(losses=expected)) == expected


def test_yaml_sources(tmp_path: Path) -> None:
    text = "losses:\n  z: {type: z_loss, weight: 1e-4}\n"
    path = tmp_path / "head.yaml"
    path.write_text(text, encoding="utf-8")
    expected = HeadSpec(losses={"z": ZLoss(weight=1e-4)})
    assert HeadSpec.from_yaml(text) == HeadSpec.from_yaml(path) == HeadSpec.from_yaml(str(path)) == expected
    assert HeadSpec.of(expected) is expected
    assert HeadSpec.of(str(path)) == HeadSpec.of(expected.to_dict()) == expected
    merged = "base: &base {type: z_loss, weight: 2.0}\nhead: {losses: {z: {<<: *base, weight: 1e-4}}}"
    assert HeadSpec.from_yaml(merged) == expected
    assert HeadSpec.from_yaml("") == HeadSpec()


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".0001", "+1e-4", "100e-6"])
def test_yaml_numbers(text: str) -> None:
    assert HeadSpec.from_yaml(f"losses: {{z: {{type: z_loss, weight: {text}}}}}").losses["z"].weight == 1e-4


def test_numbers_from_arrays_are_written_as_plain_numbers() -> None:
    head = HeadSpec(losses={"z": ZLoss(weight=np.float32(0.5))}, logits_scale_factor=np.array(2.0))
    assert head.to_dict() == {"losses": {"z": {"type": "z_loss", "weight": 0.5}}, "logits_scale_factor": 2.0}
    assert type(head.to_dict()["logits_scale_factor"]) is float


def test_reading_needs_neither_framework_and_yaml_only_for_yaml() -> None:
    code = (
        "import sys, duohead\n"
        "duohead.HeadSpec.from_dict({'loss_implementation': 'triton'}).plan()\n"
        "import duohead.config_schema, duohead.plan_command, duohead.config_docs\n"
        "duohead.config_schema.schema(), duohead.config_docs.page()\n"
        "print([name for name in ('torch', 'jax', 'triton', 'yaml') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_module_and_make_loss_take_every_form(tmp_path: Path) -> None:
    import jax.numpy as jnp
    import torch

    from duohead_jax import make_loss
    from duohead_torch import MonolithicLoss

    path = tmp_path / "head.yaml"
    text = "{loss_implementation: per_loss, final_logit_softcap: 2.0, logits_scale_factor: 0.5, vocab_size: 3}"
    path.write_text(text, encoding="utf-8")
    logits = np.array([[1.0, -2.0, 3.0, 90.0]])
    capped = 0.5 * 2.0 * np.tanh(logits[0, :3] / 2.0)
    expected = np.log(np.exp(capped).sum()) - capped[1]
    for source in (HeadSpec.from_yaml(text), HeadSpec.from_yaml(text).to_dict(), text, path, str(path)):
        loss, _ = MonolithicLoss(source)(torch.tensor(logits), labels=torch.tensor([1]))
        assert float(loss) == pytest.approx(expected, rel=1e-12)
        loss, _ = make_loss(source)(jnp.asarray(logits), labels=jnp.array([1]))
        assert float(loss) == pytest.approx(expected, rel=1e-12)


def big_exponentials(jaxpr: Any, shape: tuple[int, ...]) -> int:
    """How many exponentials of arrays of this shape a jaxpr holds, in all of its inner jaxprs too."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name in ("exp", "exp2") and equation.outvars[0].aval.shape == shape
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    count += big_exponentials(inner, shape)
    return count


@pytest.mark.parametrize(("scales", "softmaxes"), [((1.0, 1.0, 1.0), 1), ((1.0, 2.0, 1.0), 2), ((1.0, 2.0, 3.0), 3)])
def test_each_scale_is_one_softmax_and_each_softmax_one_exponential_a_sweep(
    scales: tuple[float, ...], softmaxes: int
) -> None:
    import jax

    from duohead_jax import monolithic_loss_and_grad

    types = ("label", "z_loss", "entropy")
    losses = {name: {"type": name, "logits_scale_factor": scale} for name, scale in zip(types, scales, strict=True)}
    head = HeadSpec.from_dict({"losses": losses})
    report = head.plan("jax", "cpu")
    assert len(report.groups) == softmaxes
    assert len(report.passes) == 1
    logits, labels = np.zeros((5, 11), np.float32), np.zeros(5, np.int32)
    traced = jax.make_jaxpr(lambda x: monolithic_loss_and_grad(x, head, labels=labels))(logits)
    sweeps = len(report.passes[0].sweeps)
    assert sweeps == 2
    assert big_exponentials(traced.jaxpr, (5, 11)) == softmaxes * sweeps
    gradients = [variable.aval for variable in traced.jaxpr.outvars if variable.aval.shape == (5, 11)]
    assert len(gradients) == 1


def test_two_scales_equal_two_calls() -> None:
    head = HeadSpec.from_dict(
        {"losses": {"a": {"type": "label"}, "b": {"type": "z_loss", "weight": 0.01, "logits_scale_factor": 2.0}}}
    )
    inputs = inputs_for(head)
    alone = [run_torch(HeadSpec(losses={name: loss}), inputs, "eager") for name, loss in head.losses.items()]
    loss, gradient = run_torch(head, inputs, "eager")
    assert loss["loss"] == pytest.approx(alone[0][0]["loss"] + alone[1][0]["loss"], rel=1e-6)
    np.testing.assert_allclose(gradient, alone[0][1] + alone[1][1], rtol=1e-5, atol=1e-7)


def test_a_loss_of_weight_zero_is_reported_without_gradient() -> None:
    head = HeadSpec.from_dict({"losses": {"ce": {"type": "label"}, "h": {"type": "entropy", "weight": 0}}})
    inputs = inputs_for(head)
    scalars, gradient = run_torch(head, inputs, "eager")
    alone, expected = run_torch(HeadSpec(), inputs, "eager")
    assert scalars["losses/h"] > 0
    assert scalars["loss"] == alone["loss"]
    np.testing.assert_array_equal(gradient, expected)


def squared_surprise(logprob, threshold):  # type: ignore[no-untyped-def]
    surprise = -logprob - threshold
    return surprise * surprise, -2.0 * surprise


TERM = Term(squared_surprise)


@pytest.fixture
def my_type() -> Any:
    """A registered type, forgotten after the test."""

    @duohead.register("my_type")
    @dataclass(frozen=True, kw_only=True)
    class Mine(duohead.Loss):
        """The squared surprise above a threshold."""

        threshold: Number = number(0.0, "nats that cost nothing", minimum=0.0)

        def parts(self, given: frozenset[str]) -> tuple[Part, ...]:
            return (Part(TERM, {"threshold": self.threshold}),)

    yield Mine
    del LOSS_TYPES["my_type"]


CUSTOM = "head: {losses: {ce: {type: label}, mine: {type: my_type, threshold: 0.5, weight: 0.1}}}"


def test_a_registered_type_reads_plans_runs_and_round_trips(my_type: Any) -> None:
    head = HeadSpec.from_yaml(CUSTOM)
    assert isinstance(head.losses["mine"], my_type)
    assert HeadSpec.from_dict(head.to_dict()) == head
    report = head.plan("torch", "cuda")
    assert report.groups[0].losses == ("ce", "mine")
    assert report.implementation == "triton"
    inputs = inputs_for(head)
    found = run_torch(head, inputs, "eager", "float64")
    logits = inputs["logits"]
    logprob = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = inputs["labels"] >= 0
    surprise = -logprob[np.arange(len(logits)), np.maximum(inputs["labels"], 0)][counted] - 0.5
    assert found[0]["losses/mine"] == pytest.approx((surprise**2).mean(), rel=1e-12)
    assert_same(run_jax(head, inputs, "xla", "float64"), found, 1e-12)
    with pytest.raises(ValueError, match=r"^losses\.mine\.threshold: must be a number >= 0, got -1$"):
        HeadSpec.from_dict({"losses": {"mine": {"type": "my_type", "threshold": -1}}})
    with pytest.raises(ValueError, match=r"^losses\.mine\.type: got 'mytype'; did you mean 'my_type'\?$"):
        HeadSpec.from_dict({"losses": {"mine": {"type": "mytype"}}})


def test_what_cannot_be_registered(my_type: Any) -> None:
    with pytest.raises(ValueError, match="a loss type 'my_type' is registered already: Mine"):
        duohead.register("my_type")(my_type)
    with pytest.raises(ValueError, match="a non-empty name other than 'monolithic'"):
        duohead.register("monolithic")(my_type)

    class Forgotten(duohead.Loss):
        margin: Number = number(0.0, "never declared")

    with pytest.raises(TypeError, match=r"Forgotten: put @dataclass\(frozen=True, kw_only=True\) below @register"):
        duohead.register("forgotten")(Forgotten)
    assert "forgotten" not in LOSS_TYPES
