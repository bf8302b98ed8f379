"""Fixed shapes and captured graphs against eager decoding, plain and speculative: `python -m benchmarks.gpu`.

Needs no network and no weights. The target is a wide twin: a small random model embedded in a larger one with zeros, whose further layers
add nothing, so that it says what the small one says (but for rounding) at the cost of its own size. What it says is mostly a matter of
the last token, so that no rounding changes it. The small one is the draft model, and always right. Prompts hold their own continuation,
for prompt lookup. `oracle` sides draft the target's known continuation, each token wrong with a given chance. All of this says what a
round costs, not what is accepted on real text.

On a CPU nothing is captured; `--sizes toy` shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers.generation.candidate_generator import CandidateGenerator

import assistgen
from assistgen import Speculator, captured, identity
from assistgen.drafters.base import Draft, Drafter

from .common import finish, machine, show, timed


SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES = {
    "toy": dict(zip(SHAPE, (256, 512, 4, 8, 4, 32), strict=True)),
    "1b": dict(zip(SHAPE, (2048, 8192, 16, 32, 8, 64), strict=True)),
    "8b": dict(zip(SHAPE, (4096, 14336, 32, 32, 8, 128), strict=True)),
}
NARROW, BASE_LAYERS, VOCAB = 4, 2, 32768
"""The base model is so many times narrower (a square number, so that norms scale exactly)."""
PEAK = {"H200": 4.8e12, "H100": 3.35e12, "A100-SXM4-80GB": 2.04e12, "A100": 1.56e12, "L40": 0.86e12, "4090": 1.01e12}
"""Bytes a second by the data sheet."""


def twin_pair(size: str, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[Any, Any]:
    """The wide twin and its base, seeded and random."""
    shape = {"vocab_size": VOCAB, "max_position_embeddings": 4096, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None,
             "pad_token_id": 0, "rms_norm_eps": 1e-6}  # fmt: skip
    wide = SIZES[size]
    narrow = {name: value // NARROW if name not in ("num_hidden_layers", "head_dim") else value for name, value in wide.items()}
    width = wide["hidden_size"] // NARROW
    narrow |= {"num_hidden_layers": BASE_LAYERS, "initializer_range": width**-0.5}
    torch.manual_seed(seed)
    with torch.device(device):
        base = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape | narrow), dtype=dtype).eval()
        base.model.embed_tokens.weight.normal_(0.0, 2.0)
        base.lm_head.weight[successors(seed).to(device)] = base.model.embed_tokens.weight / width**0.5
        shape["rms_norm_eps"] /= NARROW
        twin = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape | wide), dtype=dtype).eval()
    inner = dict(base.named_parameters())
    for name, weight in twin.named_parameters():
        if name not in inner:  # a further layer: whatever it makes, it adds nothing
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            continue
        weight.zero_()
        small = inner[name] / NARROW**0.5 if "norm" in name else inner[name]
        weight[tuple(slice(0, length) for length in small.shape)] = small
    for model in (base, twin):
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return twin, base


def successors(seed: int = 0) -> torch.Tensor:
    """For each token the one that the twin says next."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))


class Oracle(CandidateGenerator):
    """The known continuation of one row, for transformers' own loop."""

    requires_model_outputs = False

    def __init__(self, drafts: Callable[[int, int, int], list[int]], prompt_length: int):
        self._drafts, self._prompt_length = drafts, prompt_length

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        draft = self._drafts(0, input_ids.shape[1] - self._prompt_length, 1 << 30)
        return torch.cat([input_ids, input_ids.new_tensor([draft])], dim=1) if draft else input_ids, None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: Any, num_matches: int) -> None:
        pass


class OracleDrafter(Drafter):
    """The same for ours."""

    name = "oracle"
    constant_depth = True

    def __init__(self, drafts: Callable[[int, int, int], list[int]]):
        self._drafts = drafts

    def begin(self, rows: Sequence[list[int]]) -> None:
        self._said = [1] * len(rows)

    def propose(self, rows: Sequence[int], max_tokens: Sequence[int], plan: Any) -> list[Draft]:
        return [Draft(self._drafts(row, self._said[row], room), self.name) for row, room in zip(rows, max_tokens, strict=True)]

    def commit(self, row: int, tokens: list[int]) -> None:
        self._said[row] += len(tokens)


class OracleSpeculator(Speculator):
    def __init__(self, drafts: Callable[[int, int, int], list[int]], compile: bool):
        super().__init__({"method": "ngram", "compile": compile})
        self._drafts = drafts

    def drafter(self, *call: Any) -> Drafter:
        return OracleDrafter(self._drafts)


def drafts_of(truth: list[list[int]], depth: int, acceptance: float) -> Callable[[int, int, int], list[int]]:
    """What follows `said` tokens of a row, each token wrong with chance 1 - `acceptance`; the same ones whoever asks."""
    wrong = random.Random(0)
    said = [[token if wrong.random() < acceptance else (token + 1) % VOCAB for token in row] for row in truth]
    return lambda row, start, room: said[row][start : start + min(depth, room)]


def bandwidth(device: str) -> float:
    """Bytes a second that a copy reads and writes here."""
    source = torch.empty(1 << (30 if device == "cuda" else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(timed(lambda: target.copy_(source))[1] for _ in range(5))


def kernel_seconds(run: Callable[[], Any]) -> float:
    """Seconds that a GPU's kernels and copies take in `run`."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        timed(run)
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6


def count_forwards(model: Any, run: Callable[[], Any]) -> int:
    counted: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: counted.append(None))
    run()
    handle.remove()
    return len(counted)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["1b", "8b"] if cuda else ["toy"], choices=list(SIZES))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=7, help="drafted tokens a round, of all drafters")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of each of an oracle's tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=440.0, help="nothing is begun after so many seconds")
    parser.add_argument(
        "--inductor", action="store_true", help="forwards go through torch.compile before they are captured (takes minutes)"
    )
    arguments = parser.parse_args()
    begin = perf_counter()
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    device = "cuda" if cuda else "cpu"
    dtype = torch.bfloat16 if cuda else torch.float32
    if arguments.inductor:
        torch._dynamo.config.recompile_limit = 64
        captured.CAPTURES["cuda"] = lambda step, memory: captured.cuda_graph(
            torch.compile(lambda: step(), dynamic=False, fullgraph=True), memory
        )
    peak = next((rate for name, rate in PEAK.items() if cuda and name in torch.cuda.get_device_name()), None)
    copied = bandwidth(device)
    print(machine())
    print(f"memory bandwidth: a copy {copied / 1e9:.0f} GB/s" + (f", data sheet {peak / 1e9:.0f} GB/s" if peak else ""))
    results: dict[str, Any] = {"copy_bytes_per_s": copied, "peak_bytes_per_s": peak, "dtype": str(dtype)}
    for size in arguments.sizes:
        target, base = twin_pair(size, device, dtype)
        weights = sum(p.numel() * p.itemsize for name, p in target.named_parameters() if "embed_tokens" not in name)
        print(f"\n{size}: wide twin of {sum(p.numel() for p in target.parameters()) / 1e9:.2f}B parameters, {weights / 1e9:.2f} GB a step")
        for rows in arguments.rows:
            if perf_counter() - begin > arguments.limit_s:
                print(f"{rows} rows left out: out of time")
                continue
            results[f"{size}, {rows} rows"] = measure(target, base, rows, weights, peak or copied, arguments, begin)
            print(json.dumps({f"{size}, {rows} rows": results[f"{size}, {rows} rows"]}), file=sys.stderr, flush=True)
        del target, base
        if cuda:
            torch.cuda.empty_cache()
    print(f"\n{perf_counter() - begin:.0f} s in all")
    finish(results)


def measure(target: Any, base: Any, rows: int, weights: int, peak: float, arguments: Any, begin: float) -> dict[str, Any]:
    """All sides on one batch, in rotating order."""
    ids = torch.randint(2, VOCAB, (rows, arguments.prompt), generator=torch.Generator().manual_seed(rows))
    follows = successors()
    for position in range(1, arguments.prompt - 1):  # what follows the last token, and the first one is the same
        ids[:, position] = follows[ids[:, position - 1]]
    ids[:, -1] = ids[:, 0]
    ids = ids.to(target.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    truth = target.generate(**inputs, max_new_tokens=arguments.tokens)[:, arguments.prompt :].tolist()
    drafts = drafts_of(truth, arguments.depth, arguments.acceptance)
    base.generation_config.num_assistant_tokens, base.generation_config.num_assistant_tokens_schedule = arguments.depth, "constant"
    base.generation_config.assistant_confidence_threshold = 0.0
    model_draft = {"method": "draft_model", "model": base, "depth": "constant", "num_speculative_tokens": arguments.depth}

    def theirs(**kwargs: Any) -> Callable[[int], Any]:
        return lambda tokens: (target.generate(**inputs, max_new_tokens=tokens, **kwargs), None)

    def theirs_oracle(tokens: int) -> Any:
        target._get_candidate_generator = lambda *args, **kwargs: Oracle(drafts, arguments.prompt)
        try:
            return theirs(prompt_lookup_num_tokens=arguments.depth)(tokens)
        finally:
            del target._get_candidate_generator

    def ours(speculation: Any) -> Callable[[int], Any]:
        def run(tokens: int) -> Any:
            output = assistgen.generate(
                target, **inputs, max_new_tokens=tokens, speculation=speculation, return_dict_in_generate=True, use_cache=True
            )
            return output.sequences, output.speculation

        return run

    never = {"method": "ngram", "num_speculative_tokens_per_batch_size": [(1, 1 << 20, 0)]}
    lookup = {"method": "ngram", "depth": "constant", "num_speculative_tokens": arguments.depth}
    sides: dict[str, Callable[[int], Any]] = {
        "plain": theirs(),
        "plain, ours eager": ours(Speculator(never)),
        "plain, ours captured": ours(Speculator(never | {"compile": True})),
        "lookup, ours captured": ours(Speculator(lookup | {"compile": True})),
        "draft model, ours eager": ours(Speculator(model_draft)),
        "draft model, ours captured": ours(Speculator(model_draft | {"compile": True})),
        "oracle, ours eager": ours(OracleSpeculator(drafts, compile=False)),
        "oracle, ours captured": ours(OracleSpeculator(drafts, compile=True)),
    }
    if rows == 1:
        sides |= {
            "lookup, theirs": theirs(prompt_lookup_num_tokens=arguments.depth),
            "draft model, theirs": theirs(assistant_model=base),
            "oracle, theirs": theirs_oracle,
        }
    found: dict[str, dict[str, Any]] = {}
    for side, run in sides.items():  # warm, and what doesn't depend on the clock
        if perf_counter() - begin > arguments.limit_s:
            print(f"  {side} left out: out of time")
            continue
        try:
            (_, stats), capture_s = timed(partial(run, arguments.tokens))
            captures = stats.num_captures if stats is not None else 0
            sequences, stats = run(arguments.tokens)
            forwards = stats.target_forwards if stats is not None else count_forwards(target, partial(run, arguments.tokens))
            same = [
                identity.compare(target, torch.cat([ids[row], torch.tensor(truth[row], device=ids.device)]), sequences[row])
                for row in range(rows)
            ]
            found[side] = {
                "first call, s": capture_s,
                "captured": captures,
                "rounds": max(1, forwards - 1),
                "same": sum(c.identical for c in same), "tie": sum(not c.identical and c.proven_tie for c in same),
                "fallbacks": dict(stats.fallbacks) if stats is not None else {},
                "seconds": [], "first": [],
            }  # fmt: skip
        except Exception as error:  # one side's failure is a figure too
            print(f"  {side} failed: {type(error).__name__}: {error}")
    order = list(found)
    for repeat in range(arguments.repeats):
        if repeat and perf_counter() - begin > arguments.limit_s:
            break
        for i in range(len(order)):
            side = order[(i + repeat) % len(order)]
            found[side]["first"].append(timed(partial(sides[side], 1))[1])
            found[side]["seconds"].append(timed(partial(sides[side], arguments.tokens))[1])
    print(f"  rows={rows}")
    if "plain" not in found:
        return found
    plain = found["plain"]
    for side, figures in found.items():
        seconds, first = statistics.median(figures["seconds"]), statistics.median(figures["first"])
        per_round = (seconds - first) / figures["rounds"]
        figures["tokens/s"] = rows * arguments.tokens / seconds
        figures["tokens/round"] = (arguments.tokens - 1) / figures["rounds"]
        figures["ms/round"], figures["first token, ms"] = per_round * 1e3, first * 1e3
        figures["over plain"] = [a / b for a, b in zip(plain["seconds"], figures["seconds"], strict=True)]
        if target.device.type == "cuda" and perf_counter() - begin < arguments.limit_s:  # last: profiling slows down what follows it
            some = min(arguments.tokens, 17)
            rounds = figures["rounds"] * (some - 1) / (arguments.tokens - 1)
            in_kernels = (kernel_seconds(partial(sides[side], some)) - kernel_seconds(partial(sides[side], 1))) / rounds
            figures["us/round outside kernels"] = (per_round - in_kernels) * 1e6
        if side.startswith("plain"):
            figures["share of bandwidth"] = weights / per_round / peak
        outside = f", {figures['us/round outside kernels']:6.0f} us outside kernels" if "us/round outside kernels" in figures else ""
        share = f", {figures['share of bandwidth']:.0%} of bandwidth" if "share of bandwidth" in figures else ""
        print(
            f"    {side:27s} {figures['tokens/s']:8.1f} tokens/s, {show(figures['over plain'])}, {figures['tokens/round']:.2f} tokens a "
            f"round of {figures['ms/round']:.2f} ms{outside}{share}, first token {figures['first token, ms']:.1f} ms, first call "
            f"{figures['first call, s']:.1f} s, {figures['same']} same, {figures['tie']} ties of {rows}"
            + (f", {figures['fallbacks']}" if figures["fallbacks"] else "")
        )
    for kind in ("draft model", "oracle", "lookup"):
        if f"{kind}, theirs" in found and f"{kind}, ours captured" in found:
            pairs = zip(found[f"{kind}, theirs"]["seconds"], found[f"{kind}, ours captured"]["seconds"], strict=True)
            print(f"    {kind}: ours captured over transformers' {show([a / b for a, b in pairs])}")
    return found


if __name__ == "__main__":
    main()
