"""What outlives a call: how to draft, what the controller has learned, and the totals."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from .config import COSTLY, SpeculationConfig
from .control import DepthController
from .drafters.base import Drafter
from .drafters.chain import ChainDrafter
from .drafters.ngram import NGramDrafter
from .drafters.suffix import SuffixDrafter
from .fallback import Breaker, GuardedDrafter
from .inputs import Inputs, placeholders
from .stats import SpeculationStats
from .translation import are_known, tokenizers_of, translation_of


DEFAULT_METHOD = "auto"


class Speculator:
    """
    A way to speculate, with its memory. `enable()` returns one and `speculation=` takes one; a method name or a dict makes a new one
    for each call. Safe to share between threads: calls keep their own drafts, and what they learn and count is added under a lock.

    Args:
        speculation (`str`, `dict`, `SpeculationConfig` or transformers `CandidateGenerator`): how to speculate. A generator has a
            state of its own, so a `Speculator` around one serves one call at a time.

    Attributes:
        config (`SpeculationConfig`, *optional*): `None` around a `CandidateGenerator`.
        controller (`DepthController`): what was learned about acceptance.
        breakers (`dict[str, Breaker]`): by drafter, whether it is kept away after a fault.
        stats (`SpeculationStats`): totals over all calls so far.

    Used as a context manager, it switches itself off on the models that it was enabled on:

    ```python
    with assistgen.enable(model, "auto") as speculator:
        model.generate(**inputs)
    ```
    """

    def __init__(self, speculation: Any = DEFAULT_METHOD):
        self.config: SpeculationConfig | None = None
        self._generator: Any = None
        if isinstance(speculation, (SpeculationConfig, str, Mapping)):
            self.config = SpeculationConfig.of(speculation)
        elif callable(getattr(speculation, "get_candidates", None)):
            self._generator = speculation
        else:
            raise TypeError(
                "`speculation` must be None, a method name, a dict, a SpeculationConfig, a Speculator or a CandidateGenerator, got "
                f"{type(speculation).__name__}."
            )
        self.controller = DepthController(self.config.depth if self.config else "constant")
        self.breakers: dict[str, Breaker] = {}
        self.stats = SpeculationStats()
        self._draft_memory: Any = None
        self._store: Any = None
        if self.runs_a_model:
            from .drafters.draft_model import DraftMemory

            self._draft_memory = DraftMemory()
        self._lock = threading.Lock()
        self._enabled_on: list[weakref.ref[Any]] = []

    @classmethod
    def of(cls, speculation: Any) -> Speculator:
        """`speculation` itself if it is a `Speculator`, otherwise a new one made of it."""
        return speculation if isinstance(speculation, cls) else cls(speculation)

    @property
    def uses_blocks(self) -> bool:
        """Whether probabilistic drafts are judged as blocks."""
        return self.config is not None and any(entry.rejection_sample_method == "block" for entry in self.config.chain)

    @property
    def draft_model(self) -> Any:
        """The draft model (or its name), if there is one."""
        return _draft_model_of(self.config) if self.config is not None else None

    @property
    def runs_a_model(self) -> bool:
        """Whether a drafter runs a model, the target's own layers included."""
        return self.config is not None and any(entry.method in COSTLY for entry in self.config.chain)

    @property
    def compiles(self) -> bool:
        """Whether forwards are to be of fixed shapes, captured where that can be."""
        return self.config is not None and self.config.compile is True

    @property
    def lookup_ids(self) -> Any:
        """The user's texts to look things up in, if there are any."""
        return self.config.lookup_ids if self.config is not None else None

    @property
    def one_row_only(self) -> bool:
        return self._generator is not None

    def max_draft_tokens(self, rows: int) -> int | None:
        """The most tokens drafted a row in a round of so many rows; `None`: the drafter's own choice."""
        return self.config.max_draft_tokens_of(rows) if self.config is not None else None

    def check_vocabularies(self, target: Any, tokenizer: Any, assistant_tokenizer: Any) -> None:
        """
        Raises:
            ValueError: if the draft model's tokenizer is a foreign one and that is forbidden, can't be translated, or isn't known.
        """
        assert self.config is not None
        entry = next(entry for entry in self.config.chain if entry.model is not None)
        call = (target, _model_of(entry, target), tokenizer, assistant_tokenizer)
        wanted = entry.use_heterogeneous_vocab
        if not are_known(*call):
            if assistant_tokenizer is not None:
                raise ValueError("`assistant_tokenizer` needs the target's tokenizer too: pass `tokenizer=`.")
            if wanted:
                raise ValueError("`use_heterogeneous_vocab=True` needs both tokenizers: pass `tokenizer=` and `assistant_tokenizer=`.")
        tokenizers = tokenizers_of(*call)
        # Loading takes seconds, so that what isn't at hand is compared when drafting begins, unless the answer decides.
        if tokenizers is not None and (wanted is False or (tokenizer is not None and assistant_tokenizer is not None)):
            translation = translation_of(*(load() for load in tokenizers))
            if wanted is False and translation is not None:
                raise ValueError(
                    "`use_heterogeneous_vocab=False` and the draft model's tokenizer differs from the target's. Leave it out, or use a "
                    "draft model with the target's tokenizer."
                )

    def drafter(self, target: Any, generation_config: Any, inputs: Inputs, stats: SpeculationStats) -> Drafter:
        """
        A drafter for one call.

        Args:
            target (`PreTrainedModel`): the model to draft for.
            generation_config (`GenerationConfig`): of the call.
            inputs (`Inputs`): of the call.
            stats (`SpeculationStats`): of the call.
        """
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        timeout_s, min_acceptance = (self.config.draft_timeout_s, self.config.min_acceptance) if self.config is not None else (None, None)

        def guarded(drafter: Drafter) -> Drafter:
            with self._lock:
                breaker = self.breakers.setdefault(drafter.name, Breaker())
            return GuardedDrafter(drafter, breaker, vocab_size, stats, timeout_s, min_acceptance)

        if self.config is None:
            from .drafters.candidates import CandidateGeneratorDrafter

            return guarded(CandidateGeneratorDrafter(self._generator, inputs.prompt.device))
        entries = self.config.chain
        drafters = [self._make(entry, target, vocab_size, generation_config, inputs, stats) for entry in entries]
        guards = [guarded(drafter) for drafter in drafters]
        return guards[0] if len(guards) == 1 else ChainDrafter(guards, [entry.max_draft_tokens for entry in entries])

    def _make(
        self, config: SpeculationConfig, target: Any, vocab_size: int, generation_config: Any, inputs: Inputs, stats: SpeculationStats
    ) -> Drafter:
        if config.method == "ngram":
            shortest, longest = config.ngram_sizes
            if inputs.source is not None and config.prompt_lookup_min is None:
                shortest = 1  # a text is taken up anywhere, after a word that need not be its first
            return NGramDrafter(shortest, longest, inputs.looked_up())
        if config.method == "suffix":
            from .suffix.store import Vocabulary

            return SuffixDrafter(
                *config.suffix_settings,
                config.store if config.store is not None else self._own_store(config),
                Vocabulary.of(inputs.tokenizer) if inputs.tokenizer is not None else Vocabulary(vocab_size, None),
                inputs.looked_up(),
            )
        from .drafters.draft_model import DraftModelDrafter, check_can_draft, draft_warpers
        from .drafters.itself import first_layers
        from .drafters.universal import UniversalDrafter

        num_own_layers = config.assistant_early_exit or 0
        model = first_layers(target, num_own_layers) if num_own_layers else _model_of(config, target)
        check_can_draft(model, target)
        draws = generation_config.do_sample and config.draft_sample_method == "probabilistic"

        def make_drafter(**foreign: Any) -> DraftModelDrafter:
            return DraftModelDrafter(
                model,
                foreign.pop("vocab_size", vocab_size),
                inputs.prompt.device,
                draft_warpers(generation_config, config.draft_temperature) if draws else None,
                config.confidence_threshold,
                self._draft_memory,
                num_own_layers=num_own_layers,
                name=config.method,
                inputs=inputs,
                # The first layers are made anew for each call, and a text of other tokens has another length.
                max_new_tokens=generation_config.max_length - inputs.prompt.shape[1]
                if self.compiles and not (num_own_layers or foreign)
                else None,
                stats=stats,
                **foreign,
            )

        tokenizers = tokenizers_of(target, model, inputs.tokenizer, inputs.assistant_tokenizer) if not num_own_layers else None
        if tokenizers is None:
            return make_drafter()
        return UniversalDrafter(make_drafter, model, tokenizers, stats, draws, config.use_heterogeneous_vocab, placeholders(target.config))

    def _own_store(self, config: SpeculationConfig) -> Any:
        from .suffix.store import SuffixStore

        with self._lock:
            if self._store is None and config.suffix_decoding_max_cached_requests:
                self._store = SuffixStore(
                    max_requests=config.suffix_decoding_max_cached_requests, max_depth=config.suffix_decoding_max_tree_depth
                )
            return self._store

    def add(self, stats: SpeculationStats) -> None:
        """Adds a finished call to the totals."""
        with self._lock:
            self.stats.add(stats)

    def enabled_on(self, model: Any) -> None:
        self._enabled_on.append(weakref.ref(model))

    def __enter__(self) -> Speculator:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        from .generation import disable

        for reference in self._enabled_on:
            model = reference()
            if model is not None:
                disable(model)
        self._enabled_on.clear()


def _draft_model_of(config: SpeculationConfig) -> Any:
    return next((entry.model for entry in config.chain if entry.model is not None), None)


def _model_of(config: SpeculationConfig, target: Any) -> Any:
    """The draft model of one entry: loaded like the target if it is given by name, without its adapters if it is the target."""
    from .drafters.itself import without_adapters

    model = config.model
    if isinstance(model, str):
        return _loaded(model, str(target.dtype).removeprefix("torch."), str(target.device))
    model = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    return without_adapters(model) if model is target else model


@lru_cache(maxsize=4)
def _loaded(name: str, dtype: str, device: str) -> Any:
    """A draft model given by name, loaded once in a process."""
    import torch

    from . import weights

    model, _ = weights.load(name, getattr(torch, dtype))
    return model.to(device)
