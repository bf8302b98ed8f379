"""What the suffix index costs: `python -m benchmarks.suffix`.

Microseconds per token to take in a text, per appended token (one at a time, as plain decoding does), per proposal of up to 16 tokens, and
for all that a tree of them takes, at 1k, 32k and 1M tokens of context, and with a store of 10M tokens; bytes per token. The text is Python
source code (the installed packages'), by Qwen's tokenizer. Where `arctic_inference` can be imported, the same streams go through its cache
in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from assistgen import SuffixStore, weights
from assistgen.suffix.index import Cursor, SuffixIndex

from .common import finish, machine


def source_code(tokenizer: Any, tokens: int) -> Any:
    """`(tokens,)` ids of the installed packages' modules."""
    ids: list[Any] = []
    have = 0
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text(errors="ignore")
        if len(text) < 1_000_000:
            ids.append(np.array(tokenizer(text)["input_ids"], np.int32))
            have += len(ids[-1])
        if have >= tokens:
            break
    return np.concatenate(ids)[:tokens]


def microseconds(function: Callable[[], Any]) -> float:
    start = perf_counter()
    function()
    return (perf_counter() - start) * 1e6


def ours(text: Any, steps: Any, store: SuffixStore | None) -> dict[str, float]:
    index = SuffixIndex(capacity=len(text) + 256)
    taken = microseconds(lambda: index.extend(text)) / len(text)
    cursor, beside = Cursor([index], is_own=True), store.cursor() if store is not None else None
    appends, proposals, trees, beside_store, lengths = [], [], [], [], []
    for token in steps.tolist():
        appends.append(microseconds(lambda token=token: index.extend([token])))
        start = perf_counter()
        proposal = cursor.propose(16)
        proposals.append((perf_counter() - start) * 1e6)
        lengths.append(len(proposal.tokens))
        if beside is None:
            trees.append(proposals[-1] + microseconds(lambda proposal=proposal: cursor.branch(proposal, 16)))
        else:
            beside.advance([token])
            beside_store.append(microseconds(lambda: beside.propose(16)))
            branches = microseconds(lambda proposal=proposal: beside.branch(cursor, proposal, 16))
            trees.append(proposals[-1] + beside_store[-1] + branches)
    result = {
        "take in": taken, "append": statistics.fmean(appends), "propose": statistics.fmean(proposals),
        "propose a tree": statistics.fmean(trees), "tokens": statistics.fmean(lengths), "bytes": index.nbytes / len(index),
    }  # fmt: skip
    if beside_store:
        result["propose from store"] = statistics.fmean(beside_store)
    return result


def arctic(text: Any, steps: Any, depth: int) -> dict[str, float] | None:
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError:
        return None
    cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=0)
    taken = microseconds(lambda: cache.start_request(0, text)) / len(text)
    context = text.tolist()
    appends, proposals, lengths = [], [], []
    for token in steps.tolist():
        appends.append(microseconds(lambda token=token: cache.add_active_response(0, [token])))
        context.append(token)
        pattern = np.array(context[-depth:], np.int32)
        start = perf_counter()
        draft = cache.speculate(0, pattern, max_spec_tokens=16)
        proposals.append((perf_counter() - start) * 1e6)
        lengths.append(len(draft.token_ids))
    return {
        "take in": taken, "append": statistics.fmean(appends), "propose": statistics.fmean(proposals), "tokens": statistics.fmean(lengths),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store-tokens", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=3_000)
    arguments = parser.parse_args()
    print(machine())
    tokenizer = AutoTokenizer.from_pretrained(weights.locate("qwen2.5-coder-1.5b"))
    tokenizer.model_max_length = 1 << 40
    text = source_code(tokenizer, 1_100_000 + arguments.store_tokens)
    own, stored = text[:1_100_000], text[1_100_000:]
    SuffixIndex(capacity=8).extend(list(range(50)))  # compiled now
    compiled = Cursor([SuffixIndex()], is_own=True)
    compiled.branch(compiled.propose(4), 4)
    other = Cursor([SuffixIndex()], is_own=False)
    other.advance([1])
    other.propose(4)
    results: dict[str, Any] = {}

    def show(name: str, figures: dict[str, float] | None) -> None:
        if figures is not None:
            results[name] = figures
            print(f"{name:28s} " + ", ".join(f"{what} {value:.2f}" for what, value in figures.items()), flush=True)

    for size in (1_000, 32_000, 1_000_000):
        steps = own[size : size + arguments.steps]
        show(f"{size:,} tokens", ours(own[:size], steps, None))
        for depth in (24, 64):
            show(f"{size:,} tokens, arctic {depth}", arctic(own[:size], steps, depth))
    store = SuffixStore(max_tokens=arguments.store_tokens)
    pieces = [stored[start : start + 2_000] for start in range(0, len(stored), 2_000)]
    seconds = microseconds(lambda: [store.add(piece) for piece in pieces]) / len(stored)
    show(f"a store of {store.num_tokens:,}", {"take in": seconds, "bytes": store.nbytes / store.num_tokens})
    show("32,000 tokens and the store", ours(own[:32_000], own[32_000 : 32_000 + arguments.steps], store))
    finish({"microseconds": results})


if __name__ == "__main__":
    main()
