"""Is the output the same? And where it isn't: was it a tie that rounding decides?

Kernels of another shape round differently, so in a low precision two tokens whose logits are next to each other may change places.
A difference counts as a proven tie if the two tokens are the target's top two there and their logits lie within the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


ULPS = 4
"""bfloat16 and float16: the top two logits differ by at most so many units in the last place."""
FLOAT32_GAP = 1e-3


@dataclass(frozen=True)
class Comparison:
    """
    Attributes:
        identical (`bool`): the two sequences are equal.
        at (`int`, *optional*): index of the first token that differs.
        gap (`float`, *optional*): logit of the first sequence's token there minus that of the second's.
        proven_tie (`bool`): they part at a tie.
    """

    identical: bool
    at: int | None = None
    gap: float | None = None
    proven_tie: bool = False

    def __str__(self) -> str:
        if self.identical:
            return "identical"
        if self.proven_tie:
            return f"parts at a proven tie (token {self.at}, logit gap {abs(self.gap or 0.0):.3g})"
        return f"DIFFERENT at token {self.at} (logit gap {self.gap})"


@torch.no_grad()
def compare(model: Any, first: torch.Tensor, second: torch.Tensor) -> Comparison:
    """
    Args:
        model: the target that both were greedily decoded with.
        first, second (`torch.LongTensor` of shape `(length,)`): prompt and output.
    """
    shared = min(len(first), len(second))
    differs = (first[:shared] != second[:shared]).nonzero()
    if len(differs) == 0:
        return Comparison(len(first) == len(second), at=None if len(first) == len(second) else shared)
    at = int(differs[0])
    logits = model(first[None, :at], use_cache=False).logits[0, -1]
    pair = logits[[int(first[at]), int(second[at])]]
    top = logits.float().topk(2).values
    if logits.dtype in (torch.bfloat16, torch.float16):
        # The spacing of numbers of this size: 2^(exponent) · eps.
        bound = ULPS * torch.finfo(logits.dtype).eps * 2.0 ** float(torch.floor(torch.log2(top[0].abs())))
    else:
        bound = FLOAT32_GAP
    gap = float(pair[0].float() - pair[1].float())
    tie = abs(gap) <= bound and float(top[0] - pair.float().min()) <= bound
    return Comparison(False, at, gap, tie)
