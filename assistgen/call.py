"""One `generate()` call from the point where transformers has prepared it: rows, target, drafter, and off into the loop.

Transformers calls a `Call` through `custom_generate=`. It hands such a callable neither streamer nor tokenizer, so they are bound here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from . import compat
from .captured import FixedRows
from .control import DepthController
from .decoding import Decoding, Row
from .inputs import Inputs, rows_of
from .recording import Recorder
from .rows import row_criteria, row_processors, why_not_row_by_row
from .speculator import Speculator
from .stats import RowStats, SpeculationStats
from .target import RowsApart, RowsInStep, Target
from .tokens import TokenBuffer


@dataclass
class Call:
    """
    Attributes:
        speculator (`Speculator`, *optional*): `None` decodes plainly, in the same loop.
        processors, criteria, prefix_allowed_tokens_fn: the user's own.
        cache: the cache that the user handed in.
        streamer (`BaseStreamer`, *optional*): the user's.
        tokenizer, assistant_tokenizer (*optional*): the model's and the draft model's, if the call has them.
        given (`dict`): the arguments of the user's call.
        run (*optional*): gets the prepared `Decoding` and what is to be done with its output, and makes the result; by default the
            `Decoding` is run to its end.
        start (`float`): `perf_counter()` at the call.
        stats (`SpeculationStats`): what happened; a total if the model's `generate()` decodes in several parts.
    """

    speculator: Speculator | None
    processors: Any
    criteria: list[Any]
    prefix_allowed_tokens_fn: Any
    cache: Any
    streamer: Any
    tokenizer: Any
    assistant_tokenizer: Any
    given: dict[str, Any]
    run: Callable[[Decoding, Callable[[Any], Any]], Any] | None
    start: float
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        inputs_tensor: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers calls in place of its own loop; returns what `generate()` is to return."""
        num_rows, speculator = input_ids.shape[0], self.speculator
        if num_rows > 1 and self.run is not None:
            raise ValueError(f"stream() takes one row, got {num_rows}. Use generate() with a `streamer` for batches.")
        if num_rows > 1 and speculator is not None and speculator.one_row_only:
            raise ValueError(f"`speculation`: a CandidateGenerator drafts for one row, this call has {num_rows}.")
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())

        stats = SpeculationStats()
        tokens = TokenBuffer(input_ids, int(pad) if (pad := generation_config._pad_token_tensor) is not None else 0)
        reason = compat.why_no_roll_back(model_kwargs.get(compat.CACHE), model)
        processors = [logits_processor]
        why_not_several_at_once = compat.why_not_several_at_once(
            model, input_ids, model_kwargs.get("attention_mask"), generation_config.max_length
        )
        if num_rows > 1:
            apart = RowsApart.why_not(model, generation_config, model_kwargs) is None
            reason = (
                (reason if not apart else None)
                or why_not_several_at_once
                or why_not_row_by_row(self.processors, self.criteria, generation_config, inputs_tensor, num_rows)
            )
            if reason is not None:
                stats.count_fallback(reason)
                return self._plainly(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, stats)
            processors = row_processors(
                model, generation_config, input_ids, inputs_tensor, self.processors, self.prefix_allowed_tokens_fn, model_kwargs
            )
        elif (reason := reason or why_not_several_at_once) is not None:
            stats.count_fallback(reason)
            speculator = None
        kind: Any = RowsApart if num_rows > 1 and apart else RowsInStep
        if speculator is not None and speculator.compiles:
            reason = FixedRows.why_not(model, generation_config, model_kwargs)
            if reason is None:
                kind = FixedRows
            else:
                stats.count_fallback(f"not compiled: {reason}")
        target: Target = kind(
            model,
            tokens,
            generation_config,
            model_kwargs,
            returns_cache=generation_config.return_dict_in_generate or self.cache is not None,
            rows_come_back=not any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria),
        )
        inputs = self._inputs(model, input_ids, inputs_tensor, model_kwargs)
        decoding = Decoding(
            target=target,
            tokens=tokens,
            rows=[Row(number, processors[number], row_criteria(stopping_criteria)) for number in range(num_rows)],
            drafter=speculator.drafter(model, generation_config, inputs, stats) if speculator is not None else None,
            max_draft_tokens=speculator.max_draft_tokens if speculator is not None else lambda rows: 0,
            judges_blocks=speculator is not None and speculator.uses_blocks,
            # Processes that decode the same text must not follow their own clocks.
            controller=DepthController("constant") if speculator is None or compat.is_sharded(model) else speculator.controller,
            costs=target.costs,
            generation_config=generation_config,
            stopping_criteria=stopping_criteria,
            recorder=Recorder(generation_config, model_kwargs, num_rows, model.config.is_encoder_decoder),
            streamer=self.streamer,
            position_limits=compat.position_limits(model),
            prompt_tokens=inputs.prompts,
            stats=stats,
            start=self.start,
        )
        self.streamer = None  # the loop ends it from here on
        if self.run is not None:
            return self.run(decoding, lambda output: self._finish(output, stats))
        for _ in decoding.run():
            pass
        return self._finish(decoding.output, stats)

    @contextmanager
    def ending_the_streamer(self) -> Iterator[None]:
        """An error before the loop starts ends the streamer too: nobody waits for text that won't come."""
        try:
            yield
        except BaseException:
            if self.streamer is not None:
                self.streamer.end()
            raise

    def _inputs(self, model: Any, input_ids: torch.Tensor, inputs_tensor: torch.Tensor | None, model_kwargs: dict[str, Any]) -> Inputs:
        source = None
        if model.config.is_encoder_decoder and inputs_tensor is not None:
            source = inputs_tensor.repeat_interleave(input_ids.shape[0] // inputs_tensor.shape[0], dim=0)
        lookup_ids = self.speculator.lookup_ids if self.speculator is not None else None
        return Inputs(
            target=model,
            prompt=input_ids,
            attention_mask=model_kwargs.get("attention_mask"),
            source=source,
            encoder_outputs=model_kwargs.get("encoder_outputs"),
            given=self.given,
            tokenizer=self.tokenizer,
            assistant_tokenizer=self.assistant_tokenizer,
            cache=lambda: model_kwargs.get(compat.CACHE),
            lookup_ids=rows_of(lookup_ids, input_ids.shape[0]) if lookup_ids is not None else None,
        )

    def _finish(self, output: Any, stats: SpeculationStats) -> Any:
        self.stats.add(stats)
        if self.speculator is not None:
            self.speculator.add(stats)
        return attach(output, stats)

    def _plainly(
        self,
        model: Any,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        stats: SpeculationStats,
    ) -> Any:
        """A batch whose rows can't advance on their own: transformers' own loop."""
        watch = _StepWatch(self.streamer, self.start, stats)
        self.streamer = None
        try:
            output = type(model)._sample(
                model,
                input_ids,
                logits_processor=processors,
                stopping_criteria=criteria,
                generation_config=generation_config,
                streamer=watch,
                **model_kwargs,
            )
        finally:
            watch.end()
        rows = input_ids.shape[0]
        stats.rows = [RowStats(num_tokens=stats.target_forwards) for _ in range(rows)]
        stats.num_tokens = stats.target_forwards * rows
        return self._finish(output, stats)


def attach(output: Any, stats: SpeculationStats) -> Any:
    """Puts the statistics on an output object, as an attribute; a bare tensor or dict has no place for them."""
    if hasattr(output, "__dict__") and not isinstance(output, torch.Tensor):
        output.speculation = stats
    return output


class _StepWatch:
    """A streamer that passes everything on and notes when."""

    def __init__(self, streamer: Any, start: float, stats: SpeculationStats):
        self._streamer, self._start, self._stats = streamer, start, stats
        self._last = start
        self._ended = False

    def put(self, value: torch.Tensor) -> None:
        now = perf_counter()
        self._stats.target_forwards += 1
        if self._stats.ttft_s is None:
            self._stats.ttft_s = now - self._start
        else:
            self._stats.itl_s.append(now - self._last)
        self._last = now
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._stats.other_s = perf_counter() - self._start
            if self._streamer is not None:
                self._streamer.end()
