"""Drafters against plain decoding and transformers' `assistant_model=` and prompt lookup: `python -m benchmarks.drafters`.

Qwen2.5-Coder 1.5B with 0.5B, bfloat16, prompts of Spec-Bench's 13 categories. Every prompt runs each side once, in rotating order, in
one process; ratios are per token and per prompt, their geometric means come with bootstrap intervals over the prompts. In bfloat16 outputs
part at ties, and one may repeat itself more than the other: tokens per target forward are compared on the same text, too, for which prompt
lookup, a fixed rule, is replayed on ours where it said another.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from time import perf_counter
from typing import Any

import torch
import transformers

import assistgen
from assistgen import identity, weights

from .common import chat, code_edits, finish, geometric_mean, interval, machine, show, spec_bench
from .replay import prompt_lookup, replay


GROUPS = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's tasks; its other categories are MT-bench's, one more task."""


class Clock:
    """A streamer that notes when the first token comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


def nf4(name: str, dtype: torch.dtype) -> Any:
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(weights.locate(name), dtype=dtype, quantization_config=config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="spec-bench", choices=("spec-bench", "code-edits"))
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--max-characters", type=int, default=3600, help="of a prompt; categories without a shorter one are left out")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--sides", nargs="*", default=["assistant", "draft_model", "chain_nf4"],
                        help="also lookup, ngram, suffix, suffix_store (a store of the answers so far), suffix_whole, auto, auto_nf4, "
                             "chain")  # fmt: skip
    arguments = parser.parse_args()
    target, tokenizer = load("qwen2.5-coder-1.5b", arguments.dtype)
    draft, _ = load("qwen2.5-coder-0.5b", arguments.dtype)
    ways: dict[str, Any] = {
        "assistant": lambda: {"assistant_model": draft},
        "lookup": lambda: {"prompt_lookup_num_tokens": 10},
        "ngram": lambda: assistgen.Speculator("ngram"),
        "suffix": lambda: assistgen.Speculator("suffix"),
        "suffix_store": lambda: assistgen.Speculator({"method": "suffix", "suffix_decoding_max_cached_requests": 1000}),
        "suffix_whole": lambda: assistgen.Speculator({"method": "suffix", "depth": "constant", "num_speculative_tokens": 10}),
        "auto": lambda: assistgen.Speculator({"method": "auto", "model": draft}),
        "auto_nf4": lambda: assistgen.Speculator({"method": "auto", "model": nf4("qwen2.5-coder-0.5b", target.dtype)}),
        "draft_model": lambda: assistgen.Speculator({"method": "draft_model", "model": draft}),
        "chain": lambda: assistgen.Speculator({"drafters": ["ngram", {"method": "draft_model", "model": draft}]}),
        "chain_nf4": lambda: assistgen.Speculator(
            {"drafters": ["ngram", {"method": "draft_model", "model": nf4("qwen2.5-coder-0.5b", target.dtype)}]}
        ),
    }
    items = (
        code_edits(arguments.per_category)
        if arguments.prompts == "code-edits"
        else spec_bench(arguments.per_category, arguments.max_characters)
    )
    compare(target, tokenizer, {side: ways[side]() for side in arguments.sides}, items, arguments.tokens)


def looked_up(inputs: dict[str, Any], sequences: torch.Tensor) -> float:
    """Tokens per target forward that transformers' prompt lookup would take of a text."""
    prompt = inputs["input_ids"].shape[1]
    said, steps, _ = replay(prompt_lookup, [(sequences[:prompt].tolist(), sequences[prompt:].tolist())], depth=10)
    return (1 + said) / (1 + steps)


def load(name: str, dtype: str) -> tuple[Any, Any]:
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    return weights.load(name, getattr(torch, dtype))


def compare(target: Any, tokenizer: Any, ways: dict[str, Any], items: list[dict[str, Any]], tokens: int) -> None:
    """
    Runs plain decoding and each way on every prompt, in rotating order, and prints the ratios; of `auto` also those over the better of
    our other ways in each of Spec-Bench's tasks.

    Args:
        ways: for each side's name a `Speculator`, or transformers' own arguments as a dict.
        items: prompts with their category, as of `spec_bench`.
    """
    print(machine())

    def run(side: str, inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
        clock, forwards = Clock(), [0]
        handle = target.register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
        kwargs = {**inputs, "max_new_tokens": tokens, "do_sample": False, "streamer": clock}
        start = perf_counter()
        stats, way = None, ways.get(side, {})
        if isinstance(way, dict):
            sequences = target.generate(**kwargs, **way)
        else:
            output = assistgen.generate(target, **kwargs, speculation=way, return_dict_in_generate=True)
            sequences, stats = output.sequences, output.speculation
        seconds = perf_counter() - start
        handle.remove()
        new = sequences.shape[1] - inputs["input_ids"].shape[1]
        return {
            "seconds": seconds / new, "first": clock.times[1] - start,
            "later": (clock.times[-1] - clock.times[1]) / max(1, new - 1), "per_forward": new / forwards[0], "sequences": sequences[0],
            "draft_ms": stats.draft_s / max(1, stats.num_drafts) * 1e3 if stats else None,
            "chosen": {name: counts.num_drafts for name, counts in stats.drafters.items()} if stats else {},
        }  # fmt: skip

    theirs = [side for side, way in ways.items() if isinstance(way, dict)]
    sides = ["plain", *ways]
    warm = chat(tokenizer, "Count to ten, then count to ten again.")
    for side in sides:
        run(side, warm, tokens)
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    categories: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    by_group: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    same_text: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    draft_ms: dict[str, list[float]] = defaultdict(list)
    differences: dict[str, int] = defaultdict(int)
    for number, item in enumerate(items):
        inputs = chat(tokenizer, item["prompt"])
        order = [sides[(number + i) % len(sides)] for i in range(len(sides))]
        results = {side: run(side, inputs, tokens) for side in order}
        plain = results["plain"]
        for side in ways:
            result = results[side]
            ratios[side]["wall"].append(plain["seconds"] / result["seconds"])
            ratios[side]["first token"].append(result["first"] / plain["first"])
            if plain["later"] and result["later"]:
                ratios[side]["wall after the first token"].append(plain["later"] / result["later"])
            for other in theirs if side not in theirs else ():
                ratios[side][f"over transformers' {other}"].append(results[other]["seconds"] / result["seconds"])
                says_the_same = torch.equal(results[other]["sequences"], result["sequences"])
                if says_the_same or other == "lookup":
                    theirs_there = results[other]["per_forward"] if says_the_same else looked_up(inputs, result["sequences"])
                    same_text[f"{side} and {other}"][item["category"]].append((result["per_forward"], theirs_there))
            categories[side][item["category"]].append(result["per_forward"])
            group = item["category"] if item["category"] in GROUPS else "mt_bench"
            by_group[group][side].append(plain["seconds"] / result["seconds"])
            if result["draft_ms"] is not None:
                draft_ms[side].append(result["draft_ms"])
            comparison = identity.compare(target, plain["sequences"], result["sequences"])
            differences[f"{side}: {'identical' if comparison.identical else 'proven tie' if comparison.proven_tie else 'DIFFERENT'}"] += 1
        line = ", ".join(f"{side} {ratios[side]['wall'][-1]:.2f}x {results[side]['per_forward']:.2f} tok/fwd" for side in ways)
        print(
            f"{number:3d} {item['category']:15s} {line}" + (f"; auto drafted {results['auto']['chosen']}" if "auto" in ways else ""),
            flush=True,
        )
    print()
    for side in ways:
        for what, values in ratios[side].items():
            print(f"{side:12s} {what:30s} {show(values)}, worst {max(values) if what == 'first token' else min(values):.2f}")
        print(f"{side:12s} tokens per target forward: " + ", ".join(f"{c} {geometric_mean(v):.2f}" for c, v in categories[side].items()))
        if draft_ms[side]:
            print(f"{side:12s} drafting {geometric_mean([max(ms, 1e-3) for ms in draft_ms[side]]):.0f} ms a round with a draft")
    both = {
        pair: {c: [geometric_mean(v) for v in zip(*pairs, strict=True)] for c, pairs in by_category.items()}
        for pair, by_category in same_text.items()
    }
    for pair, means in both.items():
        number = sum(len(pairs) for pairs in same_text[pair].values())
        told = "; ".join(f"{c} {ours:.3f}, {others:.3f}" for c, (ours, others) in means.items())
        print(f"{pair}: tokens per target forward of both on the same text ({number} prompts): {told}")
    others = [side for side in ways if side not in theirs and not side.startswith("auto")]
    for group, speeds in by_group.items() if "auto" in ways and others else ():
        best = max(others, key=lambda side: geometric_mean(speeds[side]))
        against = [auto / other for auto, other in zip(speeds["auto"], speeds[best], strict=True)]
        print(f"auto         over {best}, the better, in {group}: {show(against)}")
    print(dict(differences))
    finish(
        {
            "ratios": {
                s: {w: {"mean": geometric_mean(v), "interval": interval(v), "worst": min(v)} for w, v in r.items()}
                for s, r in ratios.items()
            },
            "on_the_same_text": both,
            "tokens_per_forward": {s: {c: geometric_mean(v) for c, v in r.items()} for s, r in categories.items()},
            "outputs": dict(differences),
        }
    )


if __name__ == "__main__":
    main()
