"""What outlives a call: how to draft, what the controller has learned, and the totals."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

from .config import SpeculationConfig
from .control import DepthController
from .drafters.base import Drafter
from .drafters.ngram import NGramDrafter
from .stats import SpeculationStats


DEFAULT_METHOD = "ngram"


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
        stats (`SpeculationStats`): totals over all calls so far.

    Used as a context manager, it switches itself off on the models that it was enabled on:

    ```python
    with assistgen.enable(model, "ngram") as speculator:
        model.generate(**inputs)
    ```
    """

    def __init__(self, speculation: Any = DEFAULT_METHOD):
        self.config: SpeculationConfig | None = None
        self._generator: Any = None
        if isinstance(speculation, SpeculationConfig):
            self.config = speculation
        elif isinstance(speculation, str):
            self.config = SpeculationConfig(method=speculation)
        elif isinstance(speculation, Mapping):
            self.config = SpeculationConfig.from_dict(speculation)
        elif callable(getattr(speculation, "get_candidates", None)):
            self._generator = speculation
        else:
            raise TypeError(
                "`speculation` must be None, a method name, a dict, a SpeculationConfig, a Speculator or a CandidateGenerator, got "
                f"{type(speculation).__name__}."
            )
        self.controller = DepthController(self.config.depth if self.config else "constant")
        self.stats = SpeculationStats()
        self._lock = threading.Lock()
        self._enabled_on: list[weakref.ref[Any]] = []

    @classmethod
    def of(cls, speculation: Any) -> Speculator:
        """`speculation` itself if it is a `Speculator`, otherwise a new one made of it."""
        return speculation if isinstance(speculation, cls) else cls(speculation)

    @property
    def one_row_only(self) -> bool:
        return self._generator is not None

    @property
    def max_draft_tokens(self) -> int | None:
        """The most tokens drafted in a round; `None`: the drafter's own choice."""
        return self.config.max_draft_tokens if self.config is not None else None

    def drafter(self, device: Any) -> Drafter:
        """A drafter for one call."""
        if self._generator is not None:
            from .drafters.candidates import CandidateGeneratorDrafter

            return CandidateGeneratorDrafter(self._generator, device)
        assert self.config is not None
        return NGramDrafter(*self.config.ngram_sizes)

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
