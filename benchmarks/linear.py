"""What a forward over a few tokens costs on this CPU, by torch's products, by ours and from a draft's copy: `python -m benchmarks.linear`.

Milliseconds by width behind 200 tokens of context, all ways in turn, medians; and which widths go which way here. A draft model's steps go
by a copy with 8 bits a weight, where there is one; with how long it takes to make, compiling apart.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from assistgen import compat, fused, linear, weights

from .common import finish, machine, timed


WIDTHS = (1, 2, 4, 8, 12, 16, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    print(machine())
    model, _ = weights.load(arguments.model, getattr(torch, arguments.dtype))
    products = linear.quick_products(model, 1 << 20)
    ids = torch.randint(0, 5000, (1, 200), generator=torch.Generator().manual_seed(0))
    cache: Any = DynamicCache(config=model.config)
    model(ids, **{compat.CACHE: cache})
    copy = fused.eight_bits(model, 1 << 20)
    results: dict[Any, Any] = {}
    if copy is not None:
        cells = fused.Cells(copy, rows=1)
        results["copy"] = {"seconds": timed(lambda: fused.EightBits(model))[1], "likeness": copy.likeness, "in_tiles": copy.is_in_tiles}
        print(f"copy made in {results['copy']['seconds']:.1f} s, likeness {copy.likeness:.4f}{', in tiles' if copy.is_in_tiles else ''}")
    for width in WIDTHS:
        seconds: dict[str, list[float]] = {"torch": [], "ours": [], "copy": []}
        places = torch.stack([torch.zeros(width, dtype=torch.long), torch.arange(200, 200 + width)], dim=1)
        for _ in range(arguments.rounds):
            for side, mode in (("torch", nullcontext()), ("ours", products.over(width) if products is not None else nullcontext())):
                with mode:
                    seconds[side].append(timed(lambda width=width: model(ids[:, :width], logits_to_keep=width, **{compat.CACHE: cache}))[1])
                compat.crop(cache, width)
            if copy is not None and width <= fused.WIDEST:
                seconds["copy"].append(
                    timed(lambda width=width, places=places: copy.forward(ids[0, :width], places, places[:, 1] - 200, cells))[1]
                )
        taken = products is not None and products.pays(width)
        results[width] = {side: statistics.median(times) * 1e3 for side, times in seconds.items() if times} | {"taken": taken}
        torchs, ours = results[width]["torch"], results[width]["ours"]
        copys = f", copy {results[width]['copy']:6.1f} ms" if "copy" in results[width] else ""
        print(f"{width:3d} tokens: torch {torchs:7.1f} ms, ours {ours:7.1f} ms{'' if taken else ' (by torch)'}{copys}")
    finish({"milliseconds": results})


if __name__ == "__main__":
    main()
