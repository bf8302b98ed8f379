"""Time to first token and to the end, against plain `generate()`, in alternating pairs: `python -m benchmarks.first_token`."""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import torch
import transformers

import assistgen
from assistgen import weights

from .common import chat, finish, interval, machine, show


class Clock:
    """A streamer that notes when the first token comes."""

    def __init__(self) -> None:
        self.first = 0.0
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
        elif not self.first:
            self.first = perf_counter()

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=weights.DEFAULT)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--words", type=int, nargs="*", default=[20, 700], help="prompt lengths, in words (default: %(default)s)")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    print(machine())
    model, tokenizer = weights.load(arguments.model, getattr(torch, arguments.dtype))

    def first_token(inputs: dict[str, Any], speculation: Any) -> float:
        clock, start = Clock(), perf_counter()
        assistgen.generate(model, **inputs, speculation=speculation, max_new_tokens=3, do_sample=False, streamer=clock)
        return clock.first - start

    results = {}
    for words in arguments.words:
        inputs = chat(tokenizer, "Summarise this. " + " ".join(f"Word {n % 97} of the text is here." for n in range(words // 7)))
        first_token(inputs, "ngram"), first_token(inputs, None)
        ratios = []
        for pair in range(arguments.pairs):
            order = (None, "ngram") if pair % 2 else ("ngram", None)
            seconds = {speculation: first_token(inputs, speculation) for speculation in order}
            ratios.append(seconds["ngram"] / seconds[None])
        length = inputs["input_ids"].shape[1]
        print(f"{length} tokens of prompt: time to first token over plain {show(ratios)}")
        results[length] = {"ratio": show(ratios), "interval": interval(ratios)}
    finish({"first_token_over_plain": results})


if __name__ == "__main__":
    main()
