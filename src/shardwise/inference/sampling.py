"""Draws the next token from logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.errors import ConfigError, RunError


class Sampler:
    """Draws tokens from `softmax(logits / temperature)`, cut to the likeliest.

    A draw is `argmax(log p + g)`, where g has one number from a Gumbel distribution for each token of the vocabulary
    (Maddison et al. 2014, arXiv:1411.0030, section 2). Two layouts whose logits differ in the last bits draw the same
    token unless the two largest sums differ by as little. In a draw by cumulated probabilities the rounding errors of
    all tokens would add up.

    Args:
        temperature: at 0 the likeliest token is taken, and no number is drawn.
        top_p: only the likeliest tokens are kept: the fewest whose probabilities reach this sum (nucleus sampling,
            arXiv:1904.09751).
        seed: tokens are a function of (seed, logits so far), on any device.

    Raises:
        ConfigError: a temperature below 0, or a top_p outside of (0, 1].
    """

    def __init__(self, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> None:
        problems = []
        if not 0 <= temperature < math.inf:
            problems.append(f"the temperature ({temperature}) must be at least 0 and finite; at 0 nothing is random")
        if not 0 < top_p <= 1:
            problems.append(f"top-p ({top_p}) must be above 0 and at most 1; at 1 every token may come")
        if problems:
            raise ConfigError(problems)
        self.temperature, self.top_p = temperature, top_p
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, logits_V: Tensor) -> int:
        """The next token's id.

        Raises:
            RunError: some logits are NaN.
        """
        logits_V = logits_V.detach().cpu()  # the one wait for the device
        if torch.isnan(logits_V).any():
            raise RunError("the logits of the next token must be numbers, and some are NaN: the weights are damaged")
        if self.temperature == 0:
            return int(logits_V.argmax())
        log_p_V = torch.log_softmax(logits_V.double() / self.temperature, dim=0)
        if self.top_p < 1:
            log_p_V = self._likeliest(log_p_V)
        uniform_V = torch.rand(len(log_p_V), generator=self._generator, dtype=torch.float64, device="cpu")
        return int((log_p_V - torch.log(-torch.log(uniform_V))).argmax())

    def _likeliest(self, log_p_V: Tensor) -> Tensor:
        sorted_V, order_V = log_p_V.sort(descending=True, stable=True)
        before_V = sorted_V.exp().cumsum(0) - sorted_V.exp()
        left_out_V = before_V >= self.top_p
        left_out_V[0] = False
        return log_p_V.index_fill(0, order_V[left_out_V], float("-inf"))
