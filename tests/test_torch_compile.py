"""Inside a user's own torch.compile, and under implementation="compiled": one graph, no recompile as numbers change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from every_loss import every_loss, random_inputs
from helpers import to_torch
from torch._dynamo.utils import counters

from duohead import DPO, GRPO, GSPO, CrossEntropy, Distillation, EntropyLoss, HeadSpec, ZLoss
from duohead_torch import MonolithicLoss, compiled, monolithic_loss, monolithic_loss_and_grad, token_statistics

# Dynamo itself makes an object of autograd.Function, which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
HIDDEN, VOCAB = 5, 11
Step = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    compiled._evaluate_program.cache_clear()
    compiled._gradient_program.cache_clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """How many graphs have been compiled since the test began; no break among them."""
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


def model_inputs(seed: int = 0, tokens: int = 8, dtype: str = "float32") -> dict[str, Any]:
    """The inputs of a step: hidden states instead of logits."""
    inputs = to_torch(random_inputs(seed, tokens, VOCAB), dtype)
    logits = inputs.pop("logits")
    torch.manual_seed(seed)
    return {"hidden": torch.randn(tokens, HIDDEN).to(logits.dtype), **inputs}


def weight_matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(HIDDEN, VOCAB).to(dtype).requires_grad_()


def gradient_of(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, weight)[0]


def assert_same_as_eager(step: Step, plain: Step, weight: torch.Tensor, *arguments: Any, tolerance: float) -> None:
    """Loss, every loss and metric, and the weight's gradient of the compiled step are those of the plain one."""
    loss, aux = step(weight, *arguments)
    expected, expected_aux = plain(weight, *arguments)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(loss, expected, **close)
    for part, expected_part in ((aux.losses, expected_aux.losses), (aux.metrics, expected_aux.metrics)):
        assert part.keys() == expected_part.keys()
        for name, value in expected_part.items():
            torch.testing.assert_close(part[name], value, **close, msg=name)
    torch.testing.assert_close(gradient_of(loss, weight), gradient_of(expected, weight), **close)


def few_losses(f: float) -> dict[str, Any]:
    return {
        "ce": CrossEntropy(weight=f, label_smoothing=0.1 * f),
        "z": ZLoss(weight=1e-3 * f),
        "kd": Distillation(loss_type="reverse_kl", temperature=2.0 * f, logits_scale_factor=f),
        "rl": GRPO(epsilon_low=0.2 * f, epsilon_high=0.28 * f, beta=0.1 * f),
    }


# ---------------------------------------------------------------------------------------- inside a user's own compile


def test_all_losses_in_one_graph_and_no_recompile_over_20_steps() -> None:
    """The specs are made anew for each step, outside of the compiled function, and passed in."""
    inputs = model_inputs()

    def forward(weight: torch.Tensor, losses: Any, *, implementation: str = "auto") -> Any:
        hidden, rest = inputs["hidden"], {name: value for name, value in inputs.items() if name != "hidden"}
        return monolithic_loss(
            hidden @ weight, losses, metrics=("entropy", "accuracy"), implementation=implementation, **rest
        )

    def plain(weight: torch.Tensor, losses: Any) -> Any:
        return forward(weight, losses, implementation="eager")

    weight = weight_matrix()
    step = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for k in range(20):
        losses = every_loss(1.0 + 0.01 * k)
        if k < 2:
            assert_same_as_eager(step, plain, weight, losses, tolerance=1e-6)
            continue
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_same_as_eager(step, plain, weight, losses, tolerance=1e-6)
    assert graphs() == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_specs_made_inside_the_step_from_its_arguments(dtype: str) -> None:
    inputs = model_inputs(dtype=dtype)
    hidden = inputs.pop("hidden")

    def forward(weight: torch.Tensor, f: float, num_tokens: float, implementation: str = "auto") -> Any:
        return monolithic_loss(
            hidden @ weight,
            few_losses(f),
            num_tokens=num_tokens,
            logits_scale_factor=1.1 * f,
            final_logit_softcap=20.0 * f,
            implementation=implementation,
            **inputs,
        )

    def plain(weight: torch.Tensor, f: float, num_tokens: float) -> Any:
        return forward(weight, f, num_tokens, "eager")

    weight = weight_matrix(hidden.dtype)
    step = torch.compile(forward, fullgraph=True)
    # The logits' gradient may differ by a last place of bfloat16 (2^-8), which the matmul hands on.
    tolerance = 2e-6 if dtype == "float32" else 2.0**-8
    for k in range(20):
        with torch._dynamo.config.patch(error_on_recompile=k >= 2):
            assert_same_as_eager(step, plain, weight, 1.0 + 0.01 * k, 7.0 + k, tolerance=tolerance)
    assert graphs() == 2


def test_token_counts_that_change() -> None:
    def forward(weight: torch.Tensor, inputs: Any, implementation: str = "auto") -> Any:
        rest = {name: value for name, value in inputs.items() if name != "hidden"}
        losses = {"ce": CrossEntropy(), "seq": GSPO(reduction="sequence_mean_token_mean"), "dpo": DPO()}
        return monolithic_loss(inputs["hidden"] @ weight, losses, implementation=implementation, **rest)

    def plain(weight: torch.Tensor, inputs: Any) -> Any:
        return forward(weight, inputs, "eager")

    weight = weight_matrix()
    step = torch.compile(forward, fullgraph=True)
    for k, tokens in enumerate((8, 12, 9, 20, 31)):
        with torch._dynamo.config.patch(error_on_recompile=k >= 2):
            assert_same_as_eager(step, plain, weight, model_inputs(k, tokens), tolerance=2e-6)
    assert graphs() == 2


def test_a_number_that_no_loss_uses_does_not_recompile() -> None:
    inputs = model_inputs()

    def forward(weight: torch.Tensor, num_tokens: float) -> torch.Tensor:
        losses = {"ce": CrossEntropy(reduction="sum")}
        return monolithic_loss(inputs["hidden"] @ weight, losses, labels=inputs["labels"], num_tokens=num_tokens).loss

    step = torch.compile(forward, fullgraph=True, backend="aot_eager")
    values = {float(step(weight_matrix(), 5.0 + k).detach()) for k in range(5)}
    assert len(values) == 1
    assert graphs() == 2


def test_dynamo_explains_it_as_one_graph() -> None:
    inputs = model_inputs()
    weight = weight_matrix()

    def step(weight: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = {"ce": CrossEntropy(label_smoothing=0.1), "z": ZLoss(weight=1e-4), "h": EntropyLoss(weight=-0.1)}
        return monolithic_loss(hidden @ weight, losses, labels=labels).loss

    explained = torch._dynamo.explain(step)(weight, inputs["hidden"], inputs["labels"])
    assert explained.graph_break_count == 0
    assert explained.graph_count == 1


def test_no_grad_under_compile() -> None:
    inputs = model_inputs()
    hidden, weight = inputs.pop("hidden"), weight_matrix()

    @torch.compile(fullgraph=True)
    def evaluate(weight: torch.Tensor) -> Any:
        with torch.no_grad():
            return monolithic_loss(hidden @ weight, few_losses(1.0), **inputs)

    loss, _ = evaluate(weight)
    expected, _ = monolithic_loss(hidden @ weight, few_losses(1.0), implementation="eager", **inputs)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)


def test_loss_and_grad_into_a_buffer_under_compile() -> None:
    inputs = model_inputs()
    logits = (inputs.pop("hidden") @ weight_matrix()).detach()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(logits: torch.Tensor, out: torch.Tensor, f: float) -> Any:
        return monolithic_loss_and_grad(logits, few_losses(f), grad_scale=2.0 * f, out=out, accumulate=True, **inputs)

    for k in range(4):
        f = 1.0 + 0.1 * k
        (loss, _), expected = monolithic_loss_and_grad(
            logits, few_losses(f), grad_scale=2.0 * f, implementation="eager", **inputs
        )
        out = torch.ones_like(logits)
        (found, _), gradient = step(logits, out, f)
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out, 1.0 + expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(out, gradient)
    assert graphs() == 2


def test_token_statistics_in_a_loss_of_the_users_own() -> None:
    inputs = model_inputs()
    teacher, labels = inputs["teacher_logits"], inputs["labels"]

    def own(weight: torch.Tensor, temperature: float) -> torch.Tensor:
        found = token_statistics(
            inputs["hidden"] @ weight,
            labels,
            statistics=("logprob", "entropy", "reverse_kl"),
            teacher_logits=teacher,
            temperature=temperature,
        )
        return (found.reverse_kl * found.logprob.exp() - 0.1 * found.entropy).sum()

    step = torch.compile(own, fullgraph=True, backend="aot_eager")
    weight = weight_matrix()
    for k in range(4):
        found, expected = step(weight, 1.0 + 0.1 * k), own(weight, 1.0 + 0.1 * k)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient_of(found, weight), gradient_of(expected, weight), rtol=1e-6, atol=1e-6)
    assert graphs() == 2


def test_the_module_in_a_compiled_model() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(HIDDEN, VOCAB)
            self.head = MonolithicLoss(HeadSpec(losses={"ce": CrossEntropy(), "z": ZLoss(weight=0.1)}))

        def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.head(self.linear(hidden), labels=labels).loss

    inputs = model_inputs()
    model = Model()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = step(inputs["hidden"], inputs["labels"])
    expected = model(inputs["hidden"], inputs["labels"])
    torch.testing.assert_close(
        gradient_of(2.0 * loss, model.linear.weight), 2.0 * gradient_of(expected, model.linear.weight)
    )


# ------------------------------------------------------------------------------------------ implementation="compiled"


def test_compiled_programs_stay_few_as_numbers_and_sizes_change() -> None:
    def run(f: float, tokens: int, implementation: str) -> Any:
        inputs = to_torch(random_inputs(0, tokens, VOCAB), "float32")
        logits = inputs.pop("logits").requires_grad_()
        losses = {name: few_losses(f)[name] for name in ("ce", "kd")}
        loss = monolithic_loss(logits, losses, implementation=implementation, **inputs).loss
        (2.0 * loss).backward()
        return loss, logits.grad

    for k, tokens in enumerate((8, 8, 12, 12, 9, 17, 31, 8)):
        with torch._dynamo.config.patch(error_on_recompile=k >= 3):
            loss, gradient = run(1.1 + 0.01 * k, tokens, "compiled")
        expected, expected_gradient = run(1.1 + 0.01 * k, tokens, "eager")
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)
    # Evaluation and gradient, each once for the first size and once for any size.
    assert graphs() == 4


def test_compiled_says_what_is_missing_and_auto_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compiler_fault", lambda: "g++ was not found")
    compiled._warn_eager.cache_clear()
    logits, labels = torch.zeros(2, 4), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match=r"implementation='compiled' needs a C\+\+ compiler .*g\+\+ was not found"):
        monolithic_loss(logits, labels=labels, implementation="compiled")
    with pytest.warns(RuntimeWarning, match="runs eagerly on the CPU"):
        loss = monolithic_loss(logits, labels=labels).loss
    # Once: a second warning would be an error here.
    torch.testing.assert_close(monolithic_loss(logits, labels=labels).loss, loss)
    assert graphs() == 0
    compiled._warn_eager.cache_clear()
