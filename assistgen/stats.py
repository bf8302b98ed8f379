"""What happened in a call: counts and times, under vLLM's names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RowStats:
    """The counts of one row (sequence) of a call."""

    num_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass
class DrafterStats:
    """
    The counts of one drafter.

    Attributes:
        num_drafts, num_draft_tokens, num_accepted_tokens (`int`): as in `SpeculationStats`.
        route (`str`, *optional*): of a draft model with a foreign tokenizer, `"text"` or `"vocabulary"`.
        vocabulary_overlap (`float`, *optional*): the share of its vocabulary that the target has too.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    route: str | None = None
    vocabulary_overlap: float | None = None


@dataclass
class SpeculationStats:
    """
    Counts and times of one call, or (as `Speculator.stats`) of all calls so far.

    Attributes:
        num_tokens (`int`): generated tokens, padding after a row's end not counted.
        num_drafts (`int`): rounds of a row in which at least one drafted token was verified.
        num_draft_tokens (`int`): drafted tokens that were verified, of a tree also those that competed for the same place.
        num_accepted_tokens (`int`): drafted tokens that are in the output.
        num_accepted_tokens_per_pos (`list[int]`): the same by position in the draft.
        drafters (`dict[str, DrafterStats]`): the same by drafter: what was chosen how often, and what came of it.
        num_plain_steps (`int`): rounds of a row in which nothing was drafted, or not enough to be worth verifying.
        target_forwards, draft_forwards (`int`): forward calls of the target, and of a draft model.
        num_captures (`int`): with `compile=True`, shapes of the target's and the draft model's forwards that had to be captured.
        ttft_s (`float`, *optional*): seconds from the call to the first token; of the last call in a total.
        itl_s (`list[float]`): inter-token latency in seconds, one for each token but the first; 0 inside an accepted block.
        draft_s, verify_s, other_s (`float`): seconds in drafting, in the target's forwards, and in everything else.
        fallbacks (`dict[str, int]`): why (part of) a call was decoded plainly or not as asked for, and how often.
        rows (`list[RowStats]`): the counts of each row; empty in a total.
    """

    num_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    drafters: dict[str, DrafterStats] = field(default_factory=dict)
    num_plain_steps: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    num_captures: int = 0
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    fallbacks: dict[str, int] = field(default_factory=dict)
    rows: list[RowStats] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per draft, the target's own included: `1 + accepted / drafts`."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted share of the drafted tokens; 0 if none was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def count_draft(self, row: int, num_drafted: int, drafter: str) -> None:
        """One row's draft of `num_drafted` > 0 tokens goes into verification."""
        counts = self.drafters.setdefault(drafter, DrafterStats())
        counts.num_drafts += 1
        counts.num_draft_tokens += num_drafted
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.rows[row].num_drafts += 1
        self.rows[row].num_draft_tokens += num_drafted

    def count_tokens(self, row: int, num_tokens: int, num_accepted: int, drafter: str) -> None:
        """`num_tokens` more tokens of row `row`, the first `num_accepted` of them from its draft."""
        if num_accepted:
            self.drafters[drafter].num_accepted_tokens += num_accepted
        self.num_tokens += num_tokens
        self.num_accepted_tokens += num_accepted
        self.rows[row].num_tokens += num_tokens
        self.rows[row].num_accepted_tokens += num_accepted
        per_position = self.num_accepted_tokens_per_pos
        per_position.extend([0] * (num_accepted - len(per_position)))
        for position in range(num_accepted):
            per_position[position] += 1

    def count_captures(self, number: int, why_not: str | None) -> None:
        """Of a model's forwards; `why_not`: why they couldn't be."""
        self.num_captures += number
        if why_not is not None:
            self.count_fallback(why_not)

    def count_fallback(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def add(self, other: SpeculationStats) -> None:
        """Adds a call's counts to a total. The latencies (`itl_s`) and rows stay with the call, so that a total doesn't grow."""
        for name in ("num_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_plain_steps", "target_forwards",
                     "draft_forwards", "num_captures", "draft_s", "verify_s", "other_s"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        per_position = self.num_accepted_tokens_per_pos
        per_position.extend([0] * (len(other.num_accepted_tokens_per_pos) - len(per_position)))
        for i, count in enumerate(other.num_accepted_tokens_per_pos):
            per_position[i] += count
        for name, counts in other.drafters.items():
            total = self.drafters.setdefault(name, DrafterStats())
            total.num_drafts += counts.num_drafts
            total.num_draft_tokens += counts.num_draft_tokens
            total.num_accepted_tokens += counts.num_accepted_tokens
            if counts.route is not None:
                total.route, total.vocabulary_overlap = counts.route, counts.vocabulary_overlap
        for reason, count in other.fallbacks.items():
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + count
        self.ttft_s = other.ttft_s

    def to_dict(self) -> dict[str, Any]:
        """All counts and both ratios as plain Python values, ready for JSON."""
        return dataclasses.asdict(self) | {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
        }
