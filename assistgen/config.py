"""What a user may ask for: the keys of `speculation=`, their checks and their defaults.

The names are those of vLLM's `speculative_config` wherever vLLM has one, so that a config written for it runs here. This module
knows neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


logger = logging.getLogger(__name__)

COSTLY = ("draft_model", "early_exit")
"""Methods that run a model."""

METHODS = ("auto", "ngram", "suffix", "draft_model", "early_exit")
ALIASES = {"prompt_lookup": "ngram"}

WITHOUT_MEANING = frozenset(
    [
        "draft_tensor_parallel_size",
        "quantization",
        "moe_backend",
        "attention_backend",
        "kv_cache_dtype",
        "max_model_len",
        "revision",
        "code_revision",
        "enforce_eager",
        "disable_padded_drafter_batch",
        "disable_eagle_block_drop",
        "use_local_argmax_reduction",
        "parallel_drafting",
        "enable_adaptive_verification",
        "dspark_draft_topk",
        "disable_by_batch_size",
    ]
)
"""vLLM keys about its own engine: accepted, with one info line."""

LOSSY = frozenset({"synthetic_acceptance_rates", "synthetic_acceptance_length", "assistant_ensemble_weight"})
"""Keys that would change what the target says: refused."""

CHOICES = {
    "depth": ("adaptive", "constant", "heuristic", "confidence"),
    "draft_sample_method": ("greedy", "probabilistic"),
    "rejection_sample_method": ("standard", "block"),
}


@dataclass(frozen=True)
class SpeculationConfig:
    """
    How to speculate. Frozen; a wrong value raises a `ValueError` or `TypeError` that names the key.

    Args:
        method (`str`, defaults to `"auto"`): the drafter: `"ngram"` (alias `"prompt_lookup"`), `"suffix"`, `"draft_model"`,
            `"early_exit"` (the target's first layers), or `"auto"`:
            suffix decoding, n-grams if their sizes are given, and `model` if there is one, chosen each round by what they promise.
        model (`PreTrainedModel` or `str`, *optional*): the draft model, or its folder or hub id (loaded once in a process). A padded
            vocabulary is fine, and so is a foreign one: the tokenizers are the call's (`tokenizer=`, `assistant_tokenizer=`) or those in
            the models' folders.
        use_heterogeneous_vocab (`bool`, *optional*): with a foreign tokenizer, `True` drafts the tokens that both vocabularies have,
            `False` refuses; `None` does that where drafts are sampled or nearly all tokens are shared, and drafts by text otherwise.
        assistant_early_exit (`int`, *optional*): how many layers `"early_exit"` drafts with.
        num_speculative_tokens (`int`, *optional*): the most tokens drafted in a round, in a tree altogether. `None`: 15, so that a round's
            forward is at most 16 tokens wide.
        num_speculative_tokens_per_batch_size (`list`, *optional*): `(start, end, most)`: at most so many tokens are drafted a row while
            `start` … `end` rows run. A gap between entries belongs to the one before, as in vLLM.
        prompt_lookup_min (`int`, *optional*): shortest n-gram that is looked up, in tokens. `None`: 2 (or `prompt_lookup_max` if
            that is smaller).
        prompt_lookup_max (`int`, *optional*): longest n-gram that is looked up, in tokens. `None`: 5 (or `prompt_lookup_min` if
            that is larger).
        suffix_decoding_max_tree_depth (`int`, defaults to 24): the longest repetition that is looked for, in tokens.
        suffix_decoding_max_spec_factor (`float`, *optional*): a suffix draft is at most so many times as long as the repetition that
            stands behind it. `None`: as long as it is likely enough.
        suffix_decoding_min_token_prob (`float`, *optional*): tokens that are less likely to be accepted aren't drafted.
            `None`: 0.002.
        suffix_decoding_max_cached_requests (`int`, *optional*): a store for so many earlier outputs, in the `Speculator`, in place of
            `store`. 0 and `None`: none.
        store (`SuffixStore`, *optional*): earlier texts that suffix decoding searches, and that this call's outputs are added to.
        lookup_ids (`list[int]`, `list[list[int]]` or `torch.LongTensor`, *optional*): a text, or one for each row, that the output is
            likely to repeat: searched like the prompt. Where the prompt comes as `inputs_embeds`, its ids, for every drafter.
        depth (`str`, defaults to `"adaptive"`): `"adaptive"` verifies as many drafted tokens as are expected to pay, none included;
            `"constant"` verifies every drafted token; `"heuristic"` two more after a draft that was accepted whole, one less after
            another (transformers' rule); `"confidence"` those that the drafter gives at least `draft_confidence_threshold`, or 0.4.
        draft_sample_method (`str`, defaults to `"greedy"`): when sampling, `"greedy"` drafts the draft model's likeliest token (with the
            same seed the text is plain decoding's); `"probabilistic"` draws from its distribution, which is accepted more often.
        rejection_sample_method (`str`, defaults to `"standard"`): for probabilistic drafts, token by token, or `"block"` (block
            verification, arXiv 2403.10444), which accepts at least as many. Both are lossless.
        draft_temperature (`float`, *optional*): of probabilistic drafts. `None`: the target's.
        draft_confidence_threshold (`float`, *optional*): a draft ends where the draft model gives its likeliest token a lower
            probability. `None`: as long as drafting on is expected to pay.
        compile (`bool` or `str`, *optional*): `True` runs target and draft model in fixed shapes, captured as CUDA graphs on a GPU. That
            is experimental, so `"auto"` and `None` don't choose it by themselves yet.
        min_acceptance (`float`, *optional*): a drafter of whose tokens fewer are accepted is out of the call; of a tree, those of its
            longest path count.
        draft_timeout_s (`float`, *optional*): a drafter that takes longer in a round is out of the call; its thread is left behind.
        drafters (`list`, *optional*): several drafters as one, each a method name or a dict with these keys; the earlier ones are asked
            first, a draft model only where their drafts promise less. In place of `method`.
    """

    method: str = "auto"
    model: Any = None
    use_heterogeneous_vocab: bool | None = None
    assistant_early_exit: int | None = None
    num_speculative_tokens: int | None = None
    num_speculative_tokens_per_batch_size: Sequence[tuple[int, int, int]] | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    suffix_decoding_max_cached_requests: int | None = None
    store: Any = None
    lookup_ids: Any = None
    depth: str = "adaptive"
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"
    draft_temperature: float | None = None
    draft_confidence_threshold: float | None = None
    compile: bool | str | None = None
    min_acceptance: float | None = None
    draft_timeout_s: float | None = None
    drafters: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            raise TypeError(f"`method` must be a string, got {type(self.method).__name__}.")
        method = ALIASES.get(self.method, self.method)
        if method not in METHODS:
            known = (*METHODS, *ALIASES)
            raise ValueError(f"`method={self.method!r}` is unknown. {_nearest(self.method, known)}Choose one of {', '.join(known)}.")
        object.__setattr__(self, "method", method)

        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth",
                     "assistant_early_exit"):  # fmt: skip
            _check_count(name, getattr(self, name))
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"`prompt_lookup_min` ({low}) must not be larger than `prompt_lookup_max` ({high}).")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        _check_number("draft_temperature", self.draft_temperature, 0.0, float("inf"), "larger than 0")
        _check_number("draft_confidence_threshold", self.draft_confidence_threshold, 0.0, 1.0, "between 0 and 1", inclusive=True)
        _check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0.0, float("inf"), "larger than 0")
        _check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0.0, 1.0, "between 0 and 1", inclusive=True)
        _check_number("min_acceptance", self.min_acceptance, 0.0, 1.0, "between 0 and 1", inclusive=True)
        _check_number("draft_timeout_s", self.draft_timeout_s, 0.0, float("inf"), "larger than 0")
        self._check_batch_sizes()
        if self.suffix_decoding_max_cached_requests != 0:
            _check_count("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests)
        self._check_store(method)
        self._check_lookup_ids()
        if not (self.compile is None or isinstance(self.compile, bool) or self.compile == "auto"):
            raise ValueError(f"`compile` must be True, False or 'auto', got {self.compile!r}.")
        if self.use_heterogeneous_vocab not in (None, True, False):
            raise TypeError(f"`use_heterogeneous_vocab` must be a bool or None, got {type(self.use_heterogeneous_vocab).__name__}.")
        if self.use_heterogeneous_vocab and self.model is None:
            raise ValueError("`use_heterogeneous_vocab` goes with `model=` (in a chain, into the draft model's own entry of `drafters`).")
        if self.drafters is not None:
            self._check_chain()
        elif (method == "early_exit") != (self.assistant_early_exit is not None):
            raise ValueError("`method='early_exit'` and `assistant_early_exit=`, the number of layers, need each other.")
        elif method == "draft_model" and self.model is None:
            raise ValueError("`method='draft_model'` needs `model=`: the draft model, its folder or its hub id.")
        elif method not in ("auto", "draft_model") and self.model is not None:
            raise ValueError(f"`model` doesn't go with `method={method!r}`. Use `method='draft_model'`, or `'auto'` for both.")

    def _check_store(self, method: str) -> None:
        if self.store is None:
            return
        if not callable(getattr(self.store, "cursor", None)):
            raise TypeError(f"`store` must be a SuffixStore, got {type(self.store).__name__}.")
        if self.drafters is not None or method not in ("auto", "suffix"):
            raise ValueError("`store` goes with `method='suffix'` or `'auto'` (in a chain, into suffix's own entry of `drafters`).")
        if self.suffix_decoding_max_cached_requests:
            raise ValueError("`suffix_decoding_max_cached_requests` is for a store of the `Speculator`'s own. `store` has its own bounds.")

    def _check_lookup_ids(self) -> None:
        ids = self.lookup_ids
        if ids is None:
            return
        ids = ids.tolist() if callable(getattr(ids, "tolist", None)) else ids
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
            raise TypeError(f"`lookup_ids` must be ids, or a list of them for each row, got {type(ids).__name__}.")
        texts = ids if ids and not isinstance(ids[0], int) else [ids]
        if not all(isinstance(text, Sequence) and all(type(token) is int and token >= 0 for token in text) for text in texts):
            raise ValueError("`lookup_ids` must hold ids, integers of at least 0, or a list of them for each row.")

    def _check_batch_sizes(self) -> None:
        name, entries = "num_speculative_tokens_per_batch_size", self.num_speculative_tokens_per_batch_size
        if entries is None:
            return
        if isinstance(entries, (str, Mapping)) or not isinstance(entries, Sequence):
            raise TypeError(f"`{name}` must be a list of (start, end, most), got {type(entries).__name__}.")
        for entry in entries:
            if not isinstance(entry, Sequence) or len(entry) != 3 or not all(type(number) is int for number in entry):
                raise TypeError(f"`{name}` must hold (start, end, most) in integers, got {entry!r}.")
            start, end, most = entry
            if not (1 <= start <= end and most >= 0):
                raise ValueError(f"`{name}` must hold 1 <= start <= end and most >= 0, got {entry!r}.")
        object.__setattr__(self, name, tuple(tuple(entry) for entry in entries))

    def _check_chain(self) -> None:
        if isinstance(self.drafters, (str, Mapping)) or not isinstance(self.drafters, Sequence) or not self.drafters:
            raise TypeError("`drafters` must be a list of method names or dicts, the first asked first.")
        for name in ("model", "assistant_early_exit"):
            if getattr(self, name) is not None:
                raise ValueError(f"`{name}` goes into its own entry of `drafters`.")
        chain = [SpeculationConfig.of(entry) for entry in self.drafters]
        if self.depth == "confidence":  # the drafters' own business; the other strategies are the controller's
            chain = [dataclasses.replace(entry, depth="confidence") for entry in chain]
        if any(entry.drafters is not None for entry in chain):
            raise ValueError("`drafters` can't hold another chain.")
        if any(entry.lookup_ids is not None for entry in chain):
            raise ValueError("`lookup_ids` goes beside `drafters`: every drafter searches them.")
        if any(entry.compile is not None for entry in chain):
            raise ValueError("`compile` goes beside `drafters`: it is about the target too.")
        if any(entry.method == "auto" for entry in chain):
            raise ValueError("`drafters` names the drafters itself: 'auto' can't be one of them.")
        if sum(entry.method in COSTLY for entry in chain[:-1]) > 0:
            raise ValueError("`drafters` takes one draft model, in the last place: the others cost nothing, so they are asked first.")
        object.__setattr__(self, "drafters", tuple(chain))
        if self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", max(entry.max_draft_tokens for entry in chain))

    @property
    def ngram_sizes(self) -> tuple[int, int]:
        """The shortest and the longest n-gram that is looked up."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None:
            low = 2 if high is None else min(2, high)
        return low, max(5, low) if high is None else high

    @property
    def suffix_settings(self) -> tuple[int, float, float]:
        """The longest context, the longest draft by the length of its match, and the least probability of a drafted token."""
        factor, prob = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        if prob is None and self.depth == "confidence":
            prob = self.confidence_threshold
        return self.suffix_decoding_max_tree_depth, float("inf") if factor is None else factor, 0.002 if prob is None else prob

    @property
    def confidence_threshold(self) -> float | None:
        """The probability below which a drafted token ends the draft; `None`: none by itself."""
        if self.draft_confidence_threshold is None and self.depth == "confidence":
            return 0.4
        return self.draft_confidence_threshold

    @property
    def chain(self) -> tuple[SpeculationConfig, ...]:
        """The drafters one by one, in the order in which they are asked."""
        if self.drafters is not None:
            return tuple(self.drafters)
        if self.method != "auto":
            return (self,)
        free: dict[str, Any] = {"model": None, "use_heterogeneous_vocab": None}
        found = [dataclasses.replace(self, method="suffix", **free)]
        others: dict[str, Any] = {"store": None, "suffix_decoding_max_cached_requests": None}
        if self.prompt_lookup_min is not None or self.prompt_lookup_max is not None:
            found.append(dataclasses.replace(self, method="ngram", **free, **others))
        if self.model is not None:
            found.append(dataclasses.replace(self, method="draft_model", **others))
        return tuple(found)

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens drafted in a round."""
        return 15 if self.num_speculative_tokens is None else self.num_speculative_tokens

    def max_draft_tokens_of(self, rows: int) -> int:
        """The most tokens drafted a row in a round of so many rows."""
        caps = [most for start, _, most in sorted(self.num_speculative_tokens_per_batch_size or ()) if start <= rows]
        return min(self.max_draft_tokens, *caps[-1:]) if caps else self.max_draft_tokens

    @classmethod
    def of(cls, value: Any) -> SpeculationConfig:
        """From a method name, a dict or a config."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(method=value)
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise TypeError(f"expected a method name, a dict or a SpeculationConfig, got {type(value).__name__}.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculationConfig:
        """
        Reads a dict with vLLM's key names.

        Raises:
            ValueError: for an unknown key (with the nearest known name), or one that would make the output lossy.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        kept, ignored = {}, []
        for key, value in values.items():
            if key == "rejection_sample_method" and value == "synthetic":
                raise ValueError("`rejection_sample_method='synthetic'` would change what the target model says. Leave it out.")
            if key in fields:
                kept[key] = value
            elif key in WITHOUT_MEANING:
                ignored.append(key)
            elif key in LOSSY:
                raise ValueError(f"`{key}` would change what the target model says, and assistgen never does. Leave it out.")
            else:
                raise ValueError(f"`{key}` is not a key of `speculation`. {_nearest(key, (*fields, *WITHOUT_MEANING))}".strip())
        if ignored:
            logger.info("`speculation`: %s have no meaning inside `generate()` and are ignored.", ", ".join(sorted(ignored)))
        return cls(**kept)


def _check_count(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer, got {type(value).__name__} ({value!r}).")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}. Use `speculation=None` to switch speculation off.")


def _check_number(name: str, value: Any, low: float, high: float, allowed: str, inclusive: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__} ({value!r}).")
    if not (low <= value <= high if inclusive else low < value < high):
        raise ValueError(f"`{name}` must be {allowed}, got {value}.")


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"Did you mean `{close[0]}`? " if close else ""
