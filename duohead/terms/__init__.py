"""The losses, one family a file. Importing this package registers them all."""

from duohead.terms.distillation import Distillation
from duohead.terms.entropy import EntropyLoss
from duohead.terms.label import CrossEntropy
from duohead.terms.policy import GRPO, GSPO
from duohead.terms.preference import DPO, KTO, ORPO, SimPO
from duohead.terms.z import ZLoss

__all__ = [
    "DPO",
    "GRPO",
    "GSPO",
    "KTO",
    "ORPO",
    "CrossEntropy",
    "Distillation",
    "EntropyLoss",
    "SimPO",
    "ZLoss",
]
