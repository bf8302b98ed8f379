"""The decode loop: draft, verify, accept, roll back, emit, observe.

One loop for every drafter, one row or many, greedy or sampled. Source of the method: speculative decoding (Leviathan et al.,
arXiv 2211.17192; Chen et al., arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .acceptance import Verdict
from .bans import HardBans
from .control import DepthController, ForwardCosts, Pace, ShadowedDraft
from .drafters.base import Draft, Drafter
from .recording import Recorder
from .stats import RowStats, SpeculationStats
from .target import Target
from .tokens import TokenBuffer


TARGET = "target"
MAX_AHEAD = 32
"""Tokens that a row may have which its cache doesn't hold. One that has more waits for the others."""

NOTHING = Draft([], TARGET)


@dataclass
class Row:
    """One sequence of the batch."""

    number: int
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    """The stopping criteria beside length and end-of-sequence tokens, which `Decoding` knows as numbers."""
    output: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """Where each output token came from: `"target"` or the drafter's name."""
    fresh: list[int] = field(default_factory=list)
    """Output tokens of the present round."""
    draft: Draft = field(default_factory=lambda: NOTHING)
    """What was verified in the present round."""
    accepted: list[int] = field(default_factory=list)
    """The tokens (nodes) of it that were accepted, in order."""
    done: bool = False
    shadows: list[ShadowedDraft] = field(default_factory=list)


class Decoding:
    """
    One call, from prefill to output. `run` is the loop.

    Args:
        target (`Target`): the model with its cache.
        tokens (`TokenBuffer`): the prompt; grows.
        rows (`list[Row]`): one for each sequence, with its processors and criteria.
        drafter (`Drafter`, *optional*): one that doesn't raise (`fallback`); `None` decodes plainly.
        max_draft_tokens: gives the most tokens drafted a row in a round of so many rows; `None`: no bound.
        judges_blocks (`bool`): probabilistic drafts are judged by block verification.
        controller (`DepthController`), costs (`ForwardCosts`): what the depth of a round is chosen by.
        generation_config (`GenerationConfig`): as `generate()` prepared it.
        stopping_criteria (`StoppingCriteriaList`): all of them, for the length and end-of-sequence tokens.
        recorder (`Recorder`): what the output is to hold beside the ids.
        streamer (`BaseStreamer`, *optional*): gets each token once, in order, as soon as it is committed.
        position_limits (`list[int]`): lengths at which drafts end, since something of the model changes there; the token past one is
            decoded by itself.
        prompt_tokens: gives the rows' prompts without padding, for the drafter.
        start (`float`): `perf_counter()` at the call, for the time to first token.
    """

    def __init__(
        self,
        *,
        target: Target,
        tokens: TokenBuffer,
        rows: list[Row],
        drafter: Drafter | None,
        max_draft_tokens: Callable[[int], int | None],
        judges_blocks: bool,
        controller: DepthController,
        costs: ForwardCosts,
        generation_config: Any,
        stopping_criteria: StoppingCriteriaList,
        recorder: Recorder,
        streamer: Any,
        position_limits: list[int],
        prompt_tokens: Callable[[], list[list[int]]],
        stats: SpeculationStats,
        start: float,
    ):
        self.target, self.tokens, self.rows = target, tokens, rows
        self.drafter, self.controller, self.costs = drafter, controller, costs
        self.max_draft_tokens, self.judges_blocks = max_draft_tokens, judges_blocks
        self.recorder, self.streamer = recorder, streamer
        self.position_limits, self.prompt_tokens = position_limits, prompt_tokens
        self.stats = stats
        self.stats.rows = [RowStats() for _ in rows]
        self.output: Any = None
        self._do_sample = generation_config.do_sample
        self._vectorised = not self._do_sample and not any(len(row.processors) for row in rows)
        lengths = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
        self._max_length = min(lengths, default=generation_config.max_length)
        self._stop_tokens = {
            int(token) for c in stopping_criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.flatten().tolist()
        }
        # Plain generate() pads rows that have ended only if it knows an end-of-sequence token; otherwise they talk on.
        self._pads = any(hasattr(c, "eos_token_id") for c in stopping_criteria)
        self._bans = HardBans(generation_config, self._stop_tokens)
        self._so_far = Pace()
        self._takes_trees = False
        self._start = self._last_emit = start
        self._suspended = 0.0
        self._streamed = 0

    @torch.no_grad()
    def run(self) -> Iterator[None]:
        """The loop. Yields after each round, when what was committed has been streamed; closing it ends the call in good order."""
        completed = False
        switched = ExitStack()
        try:
            outputs = self._prefill()
            switched.enter_context(self.target.model._optimize_model_for_decode())
            try:
                self._accept(self.rows, [NOTHING] * len(self.rows), outputs, width=1)
            finally:
                self._emit()
            del outputs
            yield from self._suspend()
            self._begin_drafting()  # never before the first token is out

            while active := self._active():
                running = self._running(active)
                rooms = self._rooms(running)
                proposals = self._draft(running, rooms)
                drafts, width = self._choose_depth(proposals, min(rooms))
                outputs = self._verify(running, drafts, width)
                try:
                    self._accept(running, drafts, outputs, width)
                finally:
                    if drafts[0].parents is not None:
                        self.target.gather(running[0].accepted)
                    self.target.roll_back({row.number: self.tokens.lengths[row.number] - 1 for row in active})
                    self._emit()
                del outputs
                self._observe(running, proposals, drafts)
                yield from self._suspend()
            completed = True
        except GeneratorExit:
            completed = True
            raise
        finally:
            switched.close()
            self.finish(completed)

    def _active(self) -> list[Row]:
        """The rows that need tokens: those not done; and where nothing pads them, the done ones too until all are equally long."""
        longest = max(len(row.output) for row in self.rows)
        return [row for row in self.rows if not row.done or (not self._pads and len(row.output) < longest)]

    def _running(self, active: list[Row]) -> list[Row]:
        """Those of the active rows that don't wait for others; at least the one that is furthest behind."""
        running = [row for row in active if self.target.ahead(row.number) < MAX_AHEAD]
        return running or [min(active, key=lambda row: self.tokens.lengths[row.number])]

    def _suspend(self) -> Iterator[None]:
        """Time in which the caller has the round's tokens isn't ours."""
        before = perf_counter()
        yield
        seconds = perf_counter() - before
        self._suspended += seconds
        self._last_emit += seconds

    # 1. prefill

    def _prefill(self) -> Any:
        before = perf_counter()
        outputs = self.target.prefill()
        self.stats.verify_s += perf_counter() - before
        return outputs

    # 2. draft

    def _begin_drafting(self) -> None:
        if self.drafter is not None and self._active():
            before = perf_counter()
            self.target.get_ready(self._max_length - max(self.tokens.lengths))
            self._takes_trees = self.target.takes_trees() and not self.recorder.records_states
            prompts = self.prompt_tokens()
            self.drafter.begin([prompt + row.output for prompt, row in zip(prompts, self.rows, strict=True)])
            self.stats.draft_s += perf_counter() - before

    def _draft(self, running: list[Row], rooms: list[int]) -> list[Draft]:
        if self.drafter is None:
            return [NOTHING] * len(running)
        before = perf_counter()
        remaining = self._max_length - min(self.tokens.lengths[row.number] for row in running)
        self._plan = self.controller.plan(len(running), self.costs, remaining, self._so_far, self._takes_trees)
        proposals = [NOTHING] * len(running)
        if max(rooms) > 0:
            proposals = self.drafter.propose([row.number for row in running], rooms, self._plan)
            proposals = [self._allowed(row, draft, room) for row, draft, room in zip(running, proposals, rooms, strict=True)]
        self.stats.draft_s += perf_counter() - before
        return proposals

    def _rooms(self, running: list[Row]) -> list[int]:
        """How many tokens may be drafted for each row: the target adds one itself, and positions must exist."""
        most = self.max_draft_tokens(len(running))
        rooms = []
        longest = max(self.tokens.lengths[row.number] for row in running)
        for row in running:
            # In step, the forward is as wide as the longest draft for all rows.
            length = longest if self.target.is_in_step else self.tokens.lengths[row.number]
            room = min(self._max_length - length, self.target.max_width) - 1
            ahead = self.target.ahead(row.number)
            if ahead or len(self.rows) > 1:
                room = min(room, MAX_AHEAD - ahead - 1)
            if row.done:
                room = max(len(other.output) for other in self.rows) - len(row.output) - 1
            position = length + self.target.cached - self.tokens.prompt_length
            for limit in self.position_limits:
                if position <= limit + 1:
                    room = min(room, limit - position)
            if most is not None:
                room = min(room, most)
            rooms.append(max(0, room))
        return rooms

    def _allowed(self, row: Row, draft: Draft, room: int) -> Draft:
        """The draft as far as there is room, and without banned tokens, unless it was drawn (see `_choose_depth`)."""
        if draft.probs is None:
            draft = self._bans.allowed(self.tokens.prefix(row.number)[0], draft)
        return draft.cut(room)

    def _choose_depth(self, proposals: list[Draft], room: int) -> tuple[list[Draft], int]:
        """The drafts as far as they are to be verified, and the width of the forward that does it; every row has room for `room`."""
        if self.drafter is None or self.drafter.constant_depth:
            return proposals, max(len(draft.tokens) for draft in proposals) + 1
        # A token that was drawn has to be judged. Left out because of what it is, it would shift the distribution.
        drawn = max(len(draft.tokens) if draft.probs is not None else 0 for draft in proposals)
        depth = max(drawn, self.controller.trim(proposals, self.costs))
        width = self.controller.width(len(proposals), depth, room, self.costs) if self.target.can_fill else depth + 1
        return [draft.cut(depth) for draft in proposals], width

    # 3. verify

    def _verify(self, running: list[Row], drafts: list[Draft], width: int) -> Any:
        for row, draft in zip(running, drafts, strict=True):
            self.tokens.write_draft(row.number, draft.tokens)
            if draft.tokens:
                self.stats.count_draft(row.number, len(draft.tokens), draft.source)
            else:
                self.stats.num_plain_steps += 1
        before = perf_counter()
        if (parents := drafts[0].parents) is not None:
            outputs = self.target.verify_tree(parents, width)
        else:
            outputs = self.target.verify([row.number for row in running], [len(draft.tokens) for draft in drafts], width)
        if outputs.logits.is_cuda:
            torch.cuda.synchronize(outputs.logits.device)  # the logits are read next anyway
        self._verify_seconds = perf_counter() - before
        self.stats.verify_s += self._verify_seconds
        self.costs.record(len(running), self.target.fed, self._verify_seconds)
        return outputs

    # 4. accept

    def _accept(self, running: list[Row], drafts: list[Draft], outputs: Any, width: int) -> None:
        """Walks each row's draft in order: every processor and criterion sees each committed prefix once, and no other."""
        prefill = not self.rows[0].output
        for row in self.rows:
            row.fresh, row.draft, row.accepted = [], NOTHING, []
        recorder = self.recorder
        known = self.target.choices if self._vectorised and not recorder.records_distributions else None
        if known is None:
            logits = outputs.logits[:, -width:].to(torch.float32, copy=not self._vectorised).to(self.tokens.ids.device)
            known = logits.argmax(-1) if self._vectorised else None
        choices = known.tolist() if known is not None else None
        for slot, (row, draft) in enumerate(zip(running, drafts, strict=True)):
            row.draft = draft
            judge = Verdict(draft, self._do_sample)
            block = self._process_block(row, draft, logits[slot]) if judge.can_judge_block and self.judges_blocks else None
            if block is not None:
                judge.judge_block(block)
            node: int | None = -1  # the last one accepted; behind it is what the target says next
            try:
                while node is not None and not (row.fresh and row.done):
                    position = node + 1
                    if choices is not None:
                        token = choices[slot][position]
                        following = draft.follow(node, token)
                    else:
                        raw = logits[slot : slot + 1, position]  # (1, vocab)
                        scores = block[position][None] if block is not None else row.processors(self.tokens.prefix(row.number), raw)
                        token, following = judge.choose(node, scores)
                    if recorder.records_distributions:
                        raw = logits[slot : slot + 1, position]
                        recorder.record_distribution(row.number, raw, raw if choices is not None else scores)
                    if recorder.records_states:
                        visible = self.target.cached + len(row.output)
                        place, at, fed = slot, None, 1
                        if not prefill:
                            place, at, fed = self.target.places[slot], self.target.leads[slot] + position, self.target.fed
                        recorder.record_states(row.number, outputs, place, at, fed, visible, self.target.cache)
                    in_place = following == len(row.accepted)
                    if following is not None:
                        row.accepted.append(following)
                    self._commit(row, token, in_place)
                    node = following
            finally:
                accepted = len(row.accepted)
                row.sources += [draft.source] * accepted + [TARGET] * (len(row.fresh) - accepted)
                self.stats.count_tokens(row.number, len(row.fresh), accepted, draft.source)

    def _process_block(self, row: Row, draft: Draft, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores at every position of a block, `(draft + 1, vocab)`; only transformers' own, stateless processors get here."""
        start = self.tokens.lengths[row.number]
        ids = self.tokens.ids[row.number : row.number + 1]
        return torch.cat([row.processors(ids[:, : start + i], logits[i : i + 1].clone()) for i in range(len(draft.tokens) + 1)])

    def _commit(self, row: Row, token: int, in_place: bool) -> None:
        """One more token of the row, and whether it is the last; `in_place`: the draft put it into the buffer already."""
        self.tokens.append(row.number, token, in_place)
        row.output.append(token)
        row.fresh.append(token)
        if row.done:
            return  # talks on only because the batch does
        stopped = len(row.criteria) > 0 and bool(row.criteria(self.tokens.prefix(row.number), self.recorder.row_scores(row.number)))
        row.done = stopped or token in self._stop_tokens or self.tokens.lengths[row.number] >= self._max_length
        if row.done and self._pads:
            self.tokens.end(row.number)

    # 6. emit

    def _emit(self) -> None:
        now = perf_counter()
        for row in self.rows:
            fresh = len(row.fresh)
            if fresh == 0:
                continue
            if len(row.output) == fresh:
                self.stats.ttft_s = now - self._start
                fresh -= 1
            if fresh:
                self.stats.itl_s.extend([now - self._last_emit] + [0.0] * (fresh - 1))
        self._last_emit = now
        if self.streamer is not None:
            self._stream()

    def _stream(self) -> None:
        """Hands over each step, `(rows,)` ids, that every row has reached (or ended before)."""
        while any(len(row.output) > self._streamed for row in self.rows):
            step = []
            for row in self.rows:
                if len(row.output) > self._streamed:
                    step.append(row.output[self._streamed])
                elif row.done and self._pads:
                    step.append(self.tokens.pad_token_id)
                else:
                    return
            self._streamed += 1
            self.streamer.put(torch.tensor(step))

    # 7. observe

    def _observe(self, running: list[Row], proposals: list[Draft], drafts: list[Draft]) -> None:
        drafter = self.drafter
        if drafter is None:
            return
        before = perf_counter()
        for row, proposal, draft in zip(running, proposals, drafts, strict=True):
            if drafter.constant_depth:
                pass
            elif proposal.is_free and proposal.tokens:
                row.shadows.append(ShadowedDraft(proposal))
            else:
                accepted = len(row.accepted)
                for position in range(min(accepted + 1, len(draft.tokens))):
                    if position < accepted or not row.done:
                        self.controller.observe(draft, position, position < accepted)
            row.shadows = [shadow for shadow in row.shadows if shadow.follow(row.fresh, self.controller)]
            if draft.tokens:
                drafter.observe(draft, len(row.accepted))
            drafter.commit(row.number, row.fresh)
        if not drafter.constant_depth:
            self.controller.end_round(self._plan, drafts, [len(row.accepted) for row in running], self._verify_seconds)
        self.stats.draft_s += perf_counter() - before

    # the end

    def finish(self, completed: bool = True) -> None:
        """Gives back cache and streamer, and makes the output if the call wasn't cut short by an error."""
        try:
            sequences = self.tokens.sequences()
            cache = self.target.close(completed)
            if completed:
                self.output = self.recorder.output(sequences, cache)
        finally:
            if self.drafter is not None:
                self.drafter.end()
                self.stats.draft_forwards = self.drafter.num_forwards
            self.stats.target_forwards = self.target.forwards
            self.stats.count_captures(self.target.num_captures, self.target.why_not_captured)
            total = perf_counter() - self._start - self._suspended
            self.stats.other_s = max(0.0, total - self.stats.draft_s - self.stats.verify_s)
            if self.streamer is not None:
                self.streamer.end()
