"""A smaller model as drafter: its own loop over its own forwards, with a cache that is kept from round to round and call to call.

No nested `generate()` and no configuration work in a round: one forward takes in what was committed and gives the first token, another
one each further token. On a CPU each token is looked at, so that a draft ends in time and guesses of its next tokens can ride along;
elsewhere the tokens stay on the device until the draft is complete, and a round waits for it once.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, GenerationMixin
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .. import compat
from ..captured import FixedRows, likeliest
from ..control import DepthController, ForwardCosts
from ..fused import MAX_ROWS, EightBits, FusedRows, eight_bits
from ..inputs import IMAGE_INPUTS, Inputs, placeholders
from ..linear import over_prompt
from ..stats import SpeculationStats
from ..target import RowsApart, RowsInStep, Target, costs_of
from ..tokens import TokenBuffer
from .base import Draft, Drafter, Plan, evidence_of
from .ngram import NGramIndex


NAME = "draft_model"
MAX_GUESS = 4
"""The most n-gram guesses that ride along in a forward of the draft model."""
FAR_BEHIND = 16
"""From so many tokens on, text that has to be taken in before a draft is priced by itself; less of it costs hardly more than one token."""
SAMPLE = 64
"""Tokens of a long text that are read for their price alone, if it isn't known."""


@dataclass
class _Chain:
    """One row's draft while it grows."""

    tokens: list[int]
    evidence: list[int]
    probs: list[torch.Tensor]
    reach: list[float]
    """For each token the chance that the draft is accepted up to it."""
    is_open: bool = True


class DraftMemory:
    """
    What a `Speculator` keeps of a draft model between calls: the cache of the last text, for a chat's next turn, how often n-gram guesses
    of the draft's own tokens are right, and what a forward costs if the model is made of the target anew for each call (any other's is
    known by the model).
    """

    def __init__(self) -> None:
        self.guesses = DepthController()
        self.costs = ForwardCosts()
        self._kept: tuple[list[int], RowsInStep | FusedRows] | None = None
        self._ran_on: list[EightBits | None] = []
        self._lock = threading.Lock()

    def runs_on(self, copy: EightBits | None) -> bool:
        """Notes what the model runs on, with 8 bits a weight or as it is (`None`). Returns whether it has run on something else before."""
        with self._lock:
            before, self._ran_on = self._ran_on, [copy]
        return before not in ([], [copy])

    def keep(self, text: list[int], runner: RowsInStep | FusedRows) -> None:
        with self._lock:
            self._kept = (text, runner)

    def take(self) -> tuple[list[int], RowsInStep | FusedRows] | None:
        """The kept cache and the text that it holds; for one call only."""
        with self._lock:
            kept, self._kept = self._kept, None
            return kept

    def put_back(self, kept: tuple[list[int], RowsInStep | FusedRows]) -> None:
        """What was taken and not used, unless another call kept its own meanwhile."""
        with self._lock:
            self._kept = self._kept or kept


class DraftModelDrafter(Drafter):
    """
    `method="draft_model"`.

    Args:
        model (`PreTrainedModel`): the draft model; stays as it is. Nothing is drafted past the positions that it was made for.
        vocab_size (`int`): the target's. The draft's logits are cut or padded to it, told by contents: ids mean the same in both.
        device (`torch.device`): where the target wants the probabilities.
        warpers (`LogitsProcessorList`, *optional*): makes the distribution that drafts are drawn from; `None` drafts the likeliest token.
        confidence_threshold (`float`, *optional*): a draft ends where the likeliest token has a lower probability.
        memory (`DraftMemory`, *optional*): the cache of an earlier call.
        shared (`np.ndarray` of shape `(tokens, 2)`, *optional*): draft ids and the target's ids for the same tokens, where the
            vocabularies differ; only these are drafted, in the draft's ids, with distributions over the target's.
        unsettled (`int`): tokens at a text's end that may be written anew (`rewrite`).
        num_own_layers (`int`): the model is so many of the target's first layers, and starts on their part of the target's cache.
        name (`str`): of the drafter.
        inputs (`Inputs`, *optional*): of the call; `None`: nothing but text.
        max_new_tokens (`int`, *optional*): forwards are to be of fixed shapes (`captured.py`), and a row gets at most so many tokens.
        stats (`SpeculationStats`, *optional*): of the call, for what is captured.
    """

    is_free = False

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        device: torch.device,
        warpers: LogitsProcessorList | None = None,
        confidence_threshold: float | None = None,
        memory: DraftMemory | None = None,
        shared: Any = None,
        unsettled: int = 0,
        num_own_layers: int = 0,
        name: str = NAME,
        inputs: Inputs | None = None,
        max_new_tokens: int | None = None,
        stats: SpeculationStats | None = None,
    ):
        target = inputs.target if inputs is not None else None
        self.model = model
        self._inputs = inputs
        self._sees = _sees(model, inputs) if inputs is not None else None
        self._unseen = placeholders(target.config) if target is not None and self._sees is None else frozenset()
        self._num_embeddings = model.get_input_embeddings().num_embeddings
        self._num_columns = min(vocab_size, self._num_embeddings)
        config = model.config.get_text_config(decoder=True)
        self._max_length = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None) or 1 << 30
        self._columns: torch.Tensor | None = None
        self._target_ids: torch.Tensor | None = None
        if shared is not None:
            pairs = torch.from_numpy(shared)
            # A tokenizer may have more tokens than the model has rows for.
            pairs = pairs[(pairs[:, 0] < self._num_embeddings) & (pairs[:, 1] < vocab_size)].to(model.device)
            self._columns, self._target_ids = pairs.T.contiguous()
        self._unsettled = unsettled
        self._num_own_layers = num_own_layers
        self._max_new_tokens = max_new_tokens
        self._stats = stats
        self.name = name
        self._vocab_size = vocab_size
        self._device = device
        self._warpers = warpers
        self._threshold = confidence_threshold
        self._memory = memory
        self._guesses = memory.guesses if memory is not None else DepthController()
        self._shares_weights = target is not None and model.get_input_embeddings() is target.get_input_embeddings()
        is_part = self._shares_weights and model is not target
        self._costs = memory.costs if memory is not None and is_part else costs_of(model)
        self._read_costs = self._costs  # of the model, whatever runs it
        self._held: list[int] = []
        """Of each row's text and draft, tokens in the cache."""
        self._kept: tuple[list[int], RowsInStep | FusedRows] | None = None  # of an earlier call, until the first draft
        self._indexes: list[NGramIndex] = []
        self._runner: Target | None = None
        self._texts: list[list[int]] = []
        self._drafted: dict[int, list[int]] = {}
        self._looks = model.device.type == "cpu"  # elsewhere each look at a token would make the host wait
        self._is_whole = True  # no forward was broken off, which would leave the cache's layers at different lengths

    def begin(self, rows: Sequence[list[int]]) -> None:
        self.take_in([[token for token in row if token not in self._unseen] for row in rows])

    def take_in(self, texts: list[list[int]]) -> None:
        """The rows' texts, in the draft model's ids."""
        self._texts = texts
        self._indexes = [NGramIndex(1, 3, text[: max(0, len(text) - self._unsettled)]) for text in texts]
        self._held = [0] * len(texts)
        self._kept = self._memory.take() if self._memory is not None and self._can_be_kept else None
        if self._kept is not None:
            before, text = self._kept[0], texts[0]
            both = max(0, min(len(before), len(text) - 1))
            self._held = [next((i for i in range(both) if before[i] != text[i]), both)]

    def commit(self, row: int, tokens: list[int]) -> None:
        self.rewrite(row, len(self._texts[row]), tokens)

    def rewrite(self, row: int, kept: int, tokens: list[int]) -> None:
        """Row `row` is its first `kept` tokens and `tokens` now. What of them was drafted stays in the cache."""
        text, index = self._texts[row], self._indexes[row]
        before = text[kept:] + self._drafted.pop(row, [])
        same = 0
        while same < min(len(tokens), len(before)) and tokens[same] == before[same]:
            same += 1
        self._held[row] = min(self._held[row], kept + same)  # of the draft, all but the last token is cached
        text[kept:] = tokens
        index.extend(text[len(index.tokens) : max(0, len(text) - self._unsettled)])

    def end(self) -> None:
        runner, self._runner = self._runner, None
        kept, self._kept = self._kept, None
        if kept is not None and self._memory is not None:
            self._memory.put_back(kept)  # nothing was drafted
        if isinstance(runner, (RowsInStep, FusedRows)) and self._memory is not None and self._is_whole and self._can_be_kept:
            runner.roll_back({0: self._held[0]})
            self._memory.keep(self._texts[0][: self._held[0]], runner)
        elif runner is not None:
            if self._stats is not None:
                self._stats.count_captures(runner.num_captures, runner.why_not_captured)
            runner.close(self._is_whole)

    @property
    def _can_be_kept(self) -> bool:
        """Whether the cache is one text's, and nothing else's."""
        return len(self._texts) == 1 and not self._sees and not self._num_own_layers

    def propose(self, rows: Sequence[int], max_tokens: Sequence[int], plan: Plan) -> list[Draft]:
        # A draft's tokens are fed all but the last, behind the longest text.
        longest = max(len(text) for text in self._texts) + (max(self._padding) if self._runner is not None else 0)
        max_tokens = [min(room, max(0, self._max_length - longest)) for room in max_tokens]
        behind = self._behind(rows)
        reading = self._read_costs.reading(behind * len(rows))
        budget = plan.budget(self.name, max(max_tokens), reading, is_new=self._runner is None)
        if budget.limit == 0:
            return [Draft([], self.name, is_free=False) for _ in rows]
        if plan.weighs_costs and reading == 0.0 and behind >= 2 * SAMPLE and not self._sees:
            self._price_reading(max((self._texts[row] for row in rows), key=len))
            return [Draft([], self.name, is_free=False) for _ in rows]  # the next round knows what it would pay
        if self._runner is None:
            self._start(plan.remaining or max(max_tokens), plan)
        if behind := self._behind(rows):
            start = perf_counter()
            self._step(list(rows), [self._texts[row][:-1] or self._texts[row] for row in rows], [[] for _ in rows])
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)  # its time is no part of the draft's, which is waited for next
            self._read_costs.record_reading(behind * len(rows), perf_counter() - start)
        assert self._runner is not None
        if self._looks:
            limit = min(budget.limit, self._runner.max_width - 1)
            drafts = self._draft_looking(list(rows), [min(room, limit) for room in max_tokens], plan)
        else:
            start = perf_counter()
            drafts = self._draft_blindly(list(rows), [min(room, budget.depth) for room in max_tokens])
            longest = max(len(draft.tokens) for draft in drafts)
            if longest:
                plan.spent(self.name, longest, perf_counter() - start)
        self._drafted = {row: draft.tokens for row, draft in zip(rows, drafts, strict=True)}
        return drafts

    def _behind(self, rows: Sequence[int]) -> int:
        """Tokens to take in before a draft, if they are many: of the text that lacks most in the cache, but for its last one."""
        if self._runner is None and self._num_own_layers and len(self._texts) == 1:
            return 0  # starts on the target's cache
        behind = max(len(self._texts[row]) - self._held[row] for row in rows) - 1
        return behind if behind >= FAR_BEHIND else 0

    def _price_reading(self, text: list[int]) -> None:
        """Reads a text's first tokens, to know what that costs, and forgets them."""
        ids = self._known(torch.tensor([text[:SAMPLE]], device=self.model.device))
        for _ in range(2):  # the first forward of a shape pays for the kernels' set-up
            runner = self._make_runner(RowsInStep, ids, self._text_kwargs(torch.ones_like(ids), DynamicCache()))
            seconds = self._prefill(runner)
            runner.close(completed=False)
        self._read_costs.record_reading(SAMPLE, seconds)

    def _prefill(self, runner: Target) -> float:
        """Returns the seconds that it took."""
        over_prompt(self.model, runner.tokens.ids.shape[0] * runner.tokens.prompt_length)  # may measure: once in a process, no part of it
        before = perf_counter()
        runner.prefill()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self.num_forwards += 1
        return perf_counter() - before

    def _start(self, room: int, plan: Plan) -> None:
        """The text's forward, but for its last token, or a kept cache; up to `room` tokens are to come."""
        kept, self._kept = self._kept, None
        copy = self._copy(room, plan)
        if kept is not None and self._held[0] > 0 and _is_usable(kept[1], copy):
            kept[1].roll_back({0: self._held[0]})
            self._use(self._on_copy(kept[1], copy) if copy is not None else kept[1], [0])
            return
        if self._num_own_layers and self._on_targets_cache():
            assert self._runner is not None
            self._runner.get_ready(room)
            return
        fresh, padding = self._conditioned() if self._sees else self._on_text(copy)
        seconds = self._prefill(fresh)
        fresh.get_ready(room)
        self._use(fresh, padding)
        fed = fresh.tokens.prompt_length
        self._held = [min(len(text), fed - pad) for pad, text in zip(padding, self._texts, strict=True)]
        if fed >= FAR_BEHIND:
            self._read_costs.record_reading(fed * len(self._texts), seconds)
        if self._chains:
            assert isinstance(fresh, FixedRows)
            fresh.get_ready_to_chain(self._num_columns)

    def _copy(self, room: int, plan: Plan) -> EightBits | None:
        """The model's with 8 bits a weight, where nothing but text goes by it and it has weights of its own."""
        if self._max_new_tokens is not None or self._sees or self._shares_weights or len(self._texts) > MAX_ROWS:
            return None
        copy = eight_bits(self.model, room)
        if self._memory is not None and self._memory.runs_on(copy):
            plan.renew(self.name)
        return copy

    def _on_copy(self, kept: RowsInStep | FusedRows, copy: EightBits) -> FusedRows:
        """A kept cache as the copy takes it, if it is the model's own."""
        if isinstance(kept, FusedRows):
            return kept
        runner = self._make_runner(partial(FusedRows, copy), kept.tokens.ids[:, : self._held[0]], {})
        runner.adopt(kept.close(), [0])
        return runner

    def _use(self, runner: Target, padding: list[int]) -> None:
        self._runner, self._padding = runner, padding
        if isinstance(runner, (FixedRows, FusedRows)):
            self._costs = runner.costs  # others are what the model's forward costs, whoever runs it

    @property
    def _chains(self) -> bool:
        """Whether the device may go from token to token by itself."""
        return isinstance(self._runner, FixedRows) and not self._looks and self._warpers is None and self._columns is None

    def _on_targets_cache(self) -> bool:
        """The first layers make of a text what they have made of it as a part of the target, if that can be read."""
        cache: Any = self._inputs.cache() if self._inputs is not None and len(self._texts) == 1 else None
        if not compat.keeps_everything(cache):
            return False
        held, ids = compat.length_of(cache), torch.tensor(self._texts)
        if not 0 < held < ids.shape[1]:
            return False
        ours = DynamicCache()
        for i in range(self._num_own_layers):
            ours.update(cache.layers[i].keys, cache.layers[i].values, i)
        model_kwargs = self._text_kwargs(torch.ones(1, held, dtype=torch.long, device=self.model.device), ours)
        runner = self._make_runner(RowsInStep, ids[:, :held].to(self.model.device), model_kwargs)
        runner.adopt()
        self._use(runner, [0])
        self._held = [held]
        return True

    def _on_text(self, copy: EightBits | None) -> tuple[Target, list[int]]:
        """
        A decoder that knows nothing but the texts. Its cache keeps everything, in layers with a window too: a draft takes several
        forwards, and a text that is taken up again may go back far.
        """
        device = self.model.device
        width = max(len(text) for text in self._texts)
        padding = [width - len(text) for text in self._texts]
        ids = self._known(torch.tensor([[0] * pad + text for pad, text in zip(padding, self._texts, strict=True)], device=device))
        # All but the last token: the first round's forward takes it in, as every round's does.
        ids = ids[:, : max(1, width - 1)]
        mask = torch.tensor([[0] * pad + [1] * (ids.shape[1] - pad) for pad in padding], device=device)
        model_kwargs = self._text_kwargs(mask, DynamicCache())
        if copy is not None:
            return self._make_runner(partial(FusedRows, copy), ids, model_kwargs), padding
        apart = len(self._texts) > 1 and RowsApart.why_not(self.model, _SETTINGS, model_kwargs) is None
        kind: Any = RowsApart if apart else RowsInStep
        if self._max_new_tokens is not None:
            reason = FixedRows.why_not(self.model, _SETTINGS, model_kwargs)
            if reason is None:
                kind = FixedRows
            elif self._stats is not None:
                self._stats.count_fallback(f"draft model not compiled: {reason}")
        return self._make_runner(kind, ids, model_kwargs), padding

    def _text_kwargs(self, mask: torch.Tensor, cache: Any) -> dict[str, Any]:
        model_kwargs = {"use_cache": True, compat.CACHE: cache, "attention_mask": mask}
        model_kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp_(min=0)
        return model_kwargs | ({"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {})

    def _conditioned(self) -> tuple[Target, list[int]]:
        """A model that is given what the target was given, in its own way: images, or the encoder's input."""
        inputs, model = self._inputs, self.model
        assert inputs is not None
        padding = [inputs.prompt.shape[1] - len(prompt) for prompt in inputs.prompts()]
        if self._sees == IMAGES:
            with compat.unchanged(model):
                return self._make_runner(RowsInStep, *_prepared(model, inputs)), padding
        device = model.device
        ids = self._known(inputs.prompt.to(device))
        model_kwargs: dict[str, Any] = {"use_cache": True, compat.CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())}
        parameters = inspect.signature(model.forward).parameters
        mask = inputs.attention_mask.to(device) if inputs.attention_mask is not None else None
        if model.config.is_encoder_decoder:
            encoder, source = model.get_encoder(), inputs.source
            assert source is not None
            source = source.to(device, model.dtype) if source.is_floating_point() else self._known(source.to(device))
            takes_mask = mask is not None and "attention_mask" in inspect.signature(encoder.forward).parameters
            extra = {"attention_mask": mask} if takes_mask else {}
            model_kwargs["encoder_outputs"] = encoder(**{model.main_input_name: source, **extra}, return_dict=True)
            if mask is not None:
                model_kwargs["attention_mask"] = mask
        elif "encoder_outputs" in parameters:
            model_kwargs["encoder_outputs"] = inputs.encoder_outputs
        else:
            model_kwargs["encoder_hidden_states"] = inputs.encoder_outputs[0]
            model_kwargs["encoder_attention_mask"] = mask
        return self._make_runner(RowsInStep, ids, model_kwargs), padding

    def _make_runner(self, kind: Any, ids: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
        settings = _SETTINGS
        if kind is FixedRows:
            # Rows' texts end at one slot now. Each gets so many tokens more, but what it has got already.
            max_length = max(len(text) for text in self._texts) + (self._max_new_tokens or 0)
            settings = SimpleNamespace(**{**vars(_SETTINGS), "max_length": max_length})
        return kind(self.model, TokenBuffer(ids), settings, model_kwargs, returns_cache=False, rows_come_back=kind is RowsApart)

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids that the draft model has no embedding for stand as 0: a worse guess, never an error."""
        return ids.masked_fill(ids >= self._num_embeddings, 0)

    def _draft_looking(self, rows: list[int], rooms: list[int], plan: Plan) -> list[Draft]:
        """
        Where looking at a token costs nothing: the draft ends when going on is no longer expected to pay, and n-gram guesses of the
        draft's own next tokens ride along in its forwards (staged speculation, arXiv 2308.04623), which change nothing but the speed.
        """
        chains = {row: _Chain([], [], [], [], is_open=room > 0) for row, room in zip(rows, rooms, strict=True)}
        longest = 0
        while any(chain.is_open for chain in chains.values()):
            before = perf_counter()
            guesses = self._guess([chains[row] for row in rows], rows, rooms)
            sequences = [self._texts[row] + chains[row].tokens for row in rows]
            token, confidence, distribution = self._choose(self._step(rows, sequences, [guess.tokens for guess in guesses]))
            tokens, confidences = token.tolist(), confidence.tolist()
            for place, (row, room, guess) in enumerate(zip(rows, rooms, guesses, strict=True)):
                chain, right = chains[row], 0
                self._held[row] = len(sequences[place])
                if not chain.is_open:
                    continue
                for position in range(len(guess.tokens) + 1):
                    confident = confidences[place][position]
                    if len(chain.tokens) == room or (self._threshold is not None and confident < self._threshold):
                        chain.is_open = False
                        break
                    chain.tokens.append(tokens[place][position])
                    chain.evidence.append(_evidence(confident))
                    if distribution is not None:
                        chain.probs.append(distribution[place, position])
                    chain.reach.append((chain.reach or [1.0])[-1] * plan.rate(self.name, chain.evidence[-1]))
                    matches = position < len(guess.tokens) and chain.tokens[-1] == guess.tokens[position]
                    if position < len(guess.tokens):
                        self._guesses.observe(guess, position, matches)
                    if not matches:
                        break
                    right += 1
                self._held[row] += right
                if len(chain.tokens) == room:
                    chain.is_open = False
            length, longest = longest, max(len(chain.tokens) for chain in chains.values())
            plan.spent(self.name, max(1, longest - length), perf_counter() - before)
            reaches = [chain.reach for chain in chains.values() if chain.reach]
            if not reaches or not plan.goes_on(self.name, reaches):
                break
        return [self._finished(chains[row]) for row in rows]

    def _guess(self, chains: list[_Chain], rows: list[int], rooms: list[int]) -> list[Draft]:
        guesses = []
        for chain, row, room in zip(chains, rows, rooms, strict=True):
            more = min(room - len(chain.tokens) - 1, MAX_GUESS) if chain.is_open else 0
            index = self._indexes[row]
            guesses.append(index.propose(more, self._texts[row][len(index.tokens) :] + chain.tokens))
        depth = self._guesses.trim(guesses, self._costs)
        return [guess.cut(depth) for guess in guesses]

    def _draft_blindly(self, rows: list[int], rooms: list[int]) -> list[Draft]:
        """Where looking at a token would make the host wait: so many steps, and one look at all of them."""
        runner = self._runner
        assert runner is not None
        logits = self._step(rows, [self._texts[row] for row in rows], [[] for _ in rows])
        steps, more = [self._choose(logits)], max(rooms) - 1
        starts = [len(self._texts[row]) + self._padding[row] for row in rows]
        if self._chains and more:
            steps.append((*self._chain(rows, starts, steps[0][0][:, 0], more), None))
        else:
            index, first = torch.tensor(rows, device=logits.device), torch.tensor(starts, device=logits.device)
            for step in range(more):
                runner.tokens.reserve(max(starts) + step + 2)
                runner.tokens.ids[index, first + step] = steps[-1][0][:, 0]
                logits = self._forward(rows, [start + step for start in starts], [1] * len(rows), width=1, logits_to_keep=1)
                steps.append(self._choose(logits))
        for row in rows:
            self._held[row] = len(self._texts[row]) + more
        tokens = torch.cat([token for token, _, _ in steps], dim=1).tolist()  # the one wait
        confidences = torch.cat([confidence for _, confidence, _ in steps], dim=1).tolist()
        drafts = []
        for place, length in enumerate(rooms):
            if self._threshold is not None:
                length = next((i for i in range(length) if confidences[place][i] < self._threshold), length)
            probs = [drawn[place, 0] for _, _, drawn in steps[:length] if drawn is not None]
            evidence = [_evidence(confidence) for confidence in confidences[place][:length]]
            drafts.append(self._finished(_Chain(tokens[place][:length], evidence, probs, [])))
        return drafts

    def _finished(self, chain: _Chain) -> Draft:
        probs = torch.stack(chain.probs).to(self._device) if chain.probs else None
        return Draft(chain.tokens, self.name, tuple(chain.evidence) or (3,), probs, is_free=False)

    def _step(self, rows: list[int], sequences: list[list[int]], guesses: list[list[int]]) -> torch.Tensor:
        """
        One forward (a few for a long way) over all of `sequences` that isn't cached, and the guesses behind them.

        Returns:
            `torch.Tensor` of shape `(rows, longest guess + 1, vocab)`: logits at each sequence's last token and its guesses.
        """
        runner = self._runner
        assert runner is not None
        # The last token is always fed: its logits are what goes on.
        held = [min(self._held[row], len(sequence) - 1) for row, sequence in zip(rows, sequences, strict=True)]
        longest = max(len(guess) for guess in guesses)
        while max(len(sequence) - at for sequence, at in zip(sequences, held, strict=True)) + longest > runner.max_width:
            counts = [max(1, min(runner.max_width, len(sequence) - 1 - at)) for sequence, at in zip(sequences, held, strict=True)]
            self._feed(rows, held, [s[at : at + n] for s, at, n in zip(sequences, held, counts, strict=True)], max(counts), 1)
            held = [min(at + n, len(sequence) - 1) for at, n, sequence in zip(held, counts, sequences, strict=True)]
        fed = [sequence[at:] + guess for sequence, at, guess in zip(sequences, held, guesses, strict=True)]
        width = max(len(ids) for ids in fed)
        if width == 1:
            width = self._guesses.width(len(rows), 0, 1, self._costs)
        last = [len(ids) - len(guess) - 1 for ids, guess in zip(fed, guesses, strict=True)]  # the sequences' last tokens
        before = perf_counter()
        logits = self._feed(rows, held, fed, width, width - min(last))
        if self._looks:
            self._costs.record(len(rows), runner.fed, perf_counter() - before)
        if len(rows) == 1:
            return logits[:, : longest + 1]
        first = torch.tensor(last, device=logits.device)[:, None] - min(last)
        at = (first + torch.arange(longest + 1, device=logits.device)).clamp_(max=logits.shape[1] - 1)
        return logits[torch.arange(len(rows), device=logits.device)[:, None], at]

    def _feed(self, rows: list[int], held: list[int], fed: list[list[int]], width: int, logits_to_keep: int) -> torch.Tensor:
        runner = self._runner
        assert runner is not None
        for row, at in zip(rows, held, strict=True):
            self._held[row] = at
        starts = [at + self._padding[row] for row, at in zip(rows, held, strict=True)]
        for row, start, ids in zip(rows, starts, fed, strict=True):
            runner.tokens.reserve(start + width)
            runner.tokens.ids[row, start : start + len(ids)] = self._known(torch.tensor(ids, device=runner.tokens.ids.device))
        logits = self._forward(rows, starts, [len(ids) for ids in fed], width, logits_to_keep)
        for row, at, ids in zip(rows, held, fed, strict=True):
            self._held[row] = at + len(ids)
        return logits

    def _chain(self, rows: list[int], starts: list[int], tokens: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(self._runner, FixedRows)
        self._is_whole = False
        chained = self._runner.chain(rows, starts, tokens, length, self._num_columns)
        self._is_whole = True
        self.num_forwards += length
        return chained

    def _forward(self, rows: list[int], starts: list[int], counts: list[int], width: int, logits_to_keep: int) -> torch.Tensor:
        assert self._runner is not None
        self._is_whole = False
        logits = self._runner.forward(rows, starts, counts, width, logits_to_keep).logits
        self._is_whole = True
        self.num_forwards += 1
        return logits

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        Tokens and the likeliest tokens' probabilities, `(rows, positions)` each, and the distributions that the tokens were drawn from,
        `(rows, positions, target vocabulary)`. What a draft ends by must not depend on the token drawn, or it is no longer lossless.
        """
        logits = logits[..., : self._num_columns] if self._columns is None else logits[..., self._columns]
        if self._warpers is None:
            token, confidence = likeliest(logits)
            return self._draft_ids(token), confidence, None
        logits = logits.float()
        probs = torch.nn.functional.softmax(self._warpers(None, logits.flatten(0, 1)), dim=-1)
        token = torch.multinomial(probs, num_samples=1).view(logits.shape[:2])
        confidence = probs.amax(dim=-1).view(logits.shape[:2])
        if self._target_ids is None:
            probs = torch.nn.functional.pad(probs, (0, self._vocab_size - self._num_columns))
        else:
            probs = probs.new_zeros(len(probs), self._vocab_size).index_copy_(1, self._target_ids, probs)
        return self._draft_ids(token), confidence, probs.view(*logits.shape[:2], -1)

    def _draft_ids(self, places: torch.Tensor) -> torch.Tensor:
        return places if self._columns is None else self._columns[places]


def _is_usable(kept: RowsInStep | FusedRows, copy: EightBits | None) -> bool:
    """Not if it ran on another copy; and what was made in inference mode can't be written to outside."""
    written = [kept.tokens.ids, *([kept.cells.keys] if isinstance(kept, FusedRows) else [])]
    is_writable = torch.is_inference_mode_enabled() or not any(tensor.is_inference() for tensor in written)
    return is_writable and not (isinstance(kept, FusedRows) and kept.copy is not copy)


def _evidence(confidence: float) -> int:
    if math.isnan(confidence):
        raise FloatingPointError("the draft model's logits are NaN")
    return evidence_of(confidence)


IMAGES, SOURCE = "images", "source"
_SETTINGS = SimpleNamespace(prefill_chunk_size=None, output_attentions=False, max_length=1 << 30)


def check_can_draft(model: Any, target: Any = None) -> None:
    """
    Raises:
        ValueError: if the model can't draft, or not for this target.
    """
    reason = None
    if not callable(getattr(model, "forward", None)) or not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        reason = f"{type(model).__name__} is no transformers model"
    elif model.config.is_encoder_decoder and not (target is not None and target.config.is_encoder_decoder):
        reason = f"{type(model).__name__} is an encoder-decoder model; use a decoder-only one"
    else:
        reason = compat.why_no_roll_back(DynamicCache(config=model.config.get_text_config(decoder=True)))
    if reason is not None:
        raise ValueError(f"`model` can't draft: {reason}.")


def _sees(model: Any, inputs: Inputs) -> str | None:
    """What a draft model takes in beside text: `"images"` (or sounds) if it is the target's class, the encoder's `"source"`, or nothing."""
    target = inputs.target
    if target.config.is_encoder_decoder:
        parameters = inspect.signature(model.forward).parameters
        shares = inputs.encoder_outputs is not None and not {"encoder_outputs", "encoder_hidden_states"}.isdisjoint(parameters)
        return SOURCE if model.config.is_encoder_decoder or shares else None
    has_images = any(inputs.given.get(name) is not None for name in IMAGE_INPUTS)
    goes_on = any(inputs.given.get(name) is not None for name in compat.CACHE_NAMES)
    return IMAGES if has_images and not goes_on and type(model) is type(target) else None


def _prepared(model: Any, inputs: Inputs) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids and keyword arguments as the draft model's own `generate()` prepares them from what the user gave."""
    prepared: list[Any] = []

    def capture(model: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        prepared.extend((input_ids, kwargs))
        return input_ids

    parameters = inspect.signature(model.forward).parameters
    given = {name: value.to(model.device) for name, value in inputs.given.items() if name == "inputs" or name in parameters}
    rows = given["input_ids" if "input_ids" in given else "inputs"].shape[0]
    config = GenerationConfig(do_sample=False, num_beams=1, num_return_sequences=inputs.prompt.shape[0] // rows, max_new_tokens=1)
    GenerationMixin.generate(model, **given, generation_config=config, custom_generate=capture)
    input_ids, model_kwargs = prepared
    return input_ids, model_kwargs | {compat.CACHE: DynamicCache()}


def draft_warpers(generation_config: Any, temperature: float | None) -> LogitsProcessorList:
    """
    The distribution that probabilistic drafts are drawn from: the target's own temperature, top-k, top-p and min-p, each once.

    Args:
        generation_config (`GenerationConfig`): of the target's call.
        temperature (`float`, *optional*): in place of the target's.
    """
    warpers = LogitsProcessorList()
    config = generation_config
    temperature = temperature if temperature is not None else config.temperature
    if temperature not in (None, 1.0):
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if config.top_k not in (None, 0):
        warpers.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1.0:
        warpers.append(TopPLogitsWarper(config.top_p))
    if config.min_p is not None:
        warpers.append(MinPLogitsWarper(config.min_p))
    return warpers
