"""Vocabulary shards in JAX on 2, 4 and 8 forced CPU devices: shard_map, pmap, and sharded arrays under plain jit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import case_names, load_case, to_jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from shards_inputs import SEGMENTS, all_losses, jsd_losses, random_inputs, random_losses

from duohead import CrossEntropy, HeadSpec, ZLoss, token_loss
from duohead.namespace import exp
from duohead_jax import (
    combine_metrics,
    global_counts,
    monolithic_loss,
    monolithic_loss_and_grad,
    token_statistics,
)

VOCAB = 24
TOLERANCES = {"float32": 1e-6, "float64": 1e-13, "bfloat16": 1e-6}
DTYPES = tuple(TOLERANCES)
ULP = {"float32": 0.0, "float64": 0.0, "bfloat16": 2.0**-7}
COLUMNS = P(None, None, "model")


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Programs here run once or twice: generating fast machine code for them would take most of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def some_losses() -> dict[str, Any]:
    """One loss for each row of the statistics and each kind of term."""
    losses = {**all_losses(), **jsd_losses()}
    return {name: losses[name] for name in ("ce", "z", "h", "cross", "forward", "reverse", "seq", "dpo", "half")}


def mesh_of(devices: int, kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((devices,), ("model",), axis_types=(kind,), devices=jax.devices()[:devices])


def compare(name: str, found: Any, expected: Any, tolerance: float, ulp: float = 0.0) -> None:
    """Equal infinities and NaN; else within the tolerance, relative to the largest expected value or 1."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, name
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(found[~finite], expected[~finite], err_msg=name)
    scale = max(1.0, np.abs(expected[finite]).max(initial=0.0))
    wrong = np.abs(found[finite] - expected[finite]) - ulp * np.abs(expected[finite])
    worst = wrong.max(initial=0.0)
    assert worst <= tolerance * scale, f"{name}: off by {worst:.3g} at a scale of {scale:.3g}"


def compare_results(found: Any, expected: Any, tolerance: float) -> None:
    compare("loss", found[0], expected[0], tolerance)
    for kind in ("losses", "metrics", "tokens"):
        items, wanted = getattr(found[1], kind), getattr(expected[1], kind)
        assert items.keys() == wanted.keys()
        for name, value in wanted.items():
            if name.endswith("perplexity"):  # exp multiplies an error by its argument: the mean itself is compared
                compare(name, np.log(items[name]), np.log(value), tolerance)
            else:
                compare(name, items[name], value, tolerance)


def taken_apart(inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, everything else)."""
    arrays = {name: value for name, value in inputs.items() if isinstance(value, jax.Array)}
    return arrays, {name: value for name, value in inputs.items() if name not in arrays}


def pad_columns(array: jax.Array, count: int) -> jax.Array:
    """Padding columns hold NaN, which nothing may see."""
    return jnp.concatenate([array, jnp.full((*array.shape[:-1], count), jnp.nan, array.dtype)], -1)


# --- every case file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", case_names())
def test_cases(name: str, devices: int) -> None:
    """Each case on each number of devices, in another dtype on each; the vocabulary padded to a multiple."""
    case = load_case(name)
    dtype = DTYPES[(case_names().index(name) + devices.bit_length()) % 3]
    inputs, head = to_jax(case["inputs"], dtype), HeadSpec.from_dict(case["head"])
    logits, teachers = inputs.pop("logits"), inputs.pop("teacher_logits", {})
    vocab = logits.shape[-1]
    arrays, static = taken_apart({"vocab_size": vocab, **inputs})
    columns = P(*(None,) * (logits.ndim - 1), "model")

    def call(logits: Any, teachers: Any, arrays: Any, axis: str | None) -> Any:
        found = monolithic_loss_and_grad(logits, head, teacher_logits=teachers, vocab_axis=axis, **static, **arrays)
        return tuple(found)

    @jax.jit
    def both(logits: Any, teachers: Any, arrays: Any) -> Any:
        sharded = jax.shard_map(
            lambda *given: call(*given, "model"),
            mesh=mesh_of(devices),
            in_specs=(columns, columns, P()),
            out_specs=(P(), columns),
        )
        missing = -vocab % devices
        padded = pad_columns(logits, missing), jax.tree.map(lambda teacher: pad_columns(teacher, missing), teachers)
        return call(logits, teachers, arrays, None), sharded(*padded, arrays)

    (expected, gradient), (found, shards) = both(logits, teachers, arrays)
    compare_results(found, expected, TOLERANCES[dtype])
    compare("gradient", shards[..., :vocab], gradient, TOLERANCES[dtype], ULP[dtype])
    assert not np.asarray(shards[..., vocab:]).any(), "padding has a gradient"


# --- every loss, every way to differentiate -----------------------------------------------------------------


class Everything:
    """Inputs of a set of losses, and its unsharded result."""

    def __init__(self, losses: dict[str, Any], dtype: str, seed: int, vocab: int = VOCAB) -> None:
        inputs = to_jax(random_inputs(seed, vocab=vocab), dtype)
        self.logits, self.teacher = inputs.pop("logits"), inputs.pop("teacher_logits")["teacher"]
        self.arrays, self.static = taken_apart(inputs)
        self.losses, self.dtype = losses, dtype

    def loss(self, logits: Any, teacher: Any, arrays: Any, axis: str | None = None, **extra: Any) -> Any:
        return monolithic_loss(
            logits, self.losses, teacher_logits=teacher, vocab_axis=axis, **self.static, **arrays, **extra
        )

    def expected(self) -> Any:
        return jax.jit(jax.value_and_grad(self.loss, has_aux=True))(self.logits, self.teacher, self.arrays)

    def check(self, found: Any, expected: Any) -> None:
        compare_results(found[0], expected[0], TOLERANCES[self.dtype])
        compare("gradient", found[1], expected[1], TOLERANCES[self.dtype], ULP[self.dtype])


@pytest.mark.parametrize(("devices", "dtype"), [(2, "float64"), (4, "float32"), (8, "bfloat16")])
def test_every_loss_at_once(devices: int, dtype: str) -> None:
    """Gradient taken inside of shard_map (and on 4 outside); the scalars of all devices have the same bits."""
    every = Everything({**all_losses(), **jsd_losses()}, dtype, 1)
    expected = every.expected()
    mesh, given = mesh_of(devices), (every.logits, every.teacher, every.arrays)
    specs = {"mesh": mesh, "in_specs": (COLUMNS, COLUMNS, P())}

    def inside(*given: Any) -> Any:
        (loss, aux), gradient = jax.value_and_grad(every.loss, has_aux=True)(*given, "model")
        scalars = jnp.stack([loss, *aux.losses.values(), *aux.metrics.values()])
        return (loss, aux), gradient, jax.lax.pcast(scalars, "model", to="varying")[None]

    result, gradient, scalars = jax.jit(jax.shard_map(inside, **specs, out_specs=(P(), COLUMNS, P("model"))))(*given)
    every.check((result, gradient), expected)
    assert len({np.asarray(row).tobytes() for row in scalars}) == 1
    if devices != 4:
        return
    outside = jax.shard_map(lambda *given: every.loss(*given, "model"), **specs, out_specs=P())
    every.check(jax.jit(jax.value_and_grad(outside, has_aux=True))(*given), expected)


@pytest.mark.parametrize("seed", range(4))
def test_random_sets(seed: int) -> None:
    every = Everything(random_losses(seed + 50), DTYPES[seed % 3], seed)
    extra = ({}, {"final_logit_softcap": 5.0}, {"implementation": "per_loss"})[seed % 3]
    whole = jax.value_and_grad(lambda *given: every.loss(*given, **extra), has_aux=True)
    split = jax.value_and_grad(lambda *given: every.loss(*given, "model", **extra), has_aux=True)
    sharded = jax.shard_map(split, mesh=mesh_of(4), in_specs=(COLUMNS, COLUMNS, P()), out_specs=((P(), P()), COLUMNS))
    given = every.logits, every.teacher, every.arrays
    every.check(jax.jit(sharded)(*given), jax.jit(whole)(*given))


def _stack(array: jax.Array, devices: int) -> jax.Array:
    return jnp.moveaxis(array.reshape(*array.shape[:-1], devices, -1), -2, 0)


@pytest.mark.parametrize("how", ["inside", "loss_and_grad"])
def test_pmap(how: str) -> None:
    """The gradient inside of pmap, and monolithic_loss_and_grad."""
    every = Everything(some_losses(), "float64", 2)
    expected = every.expected()

    def run(*given: Any) -> Any:
        if how == "inside":
            return jax.value_and_grad(every.loss, has_aux=True)(*given, "model")
        logits, teacher, arrays = given
        return monolithic_loss_and_grad(
            logits, every.losses, teacher_logits=teacher, vocab_axis="model", **every.static, **arrays
        )

    given = _stack(every.logits, 4), _stack(every.teacher, 4), every.arrays
    results, gradient = jax.pmap(run, axis_name="model", in_axes=(0, 0, None))(*given)
    whole = jnp.moveaxis(gradient, 0, -2).reshape(every.logits.shape)
    for device in range(4):
        every.check((jax.tree.map(lambda leaf, i=device: leaf[i], results), whole), expected)


def test_whole_empty_shards() -> None:
    """Five columns of 24 on 8 devices: the last six hold nothing but padding."""
    every = Everything(some_losses(), "float64", 3, vocab=5)
    expected = every.expected()
    padded = pad_columns(every.logits, 19), pad_columns(every.teacher, 19), every.arrays

    def inside(*given: Any) -> Any:
        run = jax.value_and_grad(lambda *given: every.loss(*given, "model", vocab_size=5), has_aux=True)
        return run(*given)

    sharded = jax.shard_map(inside, mesh=mesh_of(8), in_specs=(COLUMNS, COLUMNS, P()), out_specs=((P(), P()), COLUMNS))
    result, gradient = jax.jit(sharded)(*padded)
    every.check((result, gradient[..., :5]), expected)
    assert not np.asarray(gradient[..., 5:]).any()


def test_label_on_every_shard_through_the_users_matmul() -> None:
    """The weight's and the input's gradient, inside and outside, the label on each column in turn."""
    r = np.random.default_rng(4)
    hidden, weight = jnp.asarray(r.normal(size=(1, 5))), jnp.asarray(r.normal(size=(5, 8)))
    losses = {"ce": CrossEntropy(), "z": ZLoss(weight=0.1)}

    def loss(hidden: Any, weight: Any, labels: Any, axis: str | None = None) -> Any:
        return monolithic_loss(hidden @ weight, losses, labels=labels, vocab_axis=axis).loss

    specs = {"mesh": mesh_of(4), "in_specs": (P(), P(None, "model"), P())}
    inside = jax.shard_map(
        lambda *given: jax.grad(loss, (0, 1))(*given, "model"), **specs, out_specs=(P(), P(None, "model"))
    )
    outside = jax.grad(jax.shard_map(lambda *given: loss(*given, "model"), **specs, out_specs=P()), (0, 1))
    runs = [jax.jit(jax.grad(loss, (0, 1))), jax.jit(inside), jax.jit(outside)]
    for column in range(8):
        expected, *found = [run(hidden, weight, jnp.array([column])) for run in runs]
        for gradients in found:
            compare("input", gradients[0], expected[0], 1e-13)
            compare("weight", gradients[1], expected[1], 1e-13)


@token_loss
def focal_without_derivatives(logprob, gamma=2.0):  # type: ignore[no-untyped-def]
    return -exp(gamma * (1.0 - exp(logprob))) * logprob


def test_a_loss_without_derivatives() -> None:
    every = Everything({"focal": focal_without_derivatives()}, "float64", 5)
    sharded = jax.shard_map(
        lambda *given: jax.value_and_grad(every.loss, has_aux=True)(*given, "model"),
        mesh=mesh_of(2),
        in_specs=(COLUMNS, COLUMNS, P()),
        out_specs=((P(), P()), COLUMNS),
    )
    every.check(jax.jit(sharded)(every.logits, every.teacher, every.arrays), every.expected())


def test_token_statistics() -> None:
    names = ("logprob", "lse", "entropy", "mean_logprob", "teacher_cross_entropy", "forward_kl", "reverse_kl", "jsd")
    every = Everything({}, "float64", 6)
    labels, mask = every.arrays["labels"], every.arrays["mask"]

    def total(logits: Any, teacher: Any, axis: str | None = None) -> Any:
        found = token_statistics(logits, labels, mask=mask, statistics=names, teacher_logits=teacher, vocab_axis=axis)
        return sum((i + 1) * jnp.sum(jnp.where(jnp.isfinite(value), value, 0.0)) for i, value in enumerate(found))

    specs = {"mesh": mesh_of(4), "in_specs": (COLUMNS, COLUMNS)}
    inside = jax.shard_map(lambda *given: jax.value_and_grad(total)(*given, "model"), **specs, out_specs=(P(), COLUMNS))
    outside = jax.value_and_grad(jax.shard_map(lambda *given: total(*given, "model"), **specs, out_specs=P()))
    value, gradient = jax.jit(jax.value_and_grad(total))(every.logits, every.teacher)
    for run in (inside, outside):
        found, shards = jax.jit(run)(every.logits, every.teacher)
        compare("value", found, value, 1e-13)
        compare("gradient", shards, gradient, 1e-13)


# --- collectives --------------------------------------------------------------------------------------------

COLLECTIVES = {
    "all_gather", "all_gather_invariant", "all_gather_reduced", "psum", "psum_invariant", "pmax", "pmin",
    "all_to_all", "ppermute", "reduce_scatter", "unreduced_psum",
}  # fmt: skip


def collectives(jaxpr: Any) -> list[str]:
    """The names of all collectives of a program, those of its inner programs included."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in COLLECTIVES:
            found.append(name)
        if name == "custom_vjp_call":  # the derivative rules are traced only where they are used
            found += collectives(equation.params["call_jaxpr"].jaxpr)
            continue
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found += collectives(inner)
    return found


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        ({"ce": CrossEntropy()}, 1),
        (all_losses(), 1),
        (jsd_losses(), 2),
        ({**all_losses(), **jsd_losses()}, 2),
    ],
    ids=["ce", "all", "jsd", "all and jsd"],
)
def test_one_collective(losses: dict[str, Any], count: int) -> None:
    """One all-gather whatever the losses, a second one for JSD, none in the gradient: traced, and in the HLO."""
    every = Everything(losses, "float32", 7)
    given = every.logits, every.teacher, every.arrays
    specs = {"mesh": mesh_of(4), "in_specs": (COLUMNS, COLUMNS, P())}
    inside = jax.shard_map(
        lambda *given: jax.value_and_grad(every.loss, has_aux=True)(*given, "model"),
        **specs,
        out_specs=((P(), P()), COLUMNS),
    )
    forward = jax.shard_map(lambda *given: every.loss(*given, "model"), **specs, out_specs=P())
    assert collectives(jax.make_jaxpr(forward)(*given).jaxpr) == ["all_gather_invariant"] * count
    assert collectives(jax.make_jaxpr(inside)(*given).jaxpr) == ["all_gather_invariant"] * count
    if len(losses) > len(all_losses()):
        return  # the parts of this set have been compiled
    text = jax.jit(inside).lower(*given).compile().as_text()
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == count
    assert not re.findall(r" (?:all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_plain_jit_gathers_no_logits(kind: AxisType) -> None:
    """Sharded arrays need no argument, and nothing of the size of the logits crosses devices."""
    tokens, vocab = (4, 16), 512
    inputs = to_jax(random_inputs(8, tokens=tokens, vocab=vocab), "float32")
    logits, teacher = inputs.pop("logits"), inputs.pop("teacher_logits")["teacher"]
    arrays, static = taken_apart(inputs)
    mesh = mesh_of(4, kind)
    losses = {**all_losses(), **jsd_losses()}

    def loss(logits: Any, teacher: Any, arrays: Any) -> Any:
        return monolithic_loss(logits, losses, teacher_logits=teacher, **static, **arrays)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected = run(logits, teacher, arrays)
    columns = NamedSharding(mesh, COLUMNS)
    given = jax.device_put((logits, teacher, arrays), (columns, columns, NamedSharding(mesh, P())))
    with jax.set_mesh(mesh):
        program = run.lower(*given).compile()
        found = program(*given)
    compare_results(found[0], expected[0], 1e-6)
    compare("gradient", found[1], expected[1], 1e-6)
    assert found[1].sharding.is_equivalent_to(columns, 3), found[1].sharding
    moved = re.findall(
        r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
        program.as_text(),
    )
    assert moved, "the vocabulary was not split"
    for shapes in moved:
        for shape in re.findall(r"\[([\d,]*)\]", shapes):
            size = int(np.prod([int(number) for number in shape.split(",") if number], initial=1))
            # The largest that is needed is one number per token or segment and row of statistics.
            assert size < 64 * 512 / 4, f"an array of [{shape}] crosses devices"


# --- other axes ---------------------------------------------------------------------------------------------

SEQUENCE = ("ce", "z", "rl", "cispo", "seq", "dpo", "orpo", "simpo", "kto")
PER_TOKEN = ("labels", "mask", "segment_ids", "advantages", "old_logprobs", "ref_logprobs")


@pytest.mark.parametrize("names", [SEQUENCE, ("ce", "z")], ids=["sequence losses", "token losses"])
def test_sequences_and_vocabulary_split(names: tuple[str, ...]) -> None:
    """Losses add up over the sequence axis, gradients are the whole's; one collective more."""
    mesh = jax.make_mesh((2, 4), ("sequence", "model"), axis_types=(AxisType.Auto,) * 2)
    every = Everything({name: all_losses()[name] for name in names}, "float64", 9)
    every.static.pop("tokens")
    expected = every.expected()
    columns, rows = P(None, "sequence", "model"), P(None, "sequence")
    specs = {name: rows if name in PER_TOKEN else P() for name in every.arrays}

    def part(logits: Any, arrays: Any) -> Any:
        loss, aux = monolithic_loss(
            logits, every.losses, vocab_axis="model", sequence_axis="sequence", **every.static, **arrays
        )
        return loss, aux

    def inside(logits: Any, arrays: Any) -> Any:
        (loss, aux), gradient = jax.value_and_grad(part, has_aux=True)(logits, arrays)
        return jax.lax.psum(loss, "sequence"), combine_metrics(aux.parts, "sequence"), gradient

    def outside(logits: Any, arrays: Any) -> Any:
        return jax.lax.psum(part(logits, arrays)[0], "sequence")

    sharding = {"mesh": mesh, "in_specs": (columns, specs)}
    loss, metrics, gradient = jax.jit(jax.shard_map(inside, **sharding, out_specs=(P(), P(), columns)))(
        every.logits, every.arrays
    )
    compare("loss", loss, expected[0][0], 1e-13)
    compare("gradient", gradient, expected[1], 1e-13)
    assert metrics.keys() == expected[0][1].metrics.keys()
    for name, value in expected[0][1].metrics.items():
        compare(name, metrics[name], value, 1e-12)
    total = jax.shard_map(outside, **sharding, out_specs=P())
    compare("outside", jax.jit(jax.grad(total))(every.logits, every.arrays), expected[1], 1e-13)
    traced = collectives(jax.make_jaxpr(total)(every.logits, every.arrays).jaxpr)
    assert len(traced) == 3, f"one gather, one sum, and the psum of this test: {traced}"


def test_data_parallel_counts_and_metrics() -> None:
    """Rows over one axis, columns over the other: with global counts losses and weight gradients add up."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    inputs = to_jax(random_inputs(10, tokens=(4, 6), vocab=8), "float64")
    for name in ("logits", "teacher_logits", "tokens", "num_segments"):
        inputs.pop(name)
    rows = jnp.arange(4)[:, None]
    inputs["segment_ids"] = jnp.where(inputs["segment_ids"] < 0, -1, rows)  # a row is a sequence
    inputs["preference_pairs"] = jnp.array([[0, 1], [2, 3]])
    arrays, static = taken_apart(inputs)
    r = np.random.default_rng(10)
    hidden, weight = jnp.asarray(r.normal(size=(4, 6, 5))), jnp.asarray(r.normal(size=(5, 8)))
    losses = {name: all_losses()[name] for name in SEQUENCE}

    def whole(weight: Any) -> Any:
        return monolithic_loss(hidden @ weight, losses, num_segments=4, **static, **arrays)

    (expected, aux), gradient = jax.jit(jax.value_and_grad(whole, has_aux=True))(weight)
    counts = global_counts(*(arrays[name] for name in ("labels", "mask", "segment_ids", "preference_pairs")))
    specs = {name: P("data") for name in arrays}

    def step(weight: Any, hidden: Any, arrays: Any) -> Any:
        first = 2 * jax.lax.axis_index("data")
        arrays = {**arrays, "preference_pairs": jnp.array([[0, 1]])}
        arrays["segment_ids"] = jnp.where(arrays["segment_ids"] < 0, -1, arrays["segment_ids"] - first)
        ranged = (arrays[name] for name in ("labels", "mask", "segment_ids", "preference_pairs"))
        counted = global_counts(*ranged, axis="data")

        def loss(weight: Any) -> Any:
            return monolithic_loss(
                hidden @ weight, losses, vocab_axis="model", num_segments=2, **static, **arrays, **counted
            )

        # The weight is the same along "data": its gradient is summed over it by shard_map's own rules.
        (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(weight)
        return jax.lax.psum(value, "data"), combine_metrics(aux.parts, "data"), gradient, counted

    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(None, "model"), P("data"), specs),
        out_specs=(P(), P(), P(None, "model"), P()),
    )
    loss, metrics, shards, counted = jax.jit(sharded)(weight, hidden, arrays)
    assert {name: int(value) for name, value in counted.items()} == {k: int(v) for k, v in counts.items()}
    compare("loss", loss, expected, 1e-13)
    compare("weight", shards, gradient, 1e-13)
    for name, value in aux.metrics.items():
        compare(name, metrics[name], value, 1e-12)


def test_counts_of_split_sequences() -> None:
    labels = jnp.array([0, 1, -100, 2, 3, 1, 1, 0])
    segment_ids = jnp.array([0, 0, 1, 2, 0, 2, -1, 3])
    run = jax.shard_map(
        lambda labels, ids: global_counts(labels, segment_ids=ids, sequence_axis="model", num_segments=SEGMENTS),
        mesh=mesh_of(4),
        in_specs=P("model"),
        out_specs=P(),
    )
    found = {name: int(value) for name, value in run(labels, segment_ids).items()}
    assert found == {"num_tokens": 7, "num_sequences": 3}


def test_logits_that_do_not_vary_where_labels_do() -> None:
    """The derivative rule sums over an axis along which the logits are the same, as shard_map's types demand."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    logits = jnp.asarray(np.random.default_rng(11).normal(size=(3, 8)))
    labels = jnp.array([[0, 1, 7], [4, -100, 2]])

    def total(logits: Any) -> Any:
        return sum(monolithic_loss(logits, labels=row).loss for row in labels)

    def step(logits: Any, labels: Any) -> Any:
        return jax.lax.psum(monolithic_loss(logits, labels=labels[0], vocab_axis="model").loss, "data")

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(None, "model"), P("data")), out_specs=P())
    compare("gradient", jax.jit(jax.grad(sharded))(logits, labels), jax.grad(total)(logits), 1e-13)


def test_under_remat_and_scan() -> None:
    every = Everything({"ce": CrossEntropy(), "z": ZLoss(weight=0.1)}, "float64", 12)
    labels = every.arrays["labels"]

    def total(logits: Any, axis: str | None) -> Any:
        @jax.checkpoint
        def row(carry: Any, item: Any) -> Any:
            return carry + monolithic_loss(item[0], every.losses, labels=item[1], vocab_axis=axis).loss, None

        return jax.lax.scan(row, jnp.zeros(()), (jnp.nan_to_num(logits, neginf=-30.0), labels))[0]

    sharded = jax.shard_map(lambda logits: total(logits, "model"), mesh=mesh_of(4), in_specs=COLUMNS, out_specs=P())
    expected = jax.jit(jax.value_and_grad(lambda logits: total(logits, None)))(every.logits)
    found = jax.jit(jax.value_and_grad(sharded))(every.logits)
    compare("loss", found[0], expected[0], 1e-13)
    compare("gradient", found[1], expected[1], 1e-13)


# --- errors -------------------------------------------------------------------------------------------------


def under(axis: str, **arguments: Any) -> Callable[[], Any]:
    call = jax.shard_map(
        lambda logits: monolithic_loss(logits, labels=jnp.array([0, 1]), vocab_axis=axis, **arguments).loss,
        mesh=mesh_of(4),
        in_specs=P(None, "model"),
        out_specs=P(),
    )
    return lambda: call(jnp.zeros((2, 8)))


def test_errors() -> None:
    logits, labels = jnp.zeros((2, 8)), jnp.array([0, 1])
    with pytest.raises(ValueError, match="vocab_axis: no axis 'model' is bound here"):
        monolithic_loss(logits, labels=labels, vocab_axis="model")
    with pytest.raises(ValueError, match="sequence_axis: no axis 'other'"):
        monolithic_loss_and_grad(logits, labels=labels, sequence_axis="other")
    with pytest.raises(ValueError, match="no axis 'tp'"):
        token_statistics(logits, labels, vocab_axis="tp")
    with pytest.raises(TypeError, match="must be the name"):
        monolithic_loss(logits, labels=labels, vocab_axis=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another axis than vocab_axis"):
        under("model", sequence_axis="model")()
    with pytest.raises(ValueError, match="hold 8 columns in all, got 9"):
        under("model", vocab_size=9)()
    with pytest.raises(ValueError, match="no axis 'data'"):
        global_counts(labels, axis="data")
    with pytest.raises(ValueError, match="num_segments: needed"):
        jax.shard_map(
            lambda labels: global_counts(labels, segment_ids=labels, sequence_axis="model"),
            mesh=mesh_of(2),
            in_specs=P("model"),
            out_specs=P(),
        )(labels)


def test_a_label_past_the_shards_is_nan_everywhere() -> None:
    def loss(logits: Any, labels: Any) -> Any:
        found = monolithic_loss(logits, labels=labels, vocab_axis="model", vocab_size=7)
        return jax.lax.pcast(found.loss, "model", to="varying")[None]

    run = jax.shard_map(loss, mesh=mesh_of(4), in_specs=(P(None, "model"), P()), out_specs=P("model"))
    for label, wrong in ((6, False), (7, True), (8, True)):
        found = np.asarray(jax.jit(run)(jnp.zeros((2, 8)), jnp.array([0, label])))
        assert (np.isnan(found) == wrong).all()
