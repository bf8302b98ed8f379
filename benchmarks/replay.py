"""Drafters without a model: `python -m benchmarks.replay`.

Each request is a prompt and what was said to it; a drafter's guesses are compared with it as verification would, all of them, up to
`--depth` a step. Tokens per target step, and drafted tokens that were wasted per token said. The sets: recorded answers to Spec-Bench
(`benchmarks.record`), Python's library as text, and edits of it (an identifier renamed, comments dropped), alone and one after another.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from assistgen import SuffixStore, weights
from assistgen.control import DepthController, ForwardCosts
from assistgen.drafters.base import Draft, Drafter
from assistgen.drafters.candidates import CandidateGeneratorDrafter
from assistgen.drafters.ngram import NGramDrafter
from assistgen.drafters.suffix import SuffixDrafter

from .common import chat, finish, spec_bench
from .record import RECORDINGS


Request = tuple[list[int], list[int]]  # prompt, answer


class ArcticDrafter(Drafter):
    """
    The rule of Arctic Inference as its documentation and `peers.md` describe it, on uncompressed tries: every match length of the last
    `depth` tokens, the end of the text included in the counts; a global tree of answers, the local one wins ties.
    """

    name = "arctic"

    def __init__(self, depth: int = 24, store: dict[str, Any] | None = None):
        self._depth = depth
        self._trees = [_Trie(depth)] + ([store["tree"]] if store is not None else [])

    def begin(self, rows: Any) -> None:
        self._text = list(rows[0])
        self._trees[0].begin()
        self._trees[0].extend(rows[0])
        for tree in self._trees[1:]:
            tree.begin()
            tree.extend(rows[0][-1:])

    def propose(self, rows: Any, max_tokens: Any, plan: Any) -> list[Draft]:
        best: tuple[float, list[int]] = (0.0, [])
        for tree in self._trees:
            found = tree.speculate(self._text[-self._depth :], max_tokens[0])
            if found[0] > best[0]:
                best = found
        return [Draft(best[1], self.name)]

    def commit(self, row: int, tokens: list[int]) -> None:
        self._text += tokens
        for tree in self._trees:
            tree.extend(tokens)


class _Trie:
    """Counts of all substrings of up to `depth` tokens. A node is `[count, {token: node}]`."""

    def __init__(self, depth: int):
        self._depth = depth
        self._root: list[Any] = [0, {}]
        self._open: list[Any] = []

    def begin(self) -> None:
        self._open = []

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            moved = []
            for node in [*self._open, self._root]:
                child = node[1].setdefault(token, [0, {}])
                child[0] += 1
                moved.append(child)
            self._open = moved[-(self._depth - 1) :] if self._depth > 1 else []

    def speculate(self, context: list[int], max_tokens: int) -> tuple[float, list[int]]:
        best: tuple[float, list[int]] = (0.0, [])
        for size in range(1, len(context)):
            node: Any = self._root
            for token in context[-size:]:
                node = node[1].get(token)
                if node is None:
                    return best
            tokens, prob, score = [], 1.0, 0.0
            while len(tokens) < min(max_tokens, size) and node[1]:
                token, child = max(node[1].items(), key=lambda item: item[1][0])
                prob *= child[0] / node[0]
                if prob < 0.1:
                    break
                tokens.append(token)
                score += prob
                node = child
            if score >= best[0]:
                best = (score, tokens)
        return best


def prompt_lookup() -> Drafter:
    """transformers', as of `prompt_lookup_num_tokens=10`."""
    generator = PromptLookupCandidateGenerator(num_output_tokens=10, max_matching_ngram_size=2, max_length=1 << 30)
    return CandidateGeneratorDrafter(generator, torch.device("cpu"))


def replay(make: Callable[[], Drafter], requests: list[Request], depth: int, takes_trees: bool = False) -> tuple[int, int, int]:
    """Tokens said, target steps, drafted tokens that were wasted."""
    said = steps = wasted = 0
    plan = DepthController().plan(1, ForwardCosts(), takes_trees=takes_trees)
    for prompt, answer in requests:
        drafter = make()
        drafter.begin([prompt + answer[:1]])
        at = 1
        while at < len(answer):
            room = min(depth, len(answer) - at - 1)
            draft = drafter.propose([0], [room], plan)[0] if room > 0 else Draft([], drafter.name)
            right, node = 0, draft.follow(-1, answer[at])
            while node is not None:
                right += 1
                node = draft.follow(node, answer[at + right])
            committed = answer[at : at + right + 1]
            drafter.commit(0, committed)
            at += len(committed)
            said += len(committed)
            wasted += len(draft.tokens) - right
            steps += 1
        drafter.end()
    return said, steps, wasted


def recorded(tokenizer: Any, path: Path) -> dict[str, list[Request]]:
    """All answers of a recording, and those of each category."""
    outputs = {entry["id"]: entry["output"] for entry in json.loads(path.read_text())["recordings"]}
    found: dict[str, list[Request]] = {path.stem: []}
    for item in spec_bench(10):
        if item["id"] in outputs:
            request = (chat(tokenizer, item["prompt"])["input_ids"][0].tolist(), outputs[item["id"]])
            found[path.stem].append(request)
            found.setdefault(item["category"], []).append(request)
    return found


def library(number: int, characters: tuple[int, int] = (3_000, 9_000)) -> list[str]:
    """Modules of Python's library, the same ones on every machine with this Python."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(errors="ignore") for path in paths]
    texts = [text for text in texts if characters[0] <= len(text) <= characters[1]]
    return random.Random(0).sample(texts, min(number, len(texts)))


def edits(text: str) -> Iterator[str]:
    """What an assistant would be asked for: a name changed, comments dropped, a decorator's worth of lines added."""
    names = [name for name in re.findall(r"\b[a-z_]{5,}\b", text) if name not in ("import", "return", "raise")]
    name = max(sorted(set(names)), key=names.count)
    yield re.sub(rf"\b{name}\b", f"new_{name}", text)
    lines = text.splitlines(keepends=True)
    try:
        comments = {t.start for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT}
    except (SyntaxError, tokenize.TokenError):
        comments = set()
    for row, column in comments:
        lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
    yield "".join(lines)
    yield re.sub(r"^( *)def (\w+)\((.*)\):$", r"\1@traced\n\1def \2(\3) -> Any:", text, flags=re.MULTILINE)


def sets(tokenizer: Any) -> dict[str, list[Request]]:
    found: dict[str, list[Request]] = {}
    found |= recorded(tokenizer, RECORDINGS / "qwen2.5-coder-1.5b.json")

    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    modules = library(12)
    found["code"] = [(ids(text)[:200], ids(text)[200:]) for text in modules]
    found["edits"] = [(ids(text), ids(edit)) for text in modules for edit in edits(text)]
    found["repeated requests"] = [(ids("Write it again.\n"), ids(edit)) for text in modules for edit in [text, *edits(text)]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=16)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(weights.locate("qwen2.5-coder-1.5b"))
    results: dict[str, dict[str, list[float]]] = {}
    for name, requests in sets(tokenizer).items():
        store, tree_store, arctic_store = SuffixStore(), SuffixStore(), {"tree": _Trie(24)}
        drafters: dict[str, Callable[[], Drafter]] = {
            "transformers' lookup": prompt_lookup,
            "ngram": NGramDrafter,
            "arctic's rule": ArcticDrafter,
            "suffix": SuffixDrafter,
            "arctic's, store": lambda store=arctic_store: ArcticDrafter(store=store),
            "suffix, store": lambda store=store: SuffixDrafter(store=store),
            "suffix, trees": SuffixDrafter,
            "suffix, trees, store": lambda store=tree_store: SuffixDrafter(store=store),
        }
        results[name] = {}
        print(f"{name} ({len(requests)} requests)")
        for drafter, make in drafters.items():
            said, steps, wasted = replay(make, requests, arguments.depth, takes_trees="trees" in drafter)
            results[name][drafter] = [said / steps, wasted / said]
            print(f"    {drafter:22s} {said / steps:6.3f} tokens a step, {wasted / said:6.3f} wasted a token", flush=True)
    finish({"tokens_per_step_and_wasted": results})


if __name__ == "__main__":
    main()
