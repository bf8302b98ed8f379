"""Text as it is committed: the iterator behind `assistgen.stream`, and what turns ids into text without waiting for the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .decoding import Decoding


@dataclass(frozen=True)
class Chunk:
    """
    What one round committed.

    Attributes:
        text (`str`): new text; may lag behind the ids while a character is incomplete.
        token_ids (`list[int]`): all ids of the round.
        sources (`list[str]`): for each id `"target"`, or the name of the drafter whose guess was accepted.
        draft_ids (`list[int]`): the guess that was verified in this round, rejected tokens included; empty in a plain step. Of a tree, what
            was accepted and how the guess goes on from there; tokens that competed with these aren't here.
        drafter (`str`, *optional*): whose guess it was; `None` in a plain step.
    """

    text: str
    token_ids: list[int]
    sources: list[str]
    draft_ids: list[int]
    drafter: str | None


class IncrementalText:
    """
    Decodes a growing sequence; the pieces joined are the decoded whole.

    Only the ids since the last safe point are decoded again, so the cost of a piece doesn't grow with the text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._read = 0  # ids whose text was handed out
        self._safe = 0  # where decoding may start: some handed-out ids stay in view, since tokenizers treat a text's start specially
        self._given = ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def push(self, ids: list[int]) -> str:
        self._ids += ids
        before = self._decode(self._ids[self._safe : self._read])
        now = self._decode(self._ids[self._safe :])
        if not now.startswith(before) or now.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._safe, self._read = self._read, len(self._ids)
        return self._give(now[len(before) :])

    def end(self) -> str:
        """What is left at the end."""
        whole = self._decode(self._ids)
        return self._give(whole[len(self._given) :]) if whole.startswith(self._given) else ""

    def _give(self, text: str) -> str:
        self._given += text
        return text


class SpeculationStream:
    """
    Iterates over the `Chunk`s of one generation. Closing it (also by leaving a `with` block) ends generation within one round.

    Attributes:
        output: at the end or after closing, what `generate(return_dict_in_generate=True)` returns, with `.speculation`; before, `None`.
    """

    def __init__(self, decoding: Decoding, tokenizer: Any, skip_special_tokens: bool, finish: Any):
        self._decoding = decoding
        self._rounds = decoding.run()
        self._text = IncrementalText(tokenizer, skip_special_tokens)
        self._finish = finish
        self._given = 0
        self._ended = False
        self.output: Any = None

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        row = self._decoding.rows[0]
        try:
            next(self._rounds)
        except StopIteration:
            self._end()
            raise
        except BaseException:
            self._ended = True
            raise
        ids, sources = row.output[self._given :], row.sources[self._given :]
        self._given = len(row.output)
        text = self._text.push(ids)
        drafted = [row.draft.tokens[node] for node in row.draft.path_on(row.accepted)]
        return Chunk(text + self._text.end() if row.done else text, ids, sources, drafted, row.draft.source if drafted else None)

    def close(self) -> None:
        """Ends generation; what was committed so far is in `output`."""
        if not self._ended:
            self._rounds.close()
            if self._decoding.output is None:
                self._decoding.finish()  # closed before the first token
            self._end()

    def _end(self) -> None:
        self._ended = True
        self.output = self._finish(self._decoding.output)

    def __enter__(self) -> SpeculationStream:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            self._rounds.close()
