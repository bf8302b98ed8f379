"""Faster `model.generate()` with the same output: a drafter guesses, the target verifies, only what the target would say is kept."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


__version__ = "0.1.0"

# Imported on first use, so that the drafters and the control, which know no transformers, can be used without it.
_HOMES = {
    "generate": "generation",
    "speculate": "generation",
    "enable": "generation",
    "disable": "generation",
    "stream": "generation",
    "Chunk": "streaming",
    "Speculator": "speculator",
    "SpeculationConfig": "config",
    "SpeculationStats": "stats",
    "SuffixStore": "suffix.store",
    "NGramCandidateGenerator": "drafters.candidates",
    "SuffixCandidateGenerator": "drafters.candidates",
    "DraftModelCandidateGenerator": "drafters.candidates",
    "UniversalCandidateGenerator": "drafters.candidates",
    "nf4_twin": "drafters.itself",
}

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604

if TYPE_CHECKING:
    from .config import SpeculationConfig
    from .drafters.candidates import (
        DraftModelCandidateGenerator,
        NGramCandidateGenerator,
        SuffixCandidateGenerator,
        UniversalCandidateGenerator,
    )
    from .drafters.itself import nf4_twin
    from .generation import disable, enable, generate, speculate, stream
    from .speculator import Speculator
    from .stats import SpeculationStats
    from .streaming import Chunk
    from .suffix.store import SuffixStore


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'assistgen' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
