"""A memory of earlier texts for suffix decoding: bounded, shared by calls, rows and threads, kept on disk if asked."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .index import Cursor, Proposal, SuffixIndex


FORMAT = b"assistgen suffix store 1\n"
PADDING = 1024


class Vocabulary(NamedTuple):
    """
    What ids mean.

    Attributes:
        size (`int`): how many ids there are; a model's may be padded.
        fingerprint (`str`, *optional*): SHA-256 over all tokens with their ids; `None` if the tokenizer isn't known.
    """

    size: int
    fingerprint: str | None

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        if tokenizer not in _vocabularies:
            tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
            _vocabularies[tokenizer] = cls(len(tokenizer), hashlib.sha256(json.dumps(tokens).encode()).hexdigest())
        return _vocabularies[tokenizer]

    def may_be(self, other: Vocabulary) -> bool:
        """Whether they can be the same: by fingerprint if both are known, else by size, give or take a model's padding."""
        if self.fingerprint is not None and other.fingerprint is not None:
            return self.fingerprint == other.fingerprint
        return abs(self.size - other.size) <= PADDING


_vocabularies: weakref.WeakKeyDictionary[Any, Vocabulary] = weakref.WeakKeyDictionary()


class SuffixStore:
    """
    Earlier outputs (and documents, if they are added) that suffix decoding searches beside a request's own text.

    Nothing is remembered unless a store is given to `SpeculationConfig(method="suffix", store=store)`. What is in a store can show
    through the timing of whoever shares it, though never through output, stats or logs: give users who must not learn of each other's
    texts a store each.

    Args:
        max_tokens (`int`): the most tokens kept. The oldest go first, in blocks of about a third.
        max_requests (`int`): the most sequences kept, likewise.
        max_depth (`int`): the longest context that is looked up, in tokens.
    """

    BLOCKS = 3
    """A proposal looks into each, so that fewer are quicker; more would keep more of a full store when the oldest goes."""

    def __init__(self, max_tokens: int = 1_000_000, max_requests: int = 10_000, max_depth: int = 24) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_requests", max_requests), ("max_depth", max_depth)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"`{name}` must be an integer, got {type(value).__name__}.")
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.max_tokens, self.max_requests, self.max_depth = max_tokens, max_requests, max_depth
        self._vocabulary: Vocabulary | None = None
        self._blocks: deque[_Block] = deque()  # oldest first
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """How many sequences are kept."""
        with self._lock:
            return sum(len(block.lengths) for block in self._blocks)

    def __repr__(self) -> str:
        return f"SuffixStore({len(self)} of {self.max_requests} sequences, {self.num_tokens} of {self.max_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        with self._lock:
            return sum(block.num_tokens for block in self._blocks)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(block.index.nbytes for block in self._blocks)

    def check(self, vocabulary: Vocabulary | None) -> None:
        """
        Raises:
            ValueError: the store holds another tokenizer's ids.
        """
        with self._lock:
            if vocabulary is not None and self._vocabulary is not None and not vocabulary.may_be(self._vocabulary):
                raise ValueError("`store` holds texts of another tokenizer: ids mean something else there. Use a store for each tokenizer.")

    def add(self, tokens: Sequence[int], vocabulary: Vocabulary | None = None) -> None:
        """
        Remembers one sequence of ids; of one longer than `max_tokens`, the end.

        Args:
            vocabulary (`Vocabulary`, *optional*): what the ids mean. The first one decides for the store.
        """
        with self._lock:
            self.check(vocabulary)
            if vocabulary is not None and (self._vocabulary is None or self._vocabulary.fingerprint is None):
                self._vocabulary = vocabulary
            tokens = list(tokens)[-self.max_tokens :]
            block_tokens, block_requests = -(-self.max_tokens // self.BLOCKS), -(-self.max_requests // self.BLOCKS)
            while tokens:
                newest = self._blocks[-1] if self._blocks else None
                if newest is None or newest.num_tokens >= block_tokens or len(newest.lengths) >= block_requests:
                    newest = _Block(SuffixIndex(self.max_depth))
                    self._blocks.append(newest)
                part = tokens[: block_tokens - newest.num_tokens]
                tokens = tokens[len(part) :]
                newest.add(part)
                while len(self) > self.max_requests or self.num_tokens > self.max_tokens:
                    self._blocks.popleft()

    def seed_from(self, texts: Iterable[str], tokenizer: Any) -> None:
        """Remembers texts: documents, code files, earlier answers. Special tokens aren't added."""
        vocabulary = Vocabulary.of(tokenizer)
        self.check(vocabulary)
        for text in texts:
            self.add(tokenizer(text, add_special_tokens=False)["input_ids"], vocabulary)

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()

    def cursor(self) -> StoreCursor:
        """Follows one text, to propose what went on from its end in the store."""
        return StoreCursor(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the store to a file, which is replaced in one step: a reader, or a crash, finds the old one or the new one."""
        path = Path(path)
        with self._lock:
            lengths = [length for block in self._blocks for length in block.lengths]
            tokens = [block.tokens() for block in self._blocks]
            header = {
                "max_tokens": self.max_tokens, "max_requests": self.max_requests, "max_depth": self.max_depth,
                "vocabulary": self._vocabulary, "lengths": lengths, "blocks": [len(block.lengths) for block in self._blocks],
            }  # fmt: skip
        body = json.dumps(header).encode() + b"\n" + (np.concatenate(tokens) if tokens else np.empty(0)).astype("<i4").tobytes()
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with io.FileIO(handle, "w", closefd=True) as file:
                for piece in (FORMAT, hashlib.sha256(body).hexdigest().encode() + b"\n", body):
                    _write(file, piece)
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SuffixStore:
        """
        Reads what `save` wrote.

        Raises:
            ValueError: the file is damaged, of another version, or none of ours.
        """
        content = Path(path).read_bytes()
        if not content.startswith(FORMAT):
            raise ValueError(f"{path} is no suffix store, or of a version that this assistgen can't read.")
        checksum, _, body = content[len(FORMAT) :].partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != checksum:
            raise ValueError(f"{path} is damaged: its checksum doesn't fit its content.")
        line, _, data = body.partition(b"\n")
        header = json.loads(line)
        store = cls(header["max_tokens"], header["max_requests"], header["max_depth"])
        if header["vocabulary"] is not None:
            store._vocabulary = Vocabulary(*header["vocabulary"])
        tokens, at = np.frombuffer(data, "<i4"), 0
        lengths = iter(header["lengths"])
        for count in header["blocks"]:
            block = _Block(SuffixIndex(store.max_depth))
            for _ in range(count):
                length = next(lengths)
                block.add(tokens[at : at + length].tolist())
                at += length
            store._blocks.append(block)
        return store


class _Block:
    """Sequences that are forgotten together."""

    def __init__(self, index: SuffixIndex):
        self.index = index
        self.lengths: list[int] = []
        self.num_tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        self.index.begin_sequence()
        self.index.extend(tokens)
        self.lengths.append(len(tokens))
        self.num_tokens += len(tokens)

    def tokens(self) -> Any:
        text = self.index.text
        return text[text >= 0]


class StoreCursor:
    """Where one text stands in a store, whose blocks come and go."""

    def __init__(self, store: SuffixStore):
        self._store = store
        self._depth = store.max_depth
        self._tail: list[int] = []  # the last tokens, for blocks that come later
        self._followed = 0  # how many of them the present blocks were followed over
        self._blocks: list[_Block] = []
        self._cursor: Cursor | None = None

    def advance(self, tokens: Sequence[int]) -> None:
        """The text goes on with `tokens`."""
        self._tail += tokens[-self._depth :]
        if (forgotten := len(self._tail) - self._depth) > self._depth:  # a few at a time would cost more
            del self._tail[:forgotten]
            self._followed = max(0, self._followed - forgotten)

    def propose(self, max_tokens: int, max_spec_factor: float = math.inf, min_token_prob: float = 0.002) -> Proposal:
        """As `Cursor.propose`, over all blocks; on a tie, the latest."""
        store = self._store
        with store._lock:
            if len(self._blocks) != len(store._blocks) or (self._blocks and self._blocks[0] is not store._blocks[-1]):
                self._blocks = list(reversed(store._blocks))
                self._cursor = Cursor([block.index for block in self._blocks], is_own=False) if self._blocks else None
                self._followed = 0
            if self._cursor is None:
                return Proposal()
            new = self._tail[self._followed :]
            self._followed = len(self._tail)
            return self._cursor.propose(max_tokens, max_spec_factor, min_token_prob, new)

    def branch(
        self, own: Cursor, proposal: Proposal, max_tokens: int, max_spec_factor: float = math.inf, min_token_prob: float = 0.002
    ) -> Proposal:
        """As `Cursor.branch` of `own`, the text's cursor in itself, with the store as it was at the last proposal for its memory."""
        with self._store._lock:
            return own.branch(proposal, max_tokens, max_spec_factor, min_token_prob, self._cursor)


def _write(file: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
