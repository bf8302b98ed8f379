"""Which drafted tokens to keep. Tensors in, a token out; no model.

In the formulas p is the target's processed distribution and q the drafter's (Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

import torch

from .drafters.base import Draft


class Verdict:
    """
    Judges one row's draft token by token.

    Deterministic drafts (n-gram, argmax), a tree's as well: the target's token is chosen as plain decoding would, one draw a token and in
    order, and looked for in the draft; with the same seed the text is plain decoding's. Drafts with probabilities, when sampling: token
    x is accepted with probability `min(1, p(x) / q(x))`; after a rejection the token is drawn from `max(0, p - q)`, normalised.

    Args:
        draft (`Draft`): of the row.
        do_sample (`bool`): sampling or greedy.
    """

    def __init__(self, draft: Draft, do_sample: bool):
        self._draft = draft
        self._do_sample = do_sample
        self._chosen: list[int] | None = None

    @property
    def can_judge_block(self) -> bool:
        return self._do_sample and self._draft.probs is not None and len(self._draft.tokens) > 0

    def judge_block(self, scores: torch.Tensor) -> None:
        """
        Block verification (Sun et al., arXiv 2403.10444): how many tokens to keep is decided for the whole block, which keeps at least
        as many on average as judging token by token, and is as lossless.

        Args:
            scores (`torch.Tensor` of shape `(draft + 1, vocab)`): the target's processed scores at all positions.
        """
        p = torch.nn.functional.softmax(scores, dim=-1)
        kept, last = verify_block(p, self._draft.probs.to(p.device), self._draft.tokens)
        self._chosen = [*self._draft.tokens[:kept], int(torch.multinomial(last[None], num_samples=1))]

    def choose(self, node: int, scores: torch.Tensor) -> tuple[int, int | None]:
        """
        Args:
            node (`int`): of the draft, the last one accepted; -1: none yet.
            scores (`torch.Tensor` of shape `(1, vocab)`): the target's processed scores after it.

        Returns:
            `tuple[int, int | None]`: the token to commit, and the node that drafted it, if one did.
        """
        draft, position = self._draft, node + 1
        if self._chosen is not None:
            return self._chosen[position], position if position < len(self._chosen) - 1 else None
        if not self._do_sample:
            token = int(torch.argmax(scores, dim=-1))
            return token, draft.follow(node, token)
        p = torch.nn.functional.softmax(scores, dim=-1)
        if draft.probs is None or position == len(draft.tokens):
            token = int(torch.multinomial(p, num_samples=1))
            return token, draft.follow(node, token)
        drafted, q = draft.tokens[position], draft.probs[position].to(p.device)[None]
        if float(torch.rand((), device=p.device)) * float(q[0, drafted]) < float(p[0, drafted]):
            return drafted, position
        return int(torch.multinomial(residual(p, q), num_samples=1)), None


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`max(0, p - q)`, normalised, `(1, vocab)`; `p` itself where nothing is left but rounding."""
    left = (p - q).clamp_(min=0)
    total = left.sum()
    return left / total if float(total) > 0 else p


def verify_block(p: torch.Tensor, q: torch.Tensor, tokens: list[int]) -> tuple[int, torch.Tensor]:
    """
    Args:
        p (`torch.Tensor` of shape `(draft + 1, vocab)`): the target's distributions.
        q (`torch.Tensor` of shape `(draft, vocab)`): what the tokens were drawn from.
        tokens (`list[int]`): the draft.

    Returns:
        `tuple[int, torch.Tensor]`: how many tokens to keep, and the distribution `(vocab,)` of the token after them.
    """
    kept, weight, last = 0, 1.0, residual(p[:1], q[:1])[0]
    for i, token in enumerate(tokens):
        weight = min(1.0, weight * float(p[i, token]) / float(q[i, token]))
        if i + 1 == len(tokens):
            chance, after = weight, p[i + 1]
        else:
            left = (weight * p[i + 1] - q[i + 1]).clamp(min=0)
            total = float(left.sum())
            chance = total / (total + 1.0 - weight) if total + 1.0 - weight > 0 else 1.0
            after = left / total if total > 0 else p[i + 1]
        if float(torch.rand((), device=p.device)) < chance:
            kept, last = i + 1, after
    return kept, last
