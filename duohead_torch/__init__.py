"""duohead for PyTorch: one softmax, every loss, one gradient."""

from duohead_torch.api import monolithic_loss, monolithic_loss_and_grad, token_statistics
from duohead_torch.module import MonolithicLoss

__all__ = ["MonolithicLoss", "monolithic_loss", "monolithic_loss_and_grad", "token_statistics"]
