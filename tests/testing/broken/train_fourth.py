"""Train engines of the fourth trial, which the requirements of their day missed."""

from __future__ import annotations

import torch

from rlsdk.reference.torch_engine import TorchTrainEngine


class FailureKeepsHalf(TorchTrainEngine):
    """In bfloat16, gradients of earlier calls stay when an objective raises."""

    def forward_backward(self, batch, objective):
        kept = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        try:
            return super().forward_backward(batch, objective)
        except BaseException:
            for name, gradient in kept.items() if self.parameters is not self.computed else ():
                self.parameters[name].grad = gradient
            raise


class NormsStayOld(TorchTrainEngine):
    """In bfloat16, norms and biases that compute are never renewed from those that are stepped."""

    @torch.no_grad()
    def _round_weights(self):
        if self.parameters is not self.computed:
            for name, parameter in self.computed.items():
                if parameter.dim() >= 2:
                    parameter.copy_(self.parameters[name])
