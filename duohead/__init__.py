"""duohead: one softmax, every loss, both frameworks. This package imports neither torch nor jax."""

from duohead.custom import pair_loss, sequence_loss, token_loss
from duohead.loss import Loss, register
from duohead.spec import HeadSpec, losses_from_config
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
    "Loss",
    "SimPO",
    "ZLoss",
    "losses_from_config",
    "pair_loss",
    "register",
    "sequence_loss",
    "token_loss",
]
