"""duohead: one softmax, every loss, both frameworks. This package imports neither torch nor jax."""

from duohead.spec import HeadSpec
from duohead.terms import (
    DPO,
    GRPO,
    GSPO,
    KTO,
    ORPO,
    CrossEntropy,
    Distillation,
    EntropyLoss,
    SimPO,
    ZLoss,
)

__all__ = [
    "DPO",
    "GRPO",
    "GSPO",
    "KTO",
    "ORPO",
    "CrossEntropy",
    "Distillation",
    "EntropyLoss",
    "HeadSpec",
    "SimPO",
    "ZLoss",
]
