"""Records what a target says and what a draft model would have drafted for it: `python -m benchmarks.record`.

The recordings, `benchmarks/recordings/TARGET.json`, let drafters and control be compared without a model, on any machine's costs
(`benchmarks.replay`, `benchmarks.simulate`). They hold Spec-Bench's question ids, the target's output and by draft model the chains, and
not the prompts. float32, greedy. One chain for each place where the last one ended: within a chain that is right so far, the chain of a
later place is its rest. Answers that are recorded already stay; another draft model's chains are added to them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from assistgen import weights
from assistgen.control import DepthController, ForwardCosts
from assistgen.drafters.base import Drafter
from assistgen.drafters.draft_model import DraftModelDrafter
from assistgen.drafters.universal import UniversalDrafter
from assistgen.stats import SpeculationStats

from .common import chat, machine, spec_bench


RECORDINGS = Path(__file__).parent / "recordings"


def answers(model: Any, tokenizer: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[tokenizer.pad_token_id or 0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)[:, width:].tolist()
    ends = set(model.generation_config.eos_token_id if isinstance(model.generation_config.eos_token_id, list)
               else [model.generation_config.eos_token_id])  # fmt: skip
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in output]


def drafter_of(draft: Any, draft_tokenizer: Any, target: Any, tokenizer: Any) -> Drafter:
    """With the target's tokenizer or another one, which the drafter sees."""
    vocab_size, cpu = target.config.get_text_config(decoder=True).vocab_size, torch.device("cpu")

    def make(**foreign: Any) -> DraftModelDrafter:
        return DraftModelDrafter(draft, **({"vocab_size": vocab_size, "device": cpu} | foreign))

    return UniversalDrafter(make, draft, (lambda: tokenizer, lambda: draft_tokenizer), SpeculationStats(), False, None, frozenset())


def chains(drafter: Drafter, prompts: list[list[int]], outputs: list[list[int]], depth: int) -> list[list[dict[str, Any]]]:
    """For each row: `at` (output tokens so far), `tokens` and `evidence` of what would have been drafted there."""
    drafter.begin([prompt + output[:1] for prompt, output in zip(prompts, outputs, strict=True)])
    at = [1] * len(prompts)
    recorded: list[list[dict[str, Any]]] = [[] for _ in prompts]
    controller, costs = DepthController("constant"), ForwardCosts()
    while rows := [row for row in range(len(prompts)) if at[row] < len(outputs[row])]:
        drafts = drafter.propose(rows, [depth] * len(rows), controller.plan(len(rows), costs))
        for row, draft in zip(rows, drafts, strict=True):
            output, start = outputs[row], at[row]
            recorded[row].append({"at": start, "tokens": draft.tokens, "evidence": list(draft.evidence)})
            right = 0
            while right < len(draft.tokens) and output[start + right : start + right + 1] == [draft.tokens[right]]:
                right += 1
            committed = output[start : start + right + 1]
            at[row] += len(committed)
            drafter.commit(row, committed)
    return recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--rows", type=int, default=13, help="prompts of similar length decoded at once")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    target, tokenizer = weights.load(arguments.target, torch.float32)
    draft, draft_tokenizer = weights.load(arguments.draft, torch.float32)
    path = RECORDINGS / f"{arguments.target}.json"
    document = json.loads(path.read_text()) if path.exists() else {"target": arguments.target, "recordings": []}
    known = {entry["id"]: entry for entry in document["recordings"]}
    items = spec_bench(arguments.per_category)
    for item in items:
        item["ids"] = chat(tokenizer, item["prompt"])["input_ids"][0].tolist()
    items.sort(key=lambda item: len(item["ids"]))
    for start in range(0, len(items), arguments.rows):
        batch = items[start : start + arguments.rows]
        prompts = [item["ids"] for item in batch]
        new = [item for item in batch if item["id"] not in known]
        outputs = answers(target, tokenizer, [item["ids"] for item in new], arguments.tokens) if new else []
        for item, output in zip(new, outputs, strict=True):
            known[item["id"]] = {"id": item["id"], "category": item["category"], "output": output, "chains": {}}
        outputs = [known[item["id"]]["output"] for item in batch]
        drafter = drafter_of(draft, draft_tokenizer, target, tokenizer)
        for item, recorded in zip(batch, chains(drafter, prompts, outputs, arguments.depth), strict=True):
            known[item["id"]]["chains"][arguments.draft] = recorded
        print(f"{start + len(batch)} of {len(items)} recorded", flush=True)
        document = {"machine": machine()} | document | {"recordings": list(known.values())}
        RECORDINGS.mkdir(exist_ok=True)
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
