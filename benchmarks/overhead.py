"""Time a round spends outside the model's forward, against transformers' prompt lookup and plain loop: `python -m benchmarks.overhead`.

A tiny model with 40k positions that always says the same token: every draft of ten tokens is accepted whole, so that each round does the
same work at every length, and the most work there can be. Greedy, no user processors. Each figure is the median over rounds of the time
between two forwards, the sides alternating in one process.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import assistgen

from .common import finish, machine


LENGTHS = (512, 4096, 32768)


def build() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=40960, initializer_range=0.3, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    model.generation_config.eos_token_id = None
    return model


class Rounds:
    """Seconds between the end of one forward and the start of the next, seen from the model."""

    def __init__(self, model: Any):
        self.gaps: list[float] = []
        self._ended: float | None = None
        self._handles = (model.register_forward_pre_hook(self._before), model.register_forward_hook(self._after))

    def _before(self, *_: Any) -> None:
        if self._ended is not None:
            self.gaps.append(perf_counter() - self._ended)

    def _after(self, *_: Any) -> None:
        self._ended = perf_counter()

    def stop(self) -> list[float]:
        for handle in self._handles:
            handle.remove()
        return self.gaps[1:]  # the first gap holds the prefill's aftermath


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=330, help="new tokens a run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=7, help="runs of each side and length (default: %(default)s)")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    print(machine())
    model = build()
    sides = {
        "plain": lambda ids: model.generate(ids, max_new_tokens=arguments.tokens, do_sample=False),
        "prompt lookup": lambda ids: model.generate(ids, max_new_tokens=arguments.tokens, do_sample=False, prompt_lookup_num_tokens=10),
        "assistgen ngram": lambda ids: assistgen.generate(
            model, ids, max_new_tokens=arguments.tokens, do_sample=False,
            speculation={"method": "ngram", "num_speculative_tokens": 10, "depth": "constant"},
        ),
        "assistgen ngram, adaptive": lambda ids: assistgen.generate(
            model, ids, max_new_tokens=arguments.tokens, do_sample=False, speculation="ngram"
        ),
    }  # fmt: skip
    results: dict[str, dict[int, float]] = {name: {} for name in sides}
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(2, 4096, (1, length), generator=generator)
        gaps: dict[str, list[float]] = {name: [] for name in sides}
        for run in range(arguments.runs + 1):
            for name, side in sides.items():
                rounds = Rounds(model)
                side(ids)
                if run:  # the first is a warm-up
                    gaps[name] += rounds.stop()
                else:
                    rounds.stop()
        for name, values in gaps.items():
            results[name][length] = statistics.median(values) * 1e3
            print(f"{length:6d} tokens  {name:26s} {results[name][length]:.3f} ms a round outside the forward")
        stats = assistgen.generate(
            model, ids, max_new_tokens=arguments.tokens, do_sample=False, return_dict_in_generate=True,
            speculation={"method": "ngram", "num_speculative_tokens": 10, "depth": "constant"},
        ).speculation  # fmt: skip
        print(f"{length:6d} tokens  assistgen ngram had a draft in {stats.num_drafts} of {stats.target_forwards - 1} rounds")
    growth = {name: by_length[32768] / by_length[512] for name, by_length in results.items()}
    print("at 32k over at 512: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in growth.items()))
    finish({"milliseconds": results})


if __name__ == "__main__":
    main()
