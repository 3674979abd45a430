"""The PyTorch face against plain autograd on the reference formulas: layouts, upstream gradients, buffers, modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_loss import every_loss, random_inputs
from helpers import to_torch
from torch.nn import functional

from duohead import GRPO, CrossEntropy, Distillation, EntropyLoss, ZLoss
from duohead_torch import monolithic_loss, monolithic_loss_and_grad, token_statistics

TOKENS, VOCAB = 6, 9
LOSSES = {
    "ce": CrossEntropy(label_smoothing=0.1),
    "z": ZLoss(weight=0.1),
    "kd": Distillation(loss_type="forward_kl", temperature=2.0, weight=0.5),
    "h": EntropyLoss(weight=-0.05),
}
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def plain(logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The same total by the framework's own functions and autograd."""
    logits, teacher, labels = logits.reshape(-1, VOCAB), teacher.reshape(-1, VOCAB), labels.reshape(-1)
    valid = labels >= 0
    count = valid.sum().clamp(min=1)
    log_p, log_q = logits.log_softmax(-1), (teacher / 2.0).log_softmax(-1)
    lse = logits.logsumexp(-1)
    kl = functional.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    cross = functional.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum", ignore_index=-100) / count
    return cross + torch.where(valid, 0.1 * lse * lse + 0.5 * kl - 0.05 * entropy, 0.0).sum() / count


def make(shape: tuple[int, ...] = (TOKENS,), seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    labels = torch.randint(0, VOCAB, shape)
    if labels.ndim and labels.numel():
        labels.view(-1)[0] = -100
    return {
        "logits": torch.randn(*shape, VOCAB, dtype=torch.float64),
        "labels": labels,
        "teacher": torch.randn(*shape, VOCAB, dtype=torch.float64),
    }


def ours(logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor, **arguments: Any) -> torch.Tensor:
    arguments = {"implementation": "eager", **arguments}
    return monolithic_loss(logits, LOSSES, labels=labels, teacher_logits=teacher, **arguments).loss


def assert_same_gradient(
    base: torch.Tensor,
    view: Callable[[torch.Tensor], torch.Tensor],
    labels: torch.Tensor,
    teacher: torch.Tensor,
    **arguments: Any,
) -> None:
    """Value and gradient with respect to ``base``, of which the logits are a view."""
    first, second = base.clone().requires_grad_(), base.clone().requires_grad_()
    loss, expected = ours(view(first), labels, teacher, **arguments), plain(view(second), labels, teacher)
    torch.testing.assert_close(loss, expected, **EXACT)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(first.grad, second.grad, **EXACT)
    assert torch.equal(first.detach(), base)


# -------------------------------------------------------------------------------------------------------------- layouts

LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    # name: (shape of the base, its view that is the logits, shape of the tokens)
    "plain": ((TOKENS, VOCAB), lambda base: base * 1.0, (TOKENS,)),
    "leaf": ((TOKENS, VOCAB), lambda base: base, (TOKENS,)),
    "transposed": ((VOCAB, TOKENS), lambda base: base.T, (TOKENS,)),
    "every_other_row": ((2 * TOKENS, VOCAB), lambda base: base[::2], (TOKENS,)),
    "every_other_column": ((TOKENS, 2 * VOCAB), lambda base: base[:, ::2], (TOKENS,)),
    "expanded": ((1, VOCAB), lambda base: base.expand(TOKENS, VOCAB), (TOKENS,)),
    "offset": ((TOKENS + 1, VOCAB + 3), lambda base: base[1:, 2:-1], (TOKENS,)),
    "no_rows": ((0, VOCAB), lambda base: base * 1.0, (0,)),
    "no_tokens_axis": ((VOCAB,), lambda base: base, ()),
    "three_axes": ((2, 3, 4, VOCAB), lambda base: base, (2, 3, 4)),
    "batch_first_view": ((3, 2, VOCAB), lambda base: base.transpose(0, 1), (2, 3)),
    "an_empty_axis": ((2, 0, VOCAB), lambda base: base, (2, 0)),
}


@pytest.mark.parametrize("implementation", ["eager", "per_loss"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, implementation: str) -> None:
    shape, view, tokens = LAYOUTS[layout]
    torch.manual_seed(1)
    given = make(tokens)
    base = torch.randn(shape, dtype=torch.float64)
    assert_same_gradient(base, view, given["labels"], given["teacher"], implementation=implementation)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "no_rows"])
def test_layouts_compiled(layout: str) -> None:
    shape, view, tokens = LAYOUTS[layout]
    torch.manual_seed(1)
    given = make(tokens)
    base = torch.randn(shape, dtype=torch.float64)
    assert_same_gradient(base, view, given["labels"], given["teacher"], implementation="compiled")


def test_inputs_in_other_layouts() -> None:
    given = make((3, 4))
    for_rows = {"labels": given["labels"].T.contiguous().T, "teacher": given["teacher"].transpose(0, 1).contiguous()}
    assert_same_gradient(given["logits"], lambda base: base, for_rows["labels"], for_rows["teacher"].transpose(0, 1))


# ------------------------------------------------------------------------------------------------- upstream gradients


@pytest.mark.parametrize("upstream", [2.0, -0.5, 1 / 3, 0.0])
def test_upstream_gradient(upstream: float) -> None:
    given = make()
    first, second = given["logits"].clone().requires_grad_(), given["logits"].clone().requires_grad_()
    (upstream * ours(first, given["labels"], given["teacher"])).backward()
    (upstream * plain(second, given["labels"], given["teacher"])).backward()
    torch.testing.assert_close(first.grad, second.grad, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_power_of_two_is_exact(dtype: torch.dtype) -> None:
    """The upstream gradient multiplies before the one rounding, so 2.0 doubles every bit pattern exactly."""
    given = make()
    logits = given["logits"].to(dtype).requires_grad_()
    teacher = given["teacher"].to(dtype)
    loss = ours(logits, given["labels"], teacher)
    (once,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (twice,) = torch.autograd.grad(2.0 * loss, logits)
    assert once.dtype == dtype
    assert torch.equal(twice, 2 * once)


def test_backward_twice() -> None:
    given = make()
    logits = given["logits"].requires_grad_()
    loss = ours(logits, given["labels"], given["teacher"])
    loss.backward(retain_graph=True)
    once = logits.grad.clone()
    loss.backward()
    assert torch.equal(logits.grad, 2 * once)


def test_two_calls_on_one_tensor() -> None:
    given, other = make(), make(seed=1)
    first, second = given["logits"].clone().requires_grad_(), given["logits"].clone().requires_grad_()
    loss = ours(first, given["labels"], given["teacher"]) + 3.0 * ours(first, other["labels"], other["teacher"])
    loss.backward()
    expected = plain(second, given["labels"], given["teacher"]) + 3.0 * plain(second, other["labels"], other["teacher"])
    expected.backward()
    torch.testing.assert_close(first.grad, second.grad, **EXACT)


def test_logits_that_are_used_elsewhere_too() -> None:
    given = make()
    first, second = given["logits"].clone().requires_grad_(), given["logits"].clone().requires_grad_()
    (ours(first * 1.0, given["labels"], given["teacher"]) + first.square().sum()).backward()
    (plain(second, given["labels"], given["teacher"]) + second.square().sum()).backward()
    torch.testing.assert_close(first.grad, second.grad, **EXACT)


def test_logits_written_between_forward_and_backward() -> None:
    given = make()
    logits = given["logits"].requires_grad_() * 1.0
    loss = ours(logits, given["labels"], given["teacher"])
    logits.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    given = make()
    logits = given["logits"].requires_grad_()
    for loss in (
        ours(logits, given["labels"], given["teacher"]),
        token_statistics(logits, given["labels"]).entropy.sum(),
    ):
        (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            gradient.sum().backward()


def test_gradient_flows_to_the_logits_alone() -> None:
    inputs = to_torch(random_inputs(), "float64")
    for name in ("advantages", "old_logprobs", "ref_logprobs", "importance_weights"):
        inputs[name].requires_grad_()
    inputs["teacher_logits"]["teacher"].requires_grad_()
    logits = inputs.pop("logits").requires_grad_()
    loss, aux = monolithic_loss(logits, every_loss(), implementation="eager", tokens=("logprobs", "lse"), **inputs)
    loss.backward()
    assert logits.grad is not None
    assert all(inputs[name].grad is None for name in ("advantages", "old_logprobs", "ref_logprobs"))
    assert inputs["teacher_logits"]["teacher"].grad is None
    for part in (aux.losses, aux.metrics, aux.tokens):
        assert not any(value.requires_grad for value in part.values())


# --------------------------------------------------------------------------------------------------------------- modes


def test_no_gradient_wanted() -> None:
    given = make()
    expected = plain(given["logits"], given["labels"], given["teacher"])
    wanting = given["logits"].clone().requires_grad_()
    losses = [ours(given["logits"], given["labels"], given["teacher"])]
    with torch.no_grad():
        losses.append(ours(wanting, given["labels"], given["teacher"]))
    with torch.inference_mode():
        losses.append(ours(given["logits"] * 1.0, given["labels"], given["teacher"]).clone())
    for loss in losses:
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    given = make()
    logits, teacher = given["logits"].to(dtype), given["teacher"].to(dtype)
    first, second = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours(first, given["labels"], teacher)
        loss.backward()
    expected = ours(second, given["labels"], teacher)
    expected.backward()
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert torch.equal(first.grad, second.grad)


def test_autocast_model() -> None:
    """A linear layer under autocast hands over bfloat16 logits, its weight gets a float32 gradient."""
    given = make()
    linear = torch.nn.Linear(4, VOCAB)
    hidden = torch.randn(TOKENS, 4)
    with torch.autocast("cpu", torch.bfloat16):
        logits = linear(hidden)
        assert logits.dtype == torch.bfloat16
        loss = ours(logits, given["labels"], given["teacher"].bfloat16())
    loss.backward()
    found = linear.weight.grad.clone()
    linear.weight.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        logits = linear(hidden)
    plain(logits.float(), given["labels"], given["teacher"].bfloat16().float()).backward()
    assert found.dtype == torch.float32
    # The logits' gradients agree up to a last place of bfloat16 (2^-8); so do products with the hidden states.
    torch.testing.assert_close(found, linear.weight.grad, rtol=2.0**-7, atol=2.0**-8 * float(found.abs().max()))


# ------------------------------------------------------------------------------------------------------------- buffers


def test_overwrite_logits() -> None:
    given = make()
    leaf = given["logits"].requires_grad_()
    logits = leaf * 1.0
    loss = ours(logits, given["labels"], given["teacher"], overwrite_logits=True)
    received: list[torch.Tensor] = []
    logits.register_hook(lambda gradient: received.append(gradient))
    loss.backward(retain_graph=True)
    assert received[0].data_ptr() == logits.data_ptr()
    expected = given["logits"].detach().clone().requires_grad_()
    plain(expected, given["labels"], given["teacher"]).backward()
    torch.testing.assert_close(leaf.grad, expected.grad, **EXACT)
    with pytest.raises(RuntimeError, match=r"overwrite_logits=True: the first backward wrote the gradient over"):
        loss.backward()


def gradient_of(given: dict[str, torch.Tensor], **arguments: Any) -> torch.Tensor:
    return monolithic_loss_and_grad(
        given["logits"],
        LOSSES,
        labels=given["labels"],
        teacher_logits=given["teacher"],
        implementation="eager",
        **arguments,
    ).logits_grad


def test_out() -> None:
    given = make()
    expected = gradient_of(given)
    out = torch.full_like(given["logits"], float("nan"))
    assert gradient_of(given, out=out) is out
    assert torch.equal(out, expected)


def test_out_in_another_layout() -> None:
    given = make()
    expected = gradient_of(given)
    out = torch.empty(VOCAB, TOKENS, dtype=torch.float64).T
    gradient_of(given, out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("implementation", ["eager", "per_loss"])
def test_out_is_the_logits(implementation: str) -> None:
    given = make()
    expected = gradient_of(given)
    logits = given["logits"].clone()
    (loss, _), gradient = monolithic_loss_and_grad(
        logits,
        LOSSES,
        labels=given["labels"],
        teacher_logits=given["teacher"],
        implementation=implementation,
        out=logits,
    )
    assert gradient.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(logits, expected, **EXACT)
    torch.testing.assert_close(loss, plain(given["logits"], given["labels"], given["teacher"]), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_accumulate_rounds_once(dtype: torch.dtype) -> None:
    """Added in the compute dtype and rounded once, whatever the buffer's dtype."""
    given = make()
    given["logits"] = given["logits"].float().to(torch.bfloat16)
    given["teacher"] = given["teacher"].to(torch.bfloat16)
    exact = gradient_of({**given, "logits": given["logits"].float(), "teacher": given["teacher"].float()})
    begun = torch.randn(TOKENS, VOCAB).to(dtype)
    out = begun.clone()
    gradient_of(given, out=out, accumulate=True)
    torch.testing.assert_close(out, (begun.to(torch.promote_types(dtype, torch.float32)) + exact).to(dtype))


@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
def test_grad_scale(scale: float) -> None:
    given = make()
    torch.testing.assert_close(gradient_of(given, grad_scale=scale), scale * gradient_of(given), **EXACT)
    torch.testing.assert_close(gradient_of(given, grad_scale=torch.tensor(scale)), scale * gradient_of(given), **EXACT)


def test_only_vectors_are_saved_beside_the_logits() -> None:
    torch.manual_seed(0)
    tokens, vocab = 64, 500
    logits = torch.randn(tokens, vocab, requires_grad=True)
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() != logits.data_ptr():
            sizes.append(tensor.numel())
        return tensor

    losses = {"ce": CrossEntropy(label_smoothing=0.1), "z": ZLoss(), "h": EntropyLoss(), "rl": GRPO(metrics="none")}
    vectors = {name: torch.randn(tokens) for name in ("advantages", "old_logprobs")}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = monolithic_loss(
            logits, losses, labels=torch.randint(0, vocab, (tokens,)), implementation="eager", **vectors
        ).loss
    assert sizes
    assert max(sizes) <= tokens
    assert sum(sizes) < 16 * tokens
    loss.backward()
    assert logits.grad is not None


# ---------------------------------------------------------------------------------------------------- hyperparameters


def test_hyperparameters_as_tensors() -> None:
    inputs = to_torch(random_inputs(), "float64")
    logits = inputs.pop("logits")

    def tensor(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64, requires_grad=True)

    def losses(number: Callable[[float], Any]) -> dict[str, Any]:
        return {
            "ce": CrossEntropy(label_smoothing=number(0.1), weight=number(0.7)),
            "kd": Distillation(loss_type="reverse_kl", temperature=number(2.0), student_temperature=number(1.5)),
            "rl": GRPO(epsilon_low=number(0.1), epsilon_high=number(0.3), beta=number(0.2)),
        }

    def run(number: Callable[[float], Any]) -> Any:
        return monolithic_loss_and_grad(
            logits,
            losses(number),
            num_tokens=number(5.0),
            logits_scale_factor=number(1.2),
            final_logit_softcap=number(9.0),
            implementation="eager",
            **inputs,
        )

    (loss, aux), gradient = run(tensor)
    (expected, expected_aux), expected_gradient = run(float)
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(gradient, expected_gradient, **EXACT)
    torch.testing.assert_close(aux.metrics["rl/kl_ref"], expected_aux.metrics["rl/kl_ref"], **EXACT)
    assert not loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
def test_integer_labels_of_any_width(dtype: torch.dtype) -> None:
    given = make()
    labels = given["labels"].clamp(min=0 if dtype == torch.uint8 else -100)
    expected = plain(given["logits"], labels, given["teacher"])
    torch.testing.assert_close(ours(given["logits"], labels.to(dtype), given["teacher"]), expected, **EXACT)
