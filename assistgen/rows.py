"""Processors and criteria of a batch, taken apart row by row: rows advance at different speeds, so each sees its own prefix only."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria


ROW_INDEPENDENT_PROCESSORS = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
        "EpsilonLogitsWarper", "EtaLogitsWarper", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor", "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "ExponentialDecayLengthPenalty", "LogitNormalization",
        "SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    )
    if hasattr(logits_process, name)
)  # fmt: skip
"""Processors of transformers that do the same to a row alone as to the row in its batch."""

ROW_INDEPENDENT_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, StopStringCriteria)


def why_not_row_by_row(
    processors: Any, criteria: Any, generation_config: Any, inputs_tensor: torch.Tensor | None, num_rows: int
) -> str | None:
    """
    Why a batch has to be processed as a whole, or `None`.

    Args:
        processors, criteria: the user's own. They run row by row if they carry the attribute `row_independent = True`.
        generation_config (`GenerationConfig`): makes transformers' own processors.
        inputs_tensor (`torch.Tensor`, *optional*): the prompt before it was repeated for `num_return_sequences`.
        num_rows (`int`): rows of the batch.
    """
    for kind, known, items in (("processor", ROW_INDEPENDENT_PROCESSORS, processors), ("criterion", ROW_INDEPENDENT_CRITERIA, criteria)):
        for item in items or ():
            if type(item) not in known and not getattr(item, "row_independent", False):
                return f"the {kind} {type(item).__name__} is not marked `row_independent`"
    if generation_config.guidance_scale is not None and generation_config.guidance_scale != 1:
        return "`guidance_scale` runs the model on the whole batch"
    if generation_config.watermarking_config is not None:
        return "`watermarking_config` draws for the whole batch"
    if inputs_tensor is not None and inputs_tensor.shape[0] != num_rows:
        for name, off in (("encoder_repetition_penalty", 1.0), ("encoder_no_repeat_ngram_size", 0)):
            if getattr(generation_config, name, None) not in (None, off):
                return f"`{name}` with several return sequences looks at the whole batch"
    return None


def row_processors(
    model: Any,
    generation_config: Any,
    input_ids: torch.Tensor,
    inputs_tensor: torch.Tensor | None,
    user_processors: Any,
    prefix_allowed_tokens_fn: Any,
    model_kwargs: dict[str, Any],
) -> list[LogitsProcessorList]:
    """Transformers' own processors made anew for each row (some index rows), the user's shared by all."""
    num_rows = input_ids.shape[0]
    copies = num_rows // inputs_tensor.shape[0] if inputs_tensor is not None else 1
    mask = model_kwargs.get("attention_mask")
    rows = []
    for row in range(num_rows):
        allowed = None
        if prefix_allowed_tokens_fn is not None:
            # The function is told the prompt's number, however many rows were made of it.
            allowed = _for_prompt(prefix_allowed_tokens_fn, row // copies)
        rows.append(
            model._get_logits_processor(
                generation_config=generation_config,
                input_ids_seq_length=input_ids.shape[1],
                encoder_input_ids=inputs_tensor[row // copies][None] if inputs_tensor is not None else None,
                prefix_allowed_tokens_fn=allowed,
                logits_processor=user_processors,
                device=input_ids.device,
                model_kwargs={"attention_mask": mask[row : row + 1]} if mask is not None else {},
            )
        )
    return rows


def _for_prompt(prefix_allowed_tokens_fn: Any, number: int) -> Any:
    return lambda _, prefix: prefix_allowed_tokens_fn(number, prefix)


def row_criteria(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """The criteria that have to be called: all but length and end-of-sequence tokens, which the loop checks as numbers."""
    return StoppingCriteriaList(c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria))
