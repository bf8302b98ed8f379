"""A draft model with a foreign tokenizer, against plain decoding and transformers' universal assistant: `python -m benchmarks.universal`.

Qwen2.5-Coder 1.5B with SmolLM2-135M, on prompts of Spec-Bench's 13 categories, as `benchmarks.drafters` does it.
"""

from __future__ import annotations

import argparse

import assistgen

from .common import spec_bench
from .drafters import compare, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="smollm2-135m")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--max-characters", type=int, default=3600, help="of a prompt; categories without a shorter one are left out")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--sides", nargs="*", default=["assistant", "text", "auto"], help="also vocabulary")
    arguments = parser.parse_args()
    target, tokenizer = load(arguments.target, arguments.dtype)
    draft, draft_tokenizer = load(arguments.draft, arguments.dtype)
    ways = {
        "assistant": {"assistant_model": draft, "tokenizer": tokenizer, "assistant_tokenizer": draft_tokenizer},
        "text": assistgen.Speculator({"method": "draft_model", "model": draft}),
        "vocabulary": assistgen.Speculator({"method": "draft_model", "model": draft, "use_heterogeneous_vocab": True}),
        "auto": assistgen.Speculator({"method": "auto", "model": draft}),
    }
    items = spec_bench(arguments.per_category, arguments.max_characters)
    compare(target, tokenizer, {side: ways[side] for side in arguments.sides}, items, arguments.tokens)


if __name__ == "__main__":
    main()
