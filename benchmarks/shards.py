"""Collectives and bytes of a vocabulary-sharded forward: one all-gather against a set of all-reduces for each loss.

python benchmarks/shards.py [--tokens 8192] [--ranks 8]

Counted from the plans that a call runs, not modelled: ``K`` is the number of float32 rows that a rank sends, one number
per token each. The comparison is what each loss needs by itself in all-reduces: the maximum and Σ e^(x − max) of each
softmax, and one for every other sum over the vocabulary.
"""

from __future__ import annotations

import argparse
from typing import Any

from duohead import GRPO, GSPO, CrossEntropy, Distillation, EntropyLoss, ZLoss
from duohead.plan import Given, Plan, make_plan
from duohead.statistics import rows_of

HEADER = 10  # numbers beside the rows in PyTorch's buffer; JAX sends none

SETS: dict[str, dict[str, Any]] = {
    "CE": {"ce": CrossEntropy()},
    "CE + z": {"ce": CrossEntropy(), "z": ZLoss()},
    "CE + smoothing + z + entropy": {"ce": CrossEntropy(label_smoothing=0.1), "z": ZLoss(), "h": EntropyLoss()},
    "CE + forward KL": {"ce": CrossEntropy(), "kd": Distillation(loss_type="forward_kl")},
    "CE + z + GRPO with metrics + reverse KL": {
        "ce": CrossEntropy(),
        "z": ZLoss(),
        "rl": GRPO(metrics="basic"),
        "kd": Distillation(loss_type="reverse_kl"),
    },
    "CE + z + GRPO + GSPO + entropy + three KLs": {
        "ce": CrossEntropy(),
        "z": ZLoss(),
        "rl": GRPO(),
        "seq": GSPO(),
        "h": EntropyLoss(),
        "cross": Distillation(),
        "forward": Distillation(loss_type="forward_kl"),
        "reverse": Distillation(loss_type="reverse_kl"),
    },
    "CE + JSD": {"ce": CrossEntropy(), "kd": Distillation(loss_type="jsd")},
}
GIVEN = Given(frozenset({"labels", "segment_ids", "advantages", "old_logprobs"}), ("teacher",), ())


def plan_of(losses: dict[str, Any]) -> Plan:
    return make_plan(losses, GIVEN)[0]


def second_rows(plan: Plan) -> int:
    """Rows of the second gather, which only JSD needs."""
    return sum(2 * len(pairing.jsd) for pairing in plan.pairings)


def ours(losses: dict[str, Any]) -> tuple[int, int]:
    """(collectives, float32 numbers per token that a rank sends)."""
    plan = plan_of(losses)
    return (2 if plan.has_jsd else 1), len(rows_of(plan)) + second_rows(plan)


def by_itself(losses: dict[str, Any]) -> tuple[int, int]:
    """The same where each loss all-reduces each of its rows."""
    counts = [len(rows_of(plan_of({name: loss}))) + second_rows(plan_of({name: loss})) for name, loss in losses.items()]
    return sum(counts), sum(counts)


def sent(rows: int, tokens: int, ranks: int, reduce: bool) -> float:
    """Bytes that leave a rank on a ring: (n − 1) times its part for a gather, 2 (n − 1) / n for a reduction."""
    factor = 2 * (ranks - 1) / ranks if reduce else ranks - 1
    return factor * rows * tokens * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=8)
    chosen = parser.parse_args()
    tokens, ranks = chosen.tokens, chosen.ranks
    print(f"{tokens} tokens, {ranks} ranks; the backward needs no collective in either column's softmax")
    print(f"The header adds {4 * HEADER} bytes to each first gather in PyTorch.\n")
    head = ("losses", "gathers", "K", "K·tokens·4 (kB)", "ring (kB)", "all-reduces", "their ring (kB)")
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for name, losses in SETS.items():
        gathers, rows = ours(losses)
        reductions, reduced = by_itself(losses)
        cells = (
            name,
            gathers,
            rows,
            f"{rows * tokens * 4 / 1e3:.0f}",
            f"{sent(rows, tokens, ranks, False) / 1e3:.0f}",
            reductions,
            f"{sent(reduced, tokens, ranks, True) / 1e3:.0f}",
        )
        print("| " + " | ".join(str(cell) for cell in cells) + " |")


if __name__ == "__main__":
    main()
