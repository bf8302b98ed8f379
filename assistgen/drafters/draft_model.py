"""A smaller model as drafter: its own loop over its own forwards, with a cache that is kept from round to round and call to call.

No nested `generate()` and no configuration work in a round: catch up with what was committed (one forward), then one forward for each
further token. Tokens stay on the draft model's device until the draft is complete, so a round waits for it once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .. import compat
from ..cache import SLIDING
from ..target import ManyRows, OneRow, Target, layer_types
from ..tokens import TokenBuffer
from .base import Draft, Drafter, Plan


NAME = "draft_model"
CONFIDENCE_CLASSES = 12


class DraftMemory:
    """What a `Speculator` keeps of a draft model between calls: the cache of the last text, for a chat's next turn."""

    def __init__(self) -> None:
        self._kept: tuple[list[int], OneRow] | None = None
        self._lock = threading.Lock()

    def keep(self, text: list[int], runner: OneRow) -> None:
        with self._lock:
            self._kept = (text, runner)

    def take(self) -> tuple[list[int], OneRow] | None:
        """The kept cache and the text that it holds; for one call only."""
        with self._lock:
            kept, self._kept = self._kept, None
            return kept


class DraftModelDrafter(Drafter):
    """
    `method="draft_model"`.

    Args:
        model (`PreTrainedModel`): the draft model, with the target's tokenizer; stays as it is.
        vocab_size (`int`): the target's. The draft's logits are cut or padded to it, told by contents: ids mean the same in both.
        device (`torch.device`): where the target wants the probabilities.
        warpers (`LogitsProcessorList`, *optional*): makes the distribution that drafts are drawn from; `None` drafts the likeliest token.
        confidence_threshold (`float`, *optional*): a draft ends before a token of lower probability.
        memory (`DraftMemory`, *optional*): the cache of an earlier call.
    """

    name = NAME
    is_free = False

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        device: torch.device,
        warpers: LogitsProcessorList | None = None,
        confidence_threshold: float | None = None,
        memory: DraftMemory | None = None,
    ):
        reason = why_not(model)
        if reason is not None:
            raise ValueError(f"`model` can't draft: {reason}")
        self.model = model
        self._shared = min(vocab_size, model.get_input_embeddings().num_embeddings)
        self._vocab_size = vocab_size
        self._device = device
        self._warpers = warpers
        self._threshold = confidence_threshold
        self._memory = memory
        self._runner: Target | None = None
        self._texts: list[list[int]] = []
        self._drafted: dict[int, list[int]] = {}

    def begin(self, rows: Sequence[list[int]]) -> None:
        self._texts = [list(row) for row in rows]

    def commit(self, row: int, tokens: list[int]) -> None:
        drafted = self._drafted.pop(row, [])
        same = 0
        while same < min(len(tokens), len(drafted)) and tokens[same] == drafted[same]:
            same += 1
        if self._runner is not None:
            # Of the draft, all but the last token is cached.
            self._held[row] = min(self._held[row], len(self._texts[row]) + same)
        self._texts[row] += tokens

    def end(self) -> None:
        runner, self._runner = self._runner, None
        if isinstance(runner, OneRow) and self._memory is not None:
            runner.roll_back([self._held[0]])
            self._memory.keep(self._texts[0][: self._held[0]], runner)
        elif runner is not None:
            runner.close()

    def propose(self, rows: Sequence[int], max_tokens: Sequence[int], plan: Plan) -> list[Draft]:
        depth, min_reach = plan.depth(self.name, max(max_tokens))
        if depth == 0:
            return [Draft([], self.name, is_free=False) for _ in rows]
        start_of_call = self._runner is None
        if start_of_call:
            self._start()
        start = perf_counter()
        assert self._runner is not None
        depth = min(depth, self._runner.max_width - 1)
        drafts = self._draft(list(rows), [min(room, depth) for room in max_tokens], min_reach, plan)
        self._drafted = {row: draft.tokens for row, draft in zip(rows, drafts, strict=True)}
        longest = max(len(draft.tokens) for draft in drafts)
        if longest and not start_of_call:
            plan.spent(self.name, longest, perf_counter() - start)
        return drafts

    def _start(self) -> None:
        """The prompt's forward, or the part of it that a kept cache doesn't hold."""
        kept = self._memory.take() if self._memory is not None and len(self._texts) == 1 else None
        if kept is not None:
            text, runner = kept
            shared, both = 0, min(len(text), len(self._texts[0]) - 1)
            while shared < both and text[shared] == self._texts[0][shared]:
                shared += 1
            if shared > 0:
                runner.roll_back([shared])
                self._runner, self._held, self._padding = runner, [shared], [0]
                return
        device = self.model.device
        width = max(len(text) for text in self._texts)
        self._padding = [width - len(text) for text in self._texts]
        ids = torch.tensor([[0] * pad + self._known(text) for pad, text in zip(self._padding, self._texts, strict=True)], device=device)
        # All but the last token: the first round's forward takes it in, as every round's does.
        ids = ids[:, : max(1, width - 1)]
        config = self.model.config.get_text_config(decoder=True)
        model_kwargs: dict[str, Any] = {"use_cache": True, compat.CACHE: DynamicCache(config=config)}
        if self.model._supports_logits_to_keep():
            model_kwargs["logits_to_keep"] = 1
        mask = torch.tensor([[0] * pad + [1] * (ids.shape[1] - pad) for pad in self._padding], device=device)
        model_kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp_(min=0)
        model_kwargs["attention_mask"] = mask
        tokens = TokenBuffer(ids)
        settings = SimpleNamespace(prefill_chunk_size=None)
        if len(self._texts) == 1 and SLIDING not in layer_types(config):
            self._runner = OneRow(self.model, tokens, settings, model_kwargs)
        else:
            self._runner = ManyRows(
                self.model,
                tokens,
                settings,
                model_kwargs,
                returns_cache=False,
                rows_come_back=True,
                max_slots=config.max_position_embeddings,
            )
        self._runner.prefill()
        self.num_forwards += 1
        self._held = [min(len(text), ids.shape[1] - pad) for pad, text in zip(self._padding, self._texts, strict=True)]

    def _known(self, tokens: list[int]) -> list[int]:
        """Ids that the draft model has no embedding for stand as 0: a worse guess, never an error."""
        limit = self.model.get_input_embeddings().num_embeddings
        return [token if token < limit else 0 for token in tokens]

    def _draft(self, rows: list[int], rooms: list[int], min_reach: float, plan: Plan) -> list[Draft]:
        runner = self._runner
        assert runner is not None
        logits = self._catch_up(rows)
        ends = torch.tensor([len(self._texts[row]) + self._padding[row] for row in rows], device=logits.device)
        index = torch.tensor(rows, device=logits.device)
        reach = [1.0] * len(rows)
        steps: list[torch.Tensor] = []
        confidences: list[torch.Tensor] = []
        distributions: list[Any] = []
        watches = logits.device.type == "cpu"  # elsewhere looking at a token before the draft is complete would cost a wait
        for step in range(max(rooms)):
            token, confidence, distribution = self._choose(logits)
            steps.append(token)
            confidences.append(confidence)
            distributions.append(distribution)
            if step + 1 == max(rooms):
                break
            if watches:
                reach = [r * plan.rate(self.name, _evidence(c)) for r, c in zip(reach, confidence.tolist(), strict=True)]
                unsure = self._threshold is not None and float(confidence.max()) < self._threshold
                if unsure or max(reach) < min_reach:
                    break
            runner.tokens.reserve(int(ends.max()) + step + 2)
            runner.tokens.ids[index, ends + step] = token
            starts = [len(self._texts[row]) + self._padding[row] + step for row in rows]
            logits = runner.forward(rows, starts, [1] * len(rows)).logits[:, -1]
            self.num_forwards += 1
            for row in rows:
                self._held[row] = len(self._texts[row]) + step + 1
        tokens = torch.stack(steps, dim=1).tolist()  # the one wait
        confident = torch.stack(confidences, dim=1).tolist()
        drafts = []
        for place, room in enumerate(rooms):
            length = min(room, len(tokens[place]))
            if self._threshold is not None:
                length = next((i for i in range(length) if confident[place][i] < self._threshold), length)
            evidence = tuple(_evidence(c) for c in confident[place][:length]) or (0,)
            probs = None
            if self._warpers is not None and length:
                probs = torch.stack([d[place] for d in distributions[:length]]).to(self._device)
            drafts.append(Draft(tokens[place][:length], self.name, evidence, probs, is_free=False))
        return drafts

    def _catch_up(self, rows: list[int]) -> torch.Tensor:
        """One forward (a few for a long way) over what was committed since; returns each row's last logits."""
        runner = self._runner
        assert runner is not None
        # The last token is always fed: its logits are what the draft begins with.
        self._held = [min(held, len(text) - 1) for held, text in zip(self._held, self._texts, strict=True)]
        runner.roll_back([held + pad for held, pad in zip(self._held, self._padding, strict=True)])
        last: dict[int, torch.Tensor] = {}
        while True:
            counts = [max(1, min(runner.max_width, len(self._texts[row]) - self._held[row])) for row in rows]
            starts = []
            for row, count in zip(rows, counts, strict=True):
                at = min(self._held[row], len(self._texts[row]) - 1)
                new = self._known(self._texts[row][at : at + count])
                start = at + self._padding[row]
                runner.tokens.reserve(start + count + 1)
                runner.tokens.ids[row, start : start + count] = torch.tensor(new, device=runner.tokens.ids.device)
                starts.append(start)
            logits = runner.forward(rows, starts, counts, last_logits_only=isinstance(runner, OneRow)).logits
            self.num_forwards += 1
            behind = False
            for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
                self._held[row] = min(len(self._texts[row]), self._held[row] + count)
                last[row] = logits[place, -1 if isinstance(runner, OneRow) else count - 1]
                behind = behind or self._held[row] < len(self._texts[row])
            if not behind:
                return torch.stack([last[row] for row in rows])

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Token and its probability for each row, and the distribution it was drawn from (`(rows, target vocabulary)`)."""
        logits = logits[:, : self._shared].float()
        if self._warpers is None:
            top, token = logits.max(dim=-1)
            return token, torch.exp(top - torch.logsumexp(logits, dim=-1)), None
        probs = torch.nn.functional.softmax(self._warpers(None, logits), dim=-1)
        token = torch.multinomial(probs, num_samples=1).squeeze(1)
        probs = torch.nn.functional.pad(probs, (0, self._vocab_size - self._shared))
        return token, probs.gather(1, token[:, None]).squeeze(1), probs


def _evidence(confidence: float) -> int:
    """A class of the draft model's own probability: the acceptance rate of each is learned, so they needn't be calibrated."""
    doubt = 1.0 - confidence
    return CONFIDENCE_CLASSES if doubt < 2.0**-CONFIDENCE_CLASSES else min(CONFIDENCE_CLASSES, int(-math.log2(doubt) * 2))


def why_not(model: Any) -> str | None:
    """Why a model can't draft, or `None` if it can."""
    if not callable(getattr(model, "forward", None)) or not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        return f"{type(model).__name__} is no transformers model."
    if model.config.is_encoder_decoder:
        return f"{type(model).__name__} is an encoder-decoder model; use a decoder-only one."
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    reason = compat.why_no_roll_back(cache)
    return f"{reason}." if reason is not None else None


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
