"""The ways in: `generate` is the primitive; `speculate`, `enable` and `stream` lead to the same loop.

`generate` checks, then lets the model's own class prepare everything (`type(model).generate`, which some thirty families override) and
takes over where plain decoding would start (`call.py`).
"""

from __future__ import annotations

import copy
import logging
import os
import tempfile
import types
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria

from . import compat
from .call import Call, attach
from .inputs import rows_of
from .speculator import DEFAULT_METHOD, Speculator
from .stats import SpeculationStats
from .streaming import SpeculationStream


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
            ask for (`prompt_lookup_num_tokens=`), otherwise `"auto"`.
        kwargs: everything else that `generate()` takes.

    Returns:
        what `generate()` returns; with `return_dict_in_generate=True` its attribute `.speculation` is a `SpeculationStats`.

    Raises:
        ValueError, TypeError: before any forward pass, for an argument that is wrong or that speculation doesn't go with.
    """
    return _generate(model, inputs, speculation, asked=speculation is not UNSET, default=DEFAULT_METHOD, **kwargs)


def speculate(speculation: Any = DEFAULT_METHOD) -> dict[str, Any]:
    """
    Keyword arguments for `model.generate()`: `model.generate(**inputs, **assistgen.speculate("auto"), max_new_tokens=256)`.

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
    speculation: Any = UNSET,
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
    kwargs |= {"return_dict_in_generate": True, "tokenizer": tokenizer}
    return _generate(
        model,
        inputs,
        speculation,
        asked=True,
        default=DEFAULT_METHOD,
        run=lambda decoding, finish: SpeculationStream(decoding, tokenizer, skip_special_tokens, finish),
        **kwargs,
    )


def _generate(
    model: Any, inputs: torch.Tensor | None, speculation: Any, *, asked: bool, default: Any, run: Any = None, **kwargs: Any
) -> Any:
    """
    Args:
        asked (`bool`): the call itself asked for speculation, so what doesn't go with it is an error; otherwise it runs plainly.
        default: the speculation if neither `speculation` nor transformers' own arguments ask for one.
        run (*optional*): see `Call`.
    """
    start = perf_counter()
    generate_method = type(model).generate

    def plain_generate(model: Any, inputs: Any, **kwargs: Any) -> Any:
        # Some classes have no `inputs`, or call their first parameter otherwise.
        return generate_method(model, **kwargs) if inputs is None else generate_method(model, inputs, **kwargs)

    if kwargs.get("custom_generate") is not None:
        if asked and speculation is not None:
            raise ValueError("`custom_generate` and `speculation` exclude each other: each replaces the decode loop.")
        return plain_generate(model, inputs, **kwargs)
    effective = _effective_config(model, kwargs)
    if speculation is UNSET:
        speculation = _from_transformers_arguments(effective, kwargs.pop("assistant_model", None), default, kwargs)
    elif speculation is not None and kwargs.get("assistant_model") is not None:
        raise ValueError("`assistant_model` and `speculation` exclude each other: put the draft model into one of them.")
    if speculation is None and run is None:
        return attach(plain_generate(model, inputs, **kwargs), SpeculationStats())

    speculator = Speculator.of(speculation) if speculation is not None else None
    problem = _problem(model, effective, kwargs)
    if problem is not None:
        if asked:
            raise ValueError(problem)
        _warn_once(f"This call isn't sped up: {problem}")
        return attach(plain_generate(model, inputs, **kwargs), SpeculationStats(fallbacks={problem: 1}))
    if speculator is not None:
        _check_speculation(model, speculator, effective, {"inputs": inputs, **kwargs})

    for name in ("prompt_lookup_num_tokens", "assistant_early_exit"):  # another loop's switches, from a saved configuration
        if getattr(effective, name, None) is not None:
            kwargs[name] = None
    tokenizer = kwargs.pop("tokenizer", None)
    criteria = list(kwargs.pop("stopping_criteria", None) or ())
    if effective.stop_strings is not None:
        if tokenizer is None:
            raise ValueError("`stop_strings` needs the model's tokenizer: pass `tokenizer=`.")
        criteria.append(StopStringCriteria(tokenizer, effective.stop_strings))
        kwargs["stop_strings"] = None
    given = {name: value for name, value in {"inputs": inputs, **kwargs}.items() if isinstance(value, torch.Tensor)}
    call = Call(
        speculator=speculator,
        processors=kwargs.get("logits_processor"),
        criteria=criteria,
        prefix_allowed_tokens_fn=kwargs.get("prefix_allowed_tokens_fn"),
        cache=next((kwargs[name] for name in compat.CACHE_NAMES if kwargs.get(name) is not None), None),
        streamer=kwargs.pop("streamer", None),
        tokenizer=tokenizer,
        assistant_tokenizer=kwargs.pop("assistant_tokenizer", None),
        given=given,
        run=run,
        start=start,
    )
    with call.ending_the_streamer():
        output = plain_generate(model, inputs, custom_generate=call, stopping_criteria=StoppingCriteriaList(criteria), **kwargs)
    # Whisper decodes a long sound in parts and makes an output of its own.
    return output if hasattr(output, "speculation") or run is not None else attach(output, call.stats)


def _from_transformers_arguments(config: Any, assistant: Any, default: Any, kwargs: dict[str, Any]) -> Any:
    """The speculation that `assistant_model=` or `prompt_lookup_num_tokens=` asks for, else the default."""
    if assistant is not None:
        return {
            "method": "draft_model",
            "model": assistant,
            "num_speculative_tokens": kwargs.get("num_assistant_tokens"),
            "draft_confidence_threshold": kwargs.get("assistant_confidence_threshold"),
        }
    if config.assistant_early_exit is not None:
        return {
            "method": "early_exit",
            "assistant_early_exit": config.assistant_early_exit,
            "num_speculative_tokens": kwargs.get("num_assistant_tokens"),
            "draft_confidence_threshold": kwargs.get("assistant_confidence_threshold"),
        }
    if config.prompt_lookup_num_tokens is not None:
        return {"method": "ngram", "num_speculative_tokens": config.prompt_lookup_num_tokens}
    return default


def _effective_config(model: Any, kwargs: dict[str, Any]) -> Any:
    """The call's generation config after the model's own values and the arguments: what `generate()` is going to use."""
    arguments = {name: value for name, value in kwargs.items() if name not in (*POSITIONAL, *compat.CACHE_NAMES)}
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
        return (
            "`use_cache=False`, the call's or the model's, doesn't go with speculation, which verifies against the cache. Set it to True."
        )
    if (config.num_beams or 1) > 1:
        return f"`num_beams={config.num_beams}` doesn't go with speculation. Use `num_beams=1`, or `speculation=None`."
    if config.cache_implementation == "paged":
        return "`cache_implementation='paged'` doesn't go with speculation. Leave it out."
    if config.token_healing:
        return "`token_healing` doesn't go with speculation. Leave it out, or use `speculation=None`."
    synced = kwargs.get("synced_gpus")
    if synced or (synced is None and compat.ranks_in_step(model)):
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


def _check_speculation(model: Any, speculator: Speculator, config: Any, kwargs: dict[str, Any]) -> None:
    """What doesn't go with the speculation, before any forward pass."""
    has_ids = kwargs.get("inputs") is not None or kwargs.get("input_ids") is not None
    if speculator.runs_a_model and kwargs.get("inputs_embeds") is not None and not has_ids and speculator.lookup_ids is None:
        raise ValueError("`inputs_embeds` says nothing to a draft model: give the prompt's ids as `lookup_ids` in `speculation`.")
    if speculator.draft_model is None:
        if kwargs.get("assistant_tokenizer") is not None:
            raise ValueError("`assistant_tokenizer` is for a draft model, and this call has none.")
    else:
        speculator.check_vocabularies(model, kwargs.get("tokenizer"), kwargs.get("assistant_tokenizer"))
    if speculator.lookup_ids is not None:
        highest = max((max(text, default=0) for text in rows_of(speculator.lookup_ids)), default=0)
        if highest >= (vocab_size := model.config.get_text_config(decoder=True).vocab_size):
            raise ValueError(f"`lookup_ids` holds the id {highest}, outside the target's vocabulary of {vocab_size}.")
    if speculator.uses_blocks and (kwargs.get("logits_processor") or (config.guidance_scale or 1) != 1):
        raise ValueError(
            "`rejection_sample_method='block'` looks at whole blocks, so it doesn't go with processors of your own or `guidance_scale`, "
            "which may only see what is committed. Use 'standard'."
        )


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
