"""The ways in: `generate` is the primitive; `speculate`, `enable` and `stream` lead to the same loop.

`generate` lets the model's own class prepare everything (`type(model).generate`, which some thirty families override) and takes over
where plain decoding would start, through the `custom_generate=` callable of transformers. That callable is handed neither streamer
nor tokenizer, so both are bound here.
"""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria

from . import compat
from .control import DepthController
from .decoding import Decoding, Row
from .recording import Recorder
from .rows import row_criteria, row_processors, why_not_row_by_row
from .speculator import DEFAULT_METHOD, Speculator
from .stats import RowStats, SpeculationStats
from .streaming import SpeculationStream
from .target import ManyRows, OneRow, Target, costs_of
from .tokens import TokenBuffer


logger = logging.getLogger(__name__)

RECIPE = str(Path(__file__).parent)
"""The folder that `custom_generate=` loads: it holds `custom_generate/generate.py`."""


class _Unset:
    def __repr__(self) -> str:
        return "unset"


UNSET: Any = _Unset()


def generate(model: Any, inputs: torch.Tensor | None = None, *, speculation: Any = UNSET, **kwargs: Any) -> Any:
    """
    `model.generate(inputs, **kwargs)`, faster and with the same output.

    Args:
        model (`PreTrainedModel`): the target.
        inputs (`torch.Tensor`, *optional*): as in `generate()`.
        speculation (*optional*): a method name, a dict with vLLM's keys, a `SpeculationConfig`, a `Speculator`, a transformers
            `CandidateGenerator` (one row), or `None` for transformers' own `generate()`. Left out: what transformers' own arguments
            ask for (`prompt_lookup_num_tokens=`), otherwise `"ngram"`.
        kwargs: everything else that `generate()` takes.

    Returns:
        what `generate()` returns; with `return_dict_in_generate=True` its attribute `.speculation` is a `SpeculationStats`.

    Raises:
        ValueError, TypeError: before any forward pass, for an argument that is wrong or that speculation doesn't go with.
    """
    return _generate(model, inputs, speculation, asked=speculation is not UNSET, default=DEFAULT_METHOD, **kwargs)


def speculate(speculation: Any = DEFAULT_METHOD) -> dict[str, Any]:
    """
    Keyword arguments for `model.generate()`: `model.generate(**inputs, **assistgen.speculate("ngram"), max_new_tokens=256)`.

    Uses transformers' `custom_generate=` with a folder inside this package, which transformers copies into its modules cache
    (`HF_MODULES_CACHE`) before it runs it.

    Args:
        speculation: as in `generate`.

    Raises:
        OSError: if the modules cache can't be written to. `assistgen.generate(model, …)` needs none.
    """
    from transformers.utils import HF_MODULES_CACHE

    try:
        os.makedirs(HF_MODULES_CACHE, exist_ok=True)
        with tempfile.TemporaryFile(dir=HF_MODULES_CACHE):
            pass
    except OSError as error:
        raise OSError(
            f"transformers' modules cache {HF_MODULES_CACHE!r} can't be written to ({error}). Set HF_MODULES_CACHE to a writable folder, "
            "or call assistgen.generate(model, …), which needs none."
        ) from error
    # A name or a dict is checked here and still makes fresh state for each call.
    if speculation is not None:
        Speculator.of(speculation)
    return {"custom_generate": RECIPE, "trust_remote_code": True, "speculation": speculation}


def enable(model: Any, speculation: Any = DEFAULT_METHOD) -> Speculator:
    """
    Makes `model.generate()` speculate by default, for pipelines and code that can't be changed. The call's own `speculation=` and
    transformers' own arguments come first. A call that can't be sped up runs plainly, with one warning.

    Args:
        model: the target.
        speculation: as in `generate`.

    Returns:
        `Speculator`: with the totals in `.stats`; as a context manager it restores the model.
    """
    if not callable(getattr(type(model), "generate", None)):
        raise TypeError(f"`model` must be a transformers model with a `generate` method, got {type(model).__name__}.")
    if speculation is None:
        raise ValueError("`speculation` must not be None in enable(). Use disable(model) to switch speculation off.")
    speculator = Speculator.of(speculation)
    disable(model)

    def enabled_generate(self: Any, inputs: torch.Tensor | None = None, *args: Any, speculation: Any = UNSET, **kwargs: Any) -> Any:
        kwargs |= dict(zip(POSITIONAL, args, strict=False))
        if kwargs.get("custom_generate") == RECIPE:
            kwargs.pop("custom_generate")
            kwargs.pop("trust_remote_code", None)
        return _generate(self, inputs, speculation, asked=speculation is not UNSET, default=speculator, **kwargs)

    enabled_generate.replaced = vars(model).get("generate")  # type: ignore[attr-defined]
    model.generate = types.MethodType(enabled_generate, model)
    speculator.enabled_on(model)
    return speculator


POSITIONAL = ("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model",
              "streamer", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate")  # fmt: skip
"""`generate()`'s parameters after `inputs`, in order."""


def disable(model: Any) -> None:
    """Restores the `generate` that `enable` replaced. Does nothing if the model isn't enabled."""
    function: Any = getattr(vars(model).get("generate"), "__func__", None)
    if not hasattr(function, "replaced"):
        return
    if function.replaced is None:
        del model.generate
    else:
        model.generate = function.replaced


def stream(
    model: Any,
    tokenizer: Any,
    inputs: torch.Tensor | None = None,
    *,
    speculation: Any = DEFAULT_METHOD,
    skip_special_tokens: bool = True,
    **kwargs: Any,
) -> SpeculationStream:
    """
    Generates one row and yields a `Chunk` (`text`, `token_ids`, `sources`) for each round, without a thread.

    Args:
        model, inputs, speculation, kwargs: as in `generate`; `speculation=None` streams plain decoding.
        tokenizer: the model's.
        skip_special_tokens (`bool`, defaults to `True`): leave special tokens out of `chunk.text`.

    Returns:
        `SpeculationStream`: an iterator. Closing it ends generation within one round; `.output` then has what `generate()` would have
        returned, with `.speculation`.
    """
    if "streamer" in kwargs:
        raise ValueError("`streamer` and stream() exclude each other: iterate over stream(), or pass `streamer` to generate().")
    started: list[tuple[Decoding, Callable[[Any], Any]]] = []
    kwargs["return_dict_in_generate"] = True
    _generate(model, inputs, speculation, asked=True, default=None, tokenizer=tokenizer, run=lambda *call: started.append(call), **kwargs)
    return SpeculationStream(started[0][0], tokenizer, skip_special_tokens, started[0][1])


def _generate(
    model: Any,
    inputs: torch.Tensor | None,
    speculation: Any,
    *,
    asked: bool,
    default: Any,
    run: Callable[[Decoding, Callable[[Any], Any]], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """
    Args:
        asked (`bool`): the call itself asked for speculation, so what doesn't go with it is an error; otherwise it runs plainly.
        default: the speculation if neither `speculation` nor transformers' own arguments ask for one.
        run (*optional*): gets the prepared `Decoding` and what is to be done with its output; by default it is run to the end.
    """
    start = perf_counter()
    plain_generate = type(model).generate
    if kwargs.get("custom_generate") is not None:
        if asked and speculation is not None:
            raise ValueError("`custom_generate` and `speculation` exclude each other: each replaces the decode loop.")
        return plain_generate(model, inputs, **kwargs)

    if speculation is UNSET and _needs_transformers(kwargs):
        return plain_generate(model, inputs, **kwargs)
    assistant = kwargs.pop("assistant_model", None)
    effective = _effective_config(model, kwargs)
    if speculation is UNSET:
        speculation = _from_transformers_arguments(effective, assistant, default, kwargs)
    elif assistant is not None and speculation is not None:
        raise ValueError("`assistant_model` and `speculation` exclude each other: put the draft model into one of them.")
    elif assistant is not None:
        kwargs["assistant_model"] = assistant
    if speculation is None and run is None:
        return _plain(plain_generate(model, inputs, **kwargs))

    speculator = Speculator.of(speculation) if speculation is not None else None
    problem = _problem(model, effective, kwargs)
    if problem is not None:
        if asked:
            raise ValueError(problem)
        _warn_once(f"This call isn't sped up: {problem}")
        return _plain(plain_generate(model, inputs, **kwargs), reason=problem)

    for name in ("prompt_lookup_num_tokens", "assistant_early_exit"):  # another loop's switches, from a saved configuration
        if getattr(effective, name, None) is not None:
            kwargs[name] = None
    streamer, tokenizer = kwargs.pop("streamer", None), kwargs.pop("tokenizer", None)
    if speculator is not None and speculator.draft_model is not None:
        _check_tokenizers(tokenizer, kwargs.get("assistant_tokenizer"))
    kwargs.pop("assistant_tokenizer", None)
    _check_blocks(speculator, effective, kwargs.get("logits_processor"))
    user_processors, user_criteria = kwargs.get("logits_processor"), list(kwargs.pop("stopping_criteria", None) or ())
    if effective.stop_strings is not None:
        if tokenizer is None:
            raise ValueError("`stop_strings` needs the model's tokenizer: pass `tokenizer=`.")
        user_criteria.append(StopStringCriteria(tokenizer, effective.stop_strings))
        kwargs["stop_strings"] = None

    def decode(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        inputs_tensor: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        if model.config.is_encoder_decoder and speculator is not None and speculator.draft_model is not None:
            raise ValueError("`method='draft_model'` is not available yet for encoder-decoder models.")
        if run is not None and input_ids.shape[0] != 1:
            raise ValueError(f"stream() takes one row, got {input_ids.shape[0]}. Use generate() with a `streamer` for batches.")
        stats = SpeculationStats()
        if streamer is not None:
            streamer.put(input_ids.cpu())
        reason = None
        if input_ids.shape[0] > 1:
            if speculator is not None and speculator.one_row_only:
                raise ValueError(f"`speculation`: a CandidateGenerator drafts for one row, this call has {input_ids.shape[0]}.")
            reason = ManyRows.why_not(model, generation_config, model_kwargs) or why_not_row_by_row(
                user_processors, user_criteria, generation_config, inputs_tensor, input_ids.shape[0]
            )
            if reason is not None:
                return _decode_plainly(
                    model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer, stats, reason, start,
                    speculator,
                )  # fmt: skip
        tokens = TokenBuffer(input_ids)
        target: Target
        if input_ids.shape[0] == 1:
            reason = compat.why_no_roll_back(model_kwargs.get(compat.CACHE))
            target = OneRow(model, tokens, generation_config, model_kwargs)
            rows = [Row(0, logits_processor, row_criteria(stopping_criteria))]
        else:
            returns_cache = generation_config.return_dict_in_generate or _is_users(model_kwargs.get(compat.CACHE), kwargs)
            target = ManyRows(
                model,
                tokens,
                generation_config,
                model_kwargs,
                returns_cache=returns_cache,
                rows_come_back=not any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria),
                max_slots=generation_config.max_length,
            )
            processors = row_processors(
                model, generation_config, input_ids, inputs_tensor, user_processors, kwargs.get("prefix_allowed_tokens_fn"), model_kwargs
            )
            rows = [Row(n, processors[n], row_criteria(stopping_criteria)) for n in range(input_ids.shape[0])]
        if reason is not None:
            stats.count_fallback(reason)
        config = model.config.get_text_config(decoder=True)
        decoding = Decoding(
            target=target,
            tokens=tokens,
            rows=rows,
            drafter=speculator.drafter(model, generation_config, input_ids.device) if speculator is not None and reason is None else None,
            judges_blocks=speculator is not None and speculator.uses_blocks,
            max_draft_tokens=speculator.max_draft_tokens if speculator is not None else 0,
            controller=speculator.controller if speculator is not None else DepthController(),
            costs=costs_of(model),
            generation_config=generation_config,
            stopping_criteria=stopping_criteria,
            recorder=Recorder(generation_config, model_kwargs, len(rows), model.config.is_encoder_decoder),
            streamer=streamer,
            position_limit=getattr(config, "max_position_embeddings", None),
            vocab_size=config.vocab_size,
            prompt_tokens=lambda: _prompts(input_ids, model_kwargs.get("attention_mask")),
            stats=stats,
            start=start,
        )

        def finish(output: Any) -> Any:
            if speculator is not None:
                speculator.add(stats)
            return _attach(output, stats)

        if run is not None:
            return run(decoding, finish)
        for _ in decoding.run():
            pass
        return finish(decoding.output)

    return plain_generate(model, inputs, custom_generate=decode, stopping_criteria=StoppingCriteriaList(user_criteria), **kwargs)


def _needs_transformers(kwargs: dict[str, Any]) -> bool:
    """Whether transformers' own arguments ask for a way of drafting that only transformers has so far."""
    if kwargs.get("assistant_early_exit") is not None:
        return True
    tokenizer, assistant = kwargs.get("tokenizer"), kwargs.get("assistant_tokenizer")
    return kwargs.get("assistant_model") is not None and assistant is not None and not _same_vocabulary(tokenizer, assistant)


def _from_transformers_arguments(config: Any, assistant: Any, default: Any, kwargs: dict[str, Any]) -> Any:
    """The speculation that `assistant_model=` or `prompt_lookup_num_tokens=` asks for, else the default."""
    if assistant is not None:
        return {
            "method": "draft_model",
            "model": assistant,
            "num_speculative_tokens": kwargs.get("num_assistant_tokens"),
            "draft_confidence_threshold": kwargs.get("assistant_confidence_threshold"),
        }
    if config.prompt_lookup_num_tokens is not None:
        return {"method": "ngram", "num_speculative_tokens": config.prompt_lookup_num_tokens}
    return default


def _same_vocabulary(first: Any, second: Any) -> bool:
    return first is None or second is None or first is second or first.get_vocab() == second.get_vocab()


def _check_tokenizers(tokenizer: Any, assistant_tokenizer: Any) -> None:
    if not _same_vocabulary(tokenizer, assistant_tokenizer):
        raise ValueError(
            "`assistant_tokenizer` differs from the target's: drafting with a foreign tokenizer is not available yet. Use a draft model "
            "with the target's tokenizer."
        )


def _effective_config(model: Any, kwargs: dict[str, Any]) -> Any:
    """The call's generation config after the model's own values and the arguments: what `generate()` is going to use."""
    arguments = {name: value for name, value in kwargs.items() if name not in POSITIONAL}
    config = kwargs.get("generation_config")
    if config is not None:  # merged by hand: transformers warns about passing both, once, and that warning is for the real call
        config = copy.deepcopy(config)
        known = {name: arguments.pop(name) for name in list(arguments) if hasattr(config, name)}
        for name, value in known.items():
            setattr(config, name, value)
    effective, _ = model._prepare_generation_config(config, **arguments)
    return effective


def _problem(model: Any, config: Any, kwargs: dict[str, Any]) -> str | None:
    """What in a call doesn't go with speculation, with what to do about it; `None` if nothing."""
    if config.use_cache is False:
        return "`use_cache=False` doesn't go with speculation, which verifies against the cache. Leave it out."
    if (config.num_beams or 1) > 1:
        return f"`num_beams={config.num_beams}` doesn't go with speculation. Use `num_beams=1`, or `speculation=None`."
    if config.cache_implementation == "paged":
        return "`cache_implementation='paged'` doesn't go with speculation. Leave it out."
    if config.token_healing:
        return "`token_healing` doesn't go with speculation. Leave it out, or use `speculation=None`."
    if kwargs.get("synced_gpus"):
        return "`synced_gpus=True` doesn't go with speculation: ranks would take different numbers of forwards. Use `speculation=None`."
    for name in ("penalty_alpha", "dola_layers", "constraints", "force_words_ids"):
        if getattr(config, name, None) is not None:
            return f"`{name}` selects a decoding mode that doesn't go with speculation. Leave it out, or use `speculation=None`."
    lookup = copy.copy(config)
    lookup.prompt_lookup_num_tokens = lookup.assistant_early_exit = None
    mode = lookup.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"the decoding mode {mode.value!r} doesn't go with speculation. Use greedy search or sampling, or `speculation=None`."
    return None


def _check_blocks(speculator: Speculator | None, config: Any, user_processors: Any) -> None:
    if speculator is None or not speculator.uses_blocks:
        return
    if user_processors or (config.guidance_scale or 1) != 1:
        raise ValueError(
            "`rejection_sample_method='block'` looks at whole blocks, so it doesn't go with processors of your own or `guidance_scale`, "
            "which may only see what is committed. Use 'standard'."
        )


def _decode_plainly(
    model: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    streamer: Any,
    stats: SpeculationStats,
    reason: str,
    start: float,
    speculator: Speculator | None,
) -> Any:
    """A batch whose rows can't advance on their own: transformers' own loop, with the reason in the statistics."""
    stats.count_fallback(reason)
    watch = _StepWatch(streamer, start, stats)
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
        watch.close()
    rows = input_ids.shape[0]
    stats.rows = [RowStats(num_tokens=stats.target_forwards) for _ in range(rows)]
    stats.num_tokens = stats.target_forwards * rows
    if speculator is not None:
        speculator.add(stats)
    return _attach(output, stats)


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
        self.close()

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._stats.other_s = perf_counter() - self._start
            if self._streamer is not None:
                self._streamer.end()


def _plain(output: Any, reason: str | None = None) -> Any:
    """Transformers' own output, with statistics that say that nothing was speculated."""
    stats = SpeculationStats()
    if reason is not None:
        stats.count_fallback(reason)
    return _attach(output, stats)


def _attach(output: Any, stats: SpeculationStats) -> Any:
    if output is not None and not isinstance(output, torch.Tensor):
        output.speculation = stats
    return output


def _is_users(cache: Any, kwargs: dict[str, Any]) -> bool:
    return cache is not None and any(kwargs.get(name) is cache for name in compat.CACHE_NAMES)


def _prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    """The rows' prompts without padding."""
    rows = input_ids.tolist()
    if attention_mask is None or attention_mask.shape != input_ids.shape:
        return rows
    return [[token for token, real in zip(row, mask, strict=True) if real] for row, mask in zip(rows, attention_mask.tolist(), strict=True)]


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
