"""Compiles the kernels for GPUs, without one: every term set of the built-in losses for sm_90, a few for others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

triton = pytest.importorskip("triton")
# ruff: noqa: E402

from duohead.checks import given_inputs
from duohead.kernels import build, launch, sequences
from duohead.kernels.build import Flags
from duohead.kernels.eligible import is_sequenced
from duohead.kernels.source import Kernel
from duohead.plan import Plan, make_plan
from duohead.spec import HeadSpec

if not hasattr(launch, "interpreted") or launch.interpreted():
    pytest.skip("the interpreter is on", allow_module_level=True)

#: everything a call may bring
ARRAYS = ("labels", "advantages", "old_logprobs", "importance_weights", "segment_ids", "preference_pairs")
CE = {"ce": {"type": "label"}}
Z = {"z": {"type": "z_loss", "weight": 1e-4}}
SETS: dict[str, Mapping[str, Any]] = {
    "ce": {"losses": CE},
    "smoothed": {"losses": {"ce": {"type": "label", "label_smoothing": 0.1}}},
    "ce_z": {"losses": CE | Z},
    "entropy": {"losses": {"h": {"type": "entropy", "weight": -0.01}}},
    "softcap": {"losses": CE | Z, "final_logit_softcap": 30.0, "metrics": ["entropy", "accuracy", "perplexity"]},
    "two_scales": {"losses": CE | {"cold": {"type": "label", "logits_scale_factor": 2.0}}},
    "grpo": {"losses": CE | Z | {"h": {"type": "entropy"}, "rl": {"type": "grpo", "beta": 0.05}}},
    "grpo_sequences": {"losses": {"rl": {"type": "grpo", "reduction": "sequence_mean_token_mean"}}},
    "tokens": {"losses": Z, "tokens": ["logprobs", "entropy", "lse"]},
    "temperatures": {
        "losses": {
            "kd": {"type": "distillation", "loss_type": "forward_kl", "temperature": 2.0, "student_temperature": 2.0},
            "soft": {"type": "distillation", "temperature": 1.0},
        }
    },
}
SETS |= {
    f"grpo_{objective}": {"losses": {"rl": {"type": "grpo", "objective": objective}}}
    for objective in ("cispo", "sapo", "reinforce")
}
SETS |= {
    f"grpo_{estimator}": {"losses": {"rl": {"type": "grpo", "beta": 0.1, "kl_estimator": estimator, "metrics": "none"}}}
    for estimator in ("k1", "k2")
}
SETS |= {
    f"distill_{kind}": {"losses": CE | {"kd": {"type": "distillation", "loss_type": kind}}}
    for kind in ("cross_entropy", "forward_kl", "reverse_kl", "jsd")
}
SEQUENCES: dict[str, Mapping[str, Any]] = {
    "gspo": {"losses": CE | Z | {"rl": {"type": "grpo"}, "seq": {"type": "gspo"}, "dpo": {"type": "dpo"}}},
    "kto": {"losses": {"kto": {"type": "kto"}, "kd": {"type": "distillation", "loss_type": "jsd"}}},
    "preferences": {
        "losses": {"simpo": {"type": "simpo"}, "orpo": {"type": "orpo"}}
        | {f"dpo_{kind}": {"type": "dpo", "loss_type": kind, "label_smoothing": 0.1} for kind in ("hinge", "ipo")}
        | {"ref": {"type": "gspo", "reduction": "sequence_mean_token_mean"}}
    },
}
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def plan_of(config: Mapping[str, Any]) -> Plan:
    """The plan of a configuration for a call that brings everything."""
    head = HeadSpec.from_dict(config)
    given = given_inputs(dict.fromkeys(ARRAYS, True), {"teacher": True}, {"": True})
    plan, _ = make_plan(
        head.losses,
        given,
        final_logit_softcap=head.final_logit_softcap,
        head_metrics=head.metrics,
        tokens=head.tokens,
    )
    return plan


def compiled(
    kernel: Kernel,
    constants: Mapping[str, int],
    warps: int,
    dtype: str = "bfloat16",
    capability: int = 90,
    ones: bool = False,
) -> Any:
    """The kernel compiled to machine code for a GPU of this capability."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    logits = "*" + TYPES[dtype]
    special = {
        "labels": "*i64",
        "valid": "*i1",
        "shard_start": "*i32",
        "segment_ids": "*i64",
        "pairs": "*i64",
        "spans": "*i32",
        "logits": logits,
        "gradient": logits,
        "old": logits,
    }
    signature: dict[str, str] = {}
    for name in (*kernel.inputs, *kernel.outputs):
        is_teacher = name.startswith("teacher")
        signature[name] = special.get(name, logits if is_teacher else "*fp32")
    if ones:
        # jax-triton makes a constant of every scalar that is 1.
        constants = {**constants, **dict.fromkeys(kernel.scalars, 1)}
    else:
        signature |= dict.fromkeys(kernel.scalars, "i32")
    signature = {name: signature.get(name, "constexpr") for name in kernel.function.arg_names}
    attributes = {
        (n,): [["tt.divisibility", 16]] for n, name in enumerate(kernel.function.arg_names) if signature[name][0] == "*"
    }
    source = ASTSource(kernel.function, signature, dict(constants), attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": True})


def constants_of(capability: int = 90, unit: int = 16, warps: int = 4, unroll: int = 2) -> dict[str, int]:
    return {"WARPS": warps, "UNROLL": unroll, "AHEAD": int(capability >= 90), "UNIT": unit}


#: A100, H100 and H200, B200
CAPABILITIES = (80, 90, 100)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", SETS)
def test_fused(name: str, capability: int) -> None:
    plan = plan_of(SETS[name])
    kernel = build.fused(plan, Flags(labels=True, padded=False))
    code = compiled(kernel, constants_of(capability), 4, capability=capability)
    assert "ex2.approx.ftz.f32" in code.asm["ptx"]
    # Whole vectors of eight bfloat16 are loaded and stored.
    assert "st.global.cs.v4.b32" in code.asm["ptx"].replace("L1::", "")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", [*SEQUENCES, "ce_z"])
def test_two_launches(name: str, capability: int) -> None:
    plan = plan_of((SETS | SEQUENCES)[name])
    flags = Flags(labels=True, padded=True, sharded=name == "gspo")
    kernels = [build.statistics(plan, flags), build.read(plan, flags._replace(sharded=False))]
    kernels += [build.jsd(plan, flags)] if plan.has_jsd else []
    kernels.append(build.write(plan, flags._replace(accumulate=name == "kto", check=name == "ce_z")))
    for kernel in kernels:
        compiled(kernel, constants_of(capability, unit=1), 4, capability=capability)


@pytest.mark.parametrize(("capability", "ones"), [(80, False), (90, False), (90, True), (100, False)])
@pytest.mark.parametrize("name", SEQUENCES)
def test_between_two_launches(name: str, capability: int, ones: bool) -> None:
    plan = plan_of(SEQUENCES[name])
    paired = plan.needs_pairs
    assert is_sequenced(plan)
    made = [
        launch.span_launch(sequences.spans(), 5),
        launch.sum_launch(sequences.sums(plan), 5),
        launch.counts_launch(sequences.counts(paired)),
        launch.item_launch(sequences.sequences(plan), 5),
        launch.item_launch(sequences.tokens(plan), 5),
        launch.results_launch(build.results(plan)),
        *([launch.item_launch(sequences.pairs(plan), 5)] if paired else []),
    ]
    for item in made:
        compiled(item.kernel, item.constants, item.warps, capability=capability, ones=ones)


@pytest.mark.parametrize("name", ["ce_z", "grpo_sequences", "smoothed", "distill_jsd"])
def test_after_merged_shards_for_sm_90(name: str) -> None:
    item = launch.item_launch(sequences.tokens(plan_of(SETS[name])), 5)
    compiled(item.kernel, item.constants, item.warps)


@pytest.mark.parametrize("name", ["ce_z", "grpo", "softcap"])
def test_reductions_for_sm_90(name: str) -> None:
    plan = plan_of(SETS[name])
    compiled(build.count_valid(), {"CHUNK": 8192}, 16)
    compiled(build.partial(plan), {"CHUNK": build.CHUNK}, 4)
    for item in (launch.sum_launch(sequences.lengths(), 5), launch.item_launch(sequences.carried_lengths(), 5)):
        compiled(item.kernel, item.constants, item.warps)
    for leaves in (False, True):
        compiled(build.results(plan, leaves), {"CHUNK": 64}, 1)


@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize(
    ("name", "dtype"), [("ce_z", "bfloat16"), ("grpo", "float16"), ("distill_forward_kl", "float32")]
)
def test_other_gpus(name: str, dtype: str, capability: int) -> None:
    kernel = build.fused(plan_of(SETS[name]), Flags(labels=True, padded=False, accumulate=True))
    compiled(kernel, constants_of(capability), 4, dtype, capability)


def test_sizes_of_one_as_constants() -> None:
    plan, constants = plan_of(SETS["smoothed"]), constants_of(unit=1, unroll=1)
    flags = Flags(labels=True, padded=True)
    compiled(build.fused(plan, flags), constants, 4, ones=True)
    compiled(build.statistics(plan, flags), constants, 4, ones=True)
    compiled(build.write(plan, flags._replace(check=True)), constants, 4, ones=True)
    compiled(build.count_valid(), {"CHUNK": 8192}, 16, ones=True)
    compiled(build.partial(plan), {"CHUNK": build.CHUNK}, 4, ones=True)
    compiled(build.results(plan), {"CHUNK": 64}, 1, ones=True)
