"""What keeps a drafter's faults from the call: it goes on plainly from the last committed token, and says why."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .drafters.base import Draft, Drafter, Plan
from .stats import SpeculationStats


logger = logging.getLogger(__name__)


class Breaker:
    """
    Keeps a drafter that failed away from later calls. Safe to share between threads.

    Closed: drafting. Open, after a fault: no drafting for `cool_down_s`. Half-open, when that is over: one call tries; if it is
    faultless the breaker closes, otherwise it opens for twice as long.

    Attributes:
        cool_down_s (`float`): seconds until a drafter is tried again after its next fault.
        reason (`str`, *optional*): of the last fault, while the breaker isn't closed.
    """

    COOL_DOWN_S = 10.0
    MAX_COOL_DOWN_S = 640.0

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.cool_down_s = self.COOL_DOWN_S
        self.reason: str | None = None
        self._clock = clock
        self._rests_until = 0.0
        self._is_tried = False
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """`"closed"`, `"open"` or `"half-open"`."""
        if self.reason is None:
            return "closed"
        return "open" if self._clock() < self._rests_until else "half-open"

    def admits(self) -> bool:
        """Whether a call may draft; a half-open breaker admits one at a time."""
        with self._lock:
            state = self.state
            if state == "half-open" and not self._is_tried:
                self._is_tried = True
                return True
            return state == "closed"

    def report(self, fault: str | None, drafted: bool) -> None:
        """How an admitted call went: its fault, or `None`; whether it drafted at all."""
        with self._lock:
            was_tried, self._is_tried = self._is_tried, False
            if fault is not None:
                if was_tried:  # not for calls that were under way when another one failed
                    self.cool_down_s = min(2 * self.cool_down_s, self.MAX_COOL_DOWN_S)
                self.reason = fault
                self._rests_until = self._clock() + self.cool_down_s
            elif was_tried and drafted:
                self.reason, self.cool_down_s = None, self.COOL_DOWN_S


class GuardedDrafter(Drafter):
    """
    Any drafter, behind a guard: an exception, drafts that can't be, a timeout or too low an acceptance ends its part in the call.
    `KeyboardInterrupt` and its like pass through.

    Args:
        drafter (`Drafter`): what is guarded.
        breaker (`Breaker`): of this drafter, for all calls.
        vocab_size (`int`): the target's.
        stats (`SpeculationStats`): of the call; the reasons go there.
        timeout_s (`float`, *optional*): the longest that drafting may take in a round; what takes longer is left to itself.
        min_acceptance (`float`, *optional*): the least share of drafted tokens that has to be accepted.
    """

    ENOUGH_TOKENS = 64
    """Drafted tokens before `min_acceptance` is looked at; a drafter is judged by about so many of its latest."""

    def __init__(
        self,
        drafter: Drafter,
        breaker: Breaker,
        vocab_size: int,
        stats: SpeculationStats,
        timeout_s: float | None = None,
        min_acceptance: float | None = None,
    ):
        self.name, self.is_free, self.constant_depth = drafter.name, drafter.is_free, drafter.constant_depth
        self._drafter, self._breaker, self._vocab_size, self._stats = drafter, breaker, vocab_size, stats
        self._timeout_s, self._min_acceptance = timeout_s, min_acceptance
        self._fault: str | None = None
        self._is_abandoned = False
        self._drafted = False
        self._counted = self._accepted = 0.0
        self._was_admitted = False
        self._is_out = False

    @property
    def num_forwards(self) -> int:  # type: ignore[override]
        return self._drafter.num_forwards

    def begin(self, rows: Sequence[list[int]]) -> None:
        self._was_admitted = self._breaker.admits()
        if not self._was_admitted:
            self._is_out = True
            self._stats.count_fallback(f"the drafter {self.name!r} rests after a fault: {self._breaker.reason}")
        self._guarded(lambda: self._drafter.begin(rows))

    def propose(self, rows: Sequence[int], max_tokens: Sequence[int], plan: Plan) -> list[Draft]:
        def propose() -> list[Draft]:
            drafts = self._drafter.propose(rows, max_tokens, plan)
            if len(drafts) != len(rows):
                raise ValueError(f"{len(drafts)} drafts for {len(rows)} rows")
            for draft in drafts:
                self._check(draft, plan.takes_trees)
            return drafts

        drafts = self._guarded(propose)
        if drafts is None:
            return [Draft([], self.name, is_free=self.is_free) for _ in rows]
        self._drafted = self._drafted or any(draft.tokens for draft in drafts)
        return drafts

    def commit(self, row: int, tokens: list[int]) -> None:
        self._guarded(lambda: self._drafter.commit(row, tokens))

    def observe(self, draft: Draft, accepted: int) -> None:
        if self._min_acceptance is None or draft.source != self._drafter.name or self._is_out:
            return
        depth = max(draft.depths())  # of a tree, no more can be accepted
        keep = max(0.0, 1.0 - depth / self.ENOUGH_TOKENS) if self._counted >= self.ENOUGH_TOKENS else 1.0
        self._counted = keep * self._counted + depth
        self._accepted = keep * self._accepted + accepted
        if self._counted >= self.ENOUGH_TOKENS and self._accepted < self._min_acceptance * self._counted:
            self._give_up(f"accepts less than min_acceptance={self._min_acceptance}")

    def end(self) -> None:
        if not self._is_abandoned:
            try:
                self._drafter.end()
            except Exception as error:
                self._give_up(_reason(error), error)
        if self._was_admitted:
            self._breaker.report(self._fault, self._drafted)

    def _check(self, draft: Draft, takes_trees: bool) -> None:
        if not draft.tokens:
            return
        if (parents := draft.parents) is not None and not (
            takes_trees
            and draft.probs is None
            and draft.is_free
            and len(parents) == len(draft.tokens)
            and all(-1 <= parent < node for node, parent in enumerate(parents))
        ):
            raise ValueError("a tree that isn't one, or wasn't asked for")
        if min(draft.tokens) < 0 or max(draft.tokens) >= self._vocab_size:
            raise ValueError(f"ids outside the target's vocabulary of {self._vocab_size}")
        if draft.probs is not None:
            if tuple(draft.probs.shape) != (len(draft.tokens), self._vocab_size):
                raise ValueError(f"probabilities of shape {tuple(draft.probs.shape)} for {len(draft.tokens)} tokens")
            if draft.probs.device.type == "cpu" and not bool(torch.isfinite(draft.probs).all()):
                raise FloatingPointError("probabilities that aren't finite")

    def _guarded(self, function: Callable[[], Any]) -> Any:
        """What `function` returns, or `None` if the drafter is out of the call or is put out of it now."""
        if self._is_out:
            return None
        try:
            return function() if self._timeout_s is None else self._in_time(function)
        except Exception as error:
            self._give_up(_reason(error), error)
            return None

    def _in_time(self, function: Callable[[], Any]) -> Any:
        """In a thread of its own, which can't be stopped but can be left behind."""
        result: list[Any] = []
        error: list[BaseException] = []

        def work() -> None:
            try:
                with torch.no_grad():
                    result.append(function())
            except BaseException as caught:
                error.append(caught)

        worker = threading.Thread(target=work, daemon=True, name=f"drafter-{self.name}")
        worker.start()
        worker.join(self._timeout_s)
        if worker.is_alive():
            self._is_abandoned = True
            raise TimeoutError(f"longer than draft_timeout_s={self._timeout_s}")
        if error:
            raise error[0]
        return result[0]

    def _give_up(self, reason: str, error: Exception | None = None) -> None:
        self._is_out, self._fault = True, reason
        self._stats.count_fallback(f"the drafter {self.name!r} failed: {reason}" if error else f"the drafter {self.name!r} {reason}")
        if error is not None:
            logger.warning("The drafter %r failed (%s); this call goes on without it.", self.name, reason, exc_info=error)


def _reason(error: Exception) -> str:
    """Short and without the user's data: reasons are counted."""
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return "out of memory"
    return "timeout" if isinstance(error, TimeoutError) else type(error).__name__
