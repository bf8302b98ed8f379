"""Batches against plain batched `generate()`: tokens/s as a ratio, by rows, copy-heavy and open-ended: `python -m benchmarks.batch`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers

import assistgen
from assistgen import identity, weights

from .common import alternating, finish, interval, machine, show, timed


FILES = [
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return area(width, height) * depth\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.append(item)\n",
    'SETTINGS = {\n    "host": "localhost",\n    "port": 8080,\n    "debug": True,\n    "retries": 3,\n    "timeout": 30,\n}\n',
    "for name in sorted(names):\n    if name.startswith('_'):\n        continue\n    print(name, len(name))\n    total += len(name)\n",
]
OPEN = [
    "Write a story about a lighthouse.", "Why do cats purr?", "Describe a city on the moon.", "Give advice to a young engineer.",
]  # fmt: skip


def prompts(kind: str, rows: int) -> list[str]:
    """Prompts of one kind, all different."""
    if kind == "copy-heavy":
        files = [f"# file {row + 1}\n{FILES[row % 4]}" for row in range(rows)]
        return [f"```python\n{file}```\nReturn this file unchanged. Answer with the code block only." for file in files]
    return [OPEN[row % 4] + (f" Begin with the letter {chr(65 + row)}." if row >= 4 else "") for row in range(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--tokens", type=int, nargs=2, default=[32, 16], help="new tokens, copy-heavy and open-ended (default: %(default)s)"
    )
    parser.add_argument("--kinds", nargs="*", default=["copy-heavy", "open-ended"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    print(machine())
    model, tokenizer = weights.load(arguments.model, getattr(torch, arguments.dtype))
    tokenizer.padding_side = "left"
    results: dict[str, dict[int, Any]] = {}
    for kind, tokens in zip(("copy-heavy", "open-ended"), arguments.tokens, strict=True):
        if kind not in arguments.kinds:
            continue
        results[kind] = {}
        for rows in arguments.rows:
            messages = [[{"role": "user", "content": text}] for text in prompts(kind, rows)]
            inputs = dict(
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True)
            )
            kwargs = {**inputs, "max_new_tokens": tokens, "do_sample": False}
            speculator = assistgen.Speculator("ngram")

            def plain(kwargs: Any = kwargs) -> Any:
                return model.generate(**kwargs)

            def fast(kwargs: Any = kwargs, speculator: Any = speculator) -> Any:
                return assistgen.generate(model, **kwargs, speculation=speculator)

            reference, _ = timed(plain)
            output = assistgen.generate(model, **kwargs, speculation=speculator, return_dict_in_generate=True)
            stats = output.speculation
            per_forward = stats.num_tokens / stats.target_forwards / rows
            ratios = alternating(plain, fast, arguments.pairs)
            differences = [
                str(identity.compare(model, a[start:], b[start:]))
                for a, b, start in zip(reference, output.sequences, (inputs["attention_mask"] == 0).sum(-1).tolist(), strict=True)
            ]
            results[kind][rows] = {
                "ratio": show(ratios),
                "interval": interval(ratios),
                "tokens_per_forward_and_row": per_forward,
                "acceptance": stats.draft_acceptance_rate,
                "fallbacks": stats.fallbacks,
                "outputs": sorted(set(differences)),
            }
            print(
                f"{kind:10s} {rows:3d} rows  {show(ratios)} of plain's speed, {per_forward:.2f} tokens a forward and row, "
                f"{sum(d == 'identical' for d in differences)} of {rows} rows identical",
                flush=True,
            )
    finish({"ratios": results})


if __name__ == "__main__":
    main()
