"""The control of depth on real models: `python -m benchmarks.control`.

Three questions, each answered with both sides in one process, in rotating order: how much is lost where nothing can be guessed
(open-ended prompts at a high temperature, same seed on both sides), how close the controller comes to the best fixed depth where all can
be (copy-heavy prompts), and with `--draft` whether `auto` is as fast as the better of its drafters on Spec-Bench's tasks
(`benchmarks.drafters`, which measures it, tells more of them).
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import torch
import transformers

import assistgen
from assistgen import weights
from assistgen.quickstart import COPY

from .common import alternating, chat, finish, geometric_mean, interval, machine, show, spec_bench
from .drafters import compare


OPEN_ENDED = ["Write a story about a lighthouse.", "Tell me something surprising.", "Describe a city that never existed."]
DEPTHS = (2, 4, 8, 15)


def open_ended(model: Any, tokenizer: Any, auto: dict[str, Any], pairs: int, tokens: int) -> list[float]:
    speculator = assistgen.Speculator(auto)
    ratios: list[float] = []
    for number, text in enumerate(OPEN_ENDED):
        kwargs = {**chat(tokenizer, text), "max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "temperature": 1.5}

        def plain(kwargs: dict[str, Any] = kwargs, seed: int = number) -> Any:
            torch.manual_seed(seed)
            return model.generate(**kwargs)

        def fast(kwargs: dict[str, Any] = kwargs, seed: int = number) -> Any:
            torch.manual_seed(seed)
            return assistgen.generate(model, **kwargs, speculation=speculator)

        if number == 0:
            plain(), fast()
        ratios += alternating(plain, fast, -(-pairs // len(OPEN_ENDED)))
    return ratios


def copy_heavy(model: Any, tokenizer: Any, auto: dict[str, Any], rounds: int, tokens: int) -> dict[str, list[float]]:
    """Speed over plain decoding in each round."""
    kwargs = {**chat(tokenizer, COPY), "max_new_tokens": tokens, "do_sample": False}
    sides: dict[str, Any] = {"plain": None, "auto": assistgen.Speculator(auto)}
    for depth in DEPTHS:
        sides[f"fixed {depth}"] = assistgen.Speculator({"method": "suffix", "depth": "constant", "num_speculative_tokens": depth})
    ratios: dict[str, list[float]] = {side: [] for side in sides if side != "plain"}
    names = list(sides)
    for round_ in range(-1, rounds):
        seconds = {}
        for side in names[round_ % len(names) :] + names[: round_ % len(names)]:
            start = perf_counter()
            assistgen.generate(model, **kwargs, speculation=sides[side])
            seconds[side] = perf_counter() - start
        if round_ >= 0:
            for side in ratios:
                ratios[side].append(seconds["plain"] / seconds[side])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", help="qwen2.5-coder-0.5b with --model qwen2.5-coder-1.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--per-category", type=int, default=2)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    print(machine())
    dtype = getattr(torch, arguments.dtype)
    model, tokenizer = weights.load(arguments.model, dtype)
    draft = weights.load(arguments.draft, dtype)[0] if arguments.draft else None
    auto = {"method": "auto", "model": draft} if draft is not None else {"method": "auto"}
    if arguments.pairs:
        ratios = open_ended(model, tokenizer, auto, arguments.pairs, arguments.tokens)
        print(f"open-ended at temperature 1.5: auto over plain {show(ratios)}")
        results: dict[str, Any] = {"open_ended": {"mean": geometric_mean(ratios), "interval": interval(ratios)}}
        by_depth = copy_heavy(model, tokenizer, auto, arguments.pairs, arguments.tokens)
        for side, speeds in by_depth.items():
            print(f"copy-heavy: {side:10s} over plain {show(speeds)}")
        best = max((side for side in by_depth if side != "auto"), key=lambda side: geometric_mean(by_depth[side]))
        against = [auto / fixed for auto, fixed in zip(by_depth["auto"], by_depth[best], strict=True)]
        print(f"copy-heavy: auto over {best}, the best: {show(against)}")
        results["copy_heavy"] = {side: geometric_mean(speeds) for side, speeds in by_depth.items()}
        finish(results)
    if draft is not None:
        ways = {
            "suffix": assistgen.Speculator("suffix"),
            "draft_model": assistgen.Speculator({"method": "draft_model", "model": draft}),
            "auto": assistgen.Speculator(auto),
        }
        compare(model, tokenizer, ways, spec_bench(arguments.per_category), arguments.tokens)


if __name__ == "__main__":
    main()
