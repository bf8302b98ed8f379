"""n-gram drafting (prompt lookup): what followed the last few tokens the last time they occurred, follows again.

Source: "Prompt Lookup Decoding" (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding), with an index in place of a scan,
the longest match first and then the most recent one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .base import Draft, Drafter, Plan, evidence_of


NAME = "ngram"
MAX_MATCH = 32
"""A match is measured up to this many tokens; a longer one is no better evidence."""


class NGramIndex:
    """
    Finds the latest earlier occurrence of the longest n-gram, `min_size` ≤ n ≤ `max_size`, at the end of a growing token sequence.

    Taking in a token and looking one up cost O(`max_size`) dict operations, whatever the length.
    """

    def __init__(self, min_size: int, max_size: int, tokens: Iterable[int] = ()):
        self.tokens: list[int] = []
        self._sizes = range(max_size, min_size - 1, -1)
        # n-gram -> where its latest occurrence ended (the index of the token that followed it)
        self._followed_at: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        seen, followed_at = self.tokens, self._followed_at
        for token in tokens:
            # The n-grams that end here are entered only now that something follows them: the sequence's own tip is no occurrence.
            end = len(seen)
            for size in self._sizes:
                if size <= end:
                    followed_at[tuple(seen[end - size : end])] = end
            seen.append(token)

    def find(self) -> tuple[int, int]:
        """
        Returns:
            `tuple[int, int]`: the length of the match (up to `MAX_MATCH`; 0 if there is none) and the index of the token that
            followed it.
        """
        seen, end = self.tokens, len(self.tokens)
        for size in self._sizes:
            if size <= end and (follow := self._followed_at.get(tuple(seen[end - size :]))) is not None:
                while size < min(MAX_MATCH, follow) and seen[follow - size - 1] == seen[end - size - 1]:
                    size += 1
                return size, follow
        return 0, 0

    def propose(self, max_tokens: int, tail: Sequence[int] = ()) -> Draft:
        """
        Args:
            max_tokens (`int`): the most tokens to guess.
            tail (`Sequence[int]`): tokens that aren't committed, after which to guess.
        """
        self.tokens += tail
        draft = self._propose(max_tokens)
        if tail:
            del self.tokens[-len(tail) :]
        return draft

    def _propose(self, max_tokens: int) -> Draft:
        size, follow = self.find()
        if not size or max_tokens < 1:
            return Draft([], NAME)
        tokens = self.tokens[follow : follow + max_tokens]
        if len(tokens) < max_tokens:
            # The match overlaps the end of the sequence: a run. Its period goes on.
            period = len(tokens)
            tokens = (tokens * (max_tokens // period + 1))[:max_tokens]
        return Draft(tokens, NAME, evidence=(evidence_of(1.0 - 3.0 / (size + 4.0)),))  # as measured (`suffix.automaton`)


class NGramDrafter(Drafter):
    """
    `method="ngram"`: one `NGramIndex` a row, over its prompt and its output.

    Args:
        prompt_lookup_min, prompt_lookup_max (`int`): the shortest and the longest n-gram that is looked up.
        looked_up (`Sequence[list[int]]`): for each row a text that is searched too.
    """

    name = NAME

    def __init__(self, prompt_lookup_min: int = 2, prompt_lookup_max: int = 5, looked_up: Sequence[list[int]] = ()):
        self.prompt_lookup_min = prompt_lookup_min
        self.prompt_lookup_max = prompt_lookup_max
        self._looked_up = looked_up
        self._indexes: list[NGramIndex] = []

    def begin(self, rows: Sequence[list[int]]) -> None:
        texts = self._looked_up or [[] for _ in rows]
        self._indexes = [
            NGramIndex(self.prompt_lookup_min, self.prompt_lookup_max, text + tokens) for text, tokens in zip(texts, rows, strict=True)
        ]

    def propose(self, rows: Sequence[int], max_tokens: Sequence[int], plan: Plan) -> list[Draft]:
        return [self._indexes[row].propose(room) for row, room in zip(rows, max_tokens, strict=True)]

    def commit(self, row: int, tokens: list[int]) -> None:
        self._indexes[row].extend(tokens)
