"""duohead for PyTorch: one softmax, every loss, one gradient."""

from duohead_torch.api import monolithic_loss, monolithic_loss_and_grad
from duohead_torch.module import MonolithicLoss
from duohead_torch.statistics import token_statistics

__all__ = ["MonolithicLoss", "monolithic_loss", "monolithic_loss_and_grad", "token_statistics"]
