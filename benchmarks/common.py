"""What the benchmarks share: ratios with intervals, the machine, prompts, and the line of JSON at the end."""

from __future__ import annotations

import ast
import json
import math
import os
import platform
import random
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers
from scipy.stats import bootstrap

import assistgen


SPEC_BENCH = Path(os.environ.get("SPEC_BENCH", Path(__file__).parents[2] / "shared" / "data" / "spec_bench_half.jsonl"))


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "assistgen": assistgen.__version__,
    }


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def interval(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the geometric mean (BCa; percentile where BCa is undefined, as for equal values)."""
    if len(ratios) < 3 or max(ratios) == min(ratios):
        return min(ratios), max(ratios)
    logs = np.log(np.asarray(ratios))
    result = bootstrap((logs,), np.mean, confidence_level=confidence, random_state=0, n_resamples=4000)
    low, high = result.confidence_interval
    return math.exp(low), math.exp(high)


def show(ratios: Sequence[float]) -> str:
    low, high = interval(ratios)
    return f"{geometric_mean(ratios):.3f} [{low:.3f}, {high:.3f}] (n={len(ratios)})"


def timed(function: Any) -> tuple[Any, float]:
    start = perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, perf_counter() - start


def alternating(plain: Any, other: Any, pairs: int) -> list[float]:
    """Seconds of `plain` over seconds of `other`, pair by pair, the order within a pair alternating."""
    ratios = []
    for pair in range(pairs):
        if pair % 2:
            other_s, plain_s = timed(other)[1], timed(plain)[1]
        else:
            plain_s, other_s = timed(plain)[1], timed(other)[1]
        ratios.append(plain_s / other_s)
    return ratios


def spec_bench(per_category: int, max_characters: int = 3600) -> list[dict[str, Any]]:
    """`per_category` prompts of each of Spec-Bench's categories (hemingkx/Spec-Bench), first turns only."""
    seen: dict[str, int] = {}
    chosen = []
    for line in SPEC_BENCH.read_text().splitlines():
        item = json.loads(line)
        category = item["category"]
        if len(item["turns"][0]) < max_characters and seen.get(category, 0) < per_category:
            seen[category] = seen.get(category, 0) + 1
            chosen.append({"category": category, "prompt": item["turns"][0], "id": item["question_id"]})
    return chosen


EDITS = (
    "Rename the parameter `{name}` to `{name}_` everywhere in this function.",
    "Add a one-line docstring to this function.",
    "Add type annotations to the parameters of this function.",
    "Add the parameter `verbose=False` at the end of this function's parameters, and nothing else.",
)


def code_edits(number: int, max_characters: int = 1200) -> list[dict[str, Any]]:
    """Requests to change a function of Python's library and give all of it back; the same ones on every machine with this Python."""
    functions = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(errors="ignore")
        for node in ast.parse(text).body:
            source = ast.get_source_segment(text, node) if isinstance(node, ast.FunctionDef) and node.args.args else None
            if source is not None and max_characters // 2 < len(source) < max_characters and ast.get_docstring(node) is None:
                functions.append((node.args.args[0].arg, source))
    items = []
    for i, (name, source) in enumerate(random.Random(0).sample(functions, number)):
        wish = EDITS[i % len(EDITS)].format(name=name)
        prompt = f"{wish} Give back the whole function and nothing else.\n\n```python\n{source}\n```"
        items.append({"category": "code edits", "prompt": prompt, "id": i})
    return items


def chat(tokenizer: Any, text: str) -> dict[str, Any]:
    return dict(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    )


def finish(results: dict[str, Any]) -> None:
    """The last line of the output is one JSON document."""
    print(json.dumps({"argv": sys.argv, "machine": machine(), **results}))
