"""Text in two vocabularies, byte for byte: what lets a draft model with a foreign tokenizer guess for a target.

A tokenizer's tokens are bytes (of byte-level BPE, of SentencePiece with ▁ and byte fallback) or special tokens, which stand for themselves
and for no text. `TokenText` knows both for one tokenizer; an `Alignment` keeps one row's text in the draft's vocabulary while it grows
in the target's, encoding only what is new; a `Translation` of a pair of tokenizers has what doesn't depend on a row. No torch, no models.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np


SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""
BYTE = re.compile("<0x[0-9A-F]{2}>")
"""What it writes for a byte."""


@lru_cache(maxsize=1)
def _byte_characters() -> dict[str, int]:
    """Byte-level BPE's printable stand-ins: character -> byte (GPT-2, Radford et al., 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenText:
    """
    What the tokens of one tokenizer say.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): stays as it is.

    Raises:
        ValueError: if its tokens can't be told as bytes (WordPiece, for one).
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.loads(self._backend.decoder.__getstate__()) if self._backend is not None and self._backend.decoder else {}
        kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
        if "WordPiece" in kinds:
            raise ValueError(f"`model`: the tokens of a {type(tokenizer).__name__} aren't text, so its vocabulary can't be translated.")
        self._is_byte_level = "ByteLevel" in kinds
        added = tokenizer.added_tokens_decoder
        self._added = {number: token.content for number, token in added.items()}
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._special |= {
            number: token
            for number, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=False)
            if number is not None
        }
        self.special_ids = {content: number for number, content in self._special.items()}
        self.eos_token, self.bos_token = tokenizer.eos_token, tokenizer.bos_token
        self.bos_token_id = tokenizer.bos_token_id
        self._bytes: dict[int, bytes | None] = {}
        self._characters: dict[bytes, list[tuple[int, int]]] = {}

    def special(self, token: int) -> str | None:
        """The name of a special token; `None` for any other."""
        return self._special.get(token)

    def bytes_of(self, token: int) -> bytes | None:
        """What a token says; `None` for a special one and for an id without a token."""
        if token not in self._bytes:
            self._bytes[token] = self._find_bytes(token)
        return self._bytes[token]

    def _find_bytes(self, token: int) -> bytes | None:
        if token in self._special:
            return None
        if token in self._added:
            return self._added[token].encode()
        piece = self._piece(token)
        if not piece:
            return None
        if self._is_byte_level:
            characters = _byte_characters()
            if all(character in characters for character in piece):
                return bytes(characters[character] for character in piece)
            return piece.encode()
        if BYTE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    def by_content(self, size: int) -> dict[str | bytes, int]:
        """The first `size` tokens by what they say or, if special, their names; of several that say the same, not a byte's own token."""
        found: dict[str | bytes, int] = {}
        for token in range(size):
            says = self._special.get(token) or self.bytes_of(token)
            if says and (says not in found or self._is_byte(found[says])):
                found[says] = token
        return found

    def _is_byte(self, token: int) -> bool:
        return not self._is_byte_level and BYTE.fullmatch(self._piece(token)) is not None

    def _piece(self, token: int) -> str:
        piece = self._backend.id_to_token(token) if self._backend is not None else self._tokenizer.convert_ids_to_tokens(token)
        return piece or ""

    def encode(self, text: bytes) -> list[tuple[int, int]]:
        """
        The tokens of a piece of text, none of them special, and the place in `text` at which each ends.

        As the tokenizer has it where that says the text byte for byte, also for a text that goes on in mid-word; otherwise (a
        normaliser at work, a special token's look-alike, broken characters) in smaller parts: characters, then bytes, and for what the
        vocabulary doesn't know its unknown token.
        """
        pieces: list[tuple[int, int]] = []
        start = 0
        for part, is_text in _characters_and_others(text):
            found = self._encode_exactly(part) if is_text else None
            if found is None:
                found = self._encode_in_parts(part, is_text)
            pieces += [(token, start + end) for token, end in found]
            start += len(part)
        return pieces

    def _encode_exactly(self, text: bytes) -> list[tuple[int, int]] | None:
        if not text:
            return []
        # After a line's end no tokenizer puts a space of its own before the first word.
        for before in (b"", b"\n"):
            ids = self._ids((before + text).decode())
            pieces, end, fits = [], 0, True
            for token in ids:
                said = self.bytes_of(token)
                if said is None:
                    fits = False
                    break
                end += len(said)
                pieces.append((token, end))
            if not fits:
                continue
            first = end - len(text)
            places = [place for place, (_, end) in enumerate(pieces, 1) if end == first] if first else [0]
            if first >= 0 and places:
                pieces = [(token, end - first) for token, end in pieces[places[-1] :]]
                if b"".join(self._bytes[token] or b"" for token, _ in pieces) == text:
                    return pieces
        return None

    def _encode_in_parts(self, text: bytes, is_text: bool) -> list[tuple[int, int]]:
        pieces: list[tuple[int, int]] = []
        start = 0
        for part in [character.encode() for character in text.decode()] if is_text else [text[i : i + 1] for i in range(len(text))]:
            found = self._characters.get(part)
            if found is None:
                exact = self._encode_exactly(part) if is_text else None
                found = self._characters[part] = exact if exact is not None else self._encode_bytes(part)
            pieces += [(token, start + end) for token, end in found]
            start += len(part)
        return pieces

    def _encode_bytes(self, character: bytes) -> list[tuple[int, int]]:
        ids = []
        for byte in character:
            name = next(c for c, b in _byte_characters().items() if b == byte) if self._is_byte_level else f"<0x{byte:02X}>"
            token = self._backend.token_to_id(name) if self._backend is not None else self._tokenizer.convert_tokens_to_ids(name)
            if token is None or self.bytes_of(token) != bytes([byte]):
                unknown = self._tokenizer.unk_token_id
                return [(unknown, len(character))] if unknown is not None else []
            ids.append(token)
        return [(token, end) for end, token in enumerate(ids, 1)]

    def starts_with_bos(self) -> bool:
        """Whether the tokenizer writes a BOS by itself."""
        ids = self._tokenizer.encode("a") if self._backend is None else self._backend.encode("a").ids
        return self.bos_token_id is not None and ids[:1] == [self.bos_token_id]

    def _ids(self, text: str) -> list[int]:
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        encoding = self._backend.encode(text, add_special_tokens=False)
        # A user's call may have left padding or truncation switched on; switching them off would change the tokenizer.
        skip = 0 if self._backend.truncation is None else self._backend.truncation["stride"]
        ids = [token for token, real in zip(encoding.ids, encoding.attention_mask, strict=True) if real]
        for more in encoding.overflowing:
            ids += [token for token, real in zip(more.ids, more.attention_mask, strict=True) if real][skip:]
        return ids


def _whole_characters(text: bytes) -> int:
    """The length of a text without a last character that isn't complete."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:  # starts a character of several bytes
            needs = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - back if needs > back else len(text)
        if byte < 0x80:
            break
    return len(text)


def _characters_and_others(text: bytes) -> Iterable[tuple[bytes, bool]]:
    """A text in runs of valid UTF-8 and of bytes that are none."""
    decoder = codecs.getincrementaldecoder("utf-8")
    while text:
        try:
            decoder().decode(text, final=True)
        except UnicodeDecodeError as error:
            if error.start:
                yield text[: error.start], True
            yield text[error.start : error.end], False
            text = text[error.end :]
        else:
            yield text, True
            return


class Alignment:
    """
    One row's text, which grows in the target's vocabulary, in the draft's: the same bytes at every time, up to a last character that
    isn't complete.

    Only the end of the draft's text, some words, is encoded again when it grows, and of the target's when a draft is translated.

    Args:
        target, draft (`TokenText`): of the two tokenizers.
        start (`Sequence[int]`): draft ids before all text, such as a BOS; they stand for the target's own.

    Attributes:
        ids (`list[int]`): the text in the draft's vocabulary.
    """

    LOOK_BACK = 12
    """Tokens at the end of a text that are encoded again with what follows them."""

    def __init__(self, target: TokenText, draft: TokenText, start: Sequence[int] = ()):
        self._target, self._draft = target, draft
        self.ids = list(start)
        self._new_run()
        self._num_start = len(start)

    @property
    def _at_start(self) -> bool:
        return len(self.ids) == self._num_start and not self._run

    def _new_run(self) -> None:
        """A special token was the last: no text before it has to do with the text behind it."""
        self._run = bytearray()
        self._first = len(self.ids)  # the run's first draft id
        self._ends: list[int] = []  # where in the run each of its draft ids ends
        self._target_ends: list[int] = []

    @property
    def pending(self) -> bytes:
        """What isn't in the draft's text yet, because its character isn't complete."""
        return bytes(self._run[self._ends[-1] if self._ends else 0 :])

    def extend(self, tokens: Iterable[int]) -> int:
        """
        Takes in more of the target's tokens.

        Returns:
            `int`: how many of the draft's ids before are sure to be as they were; those after that may be others.
        """
        kept = len(self.ids)
        for token in tokens:
            name = self._target.special(token)
            if name is None:
                self._run += self._target.bytes_of(token) or b""
                self._target_ends.append(len(self._run))
                continue
            kept = min(kept, self._encode_end(len(self._run)))
            same = self._draft.special_ids.get(name)
            if self._at_start and name == self._target.bos_token and (same in self.ids or (same is None and self.ids)):
                continue
            self.ids += [same] if same is not None else [token for token, _ in self._draft.encode(name.encode())]
            self._new_run()
        return min(kept, self._encode_end(_whole_characters(bytes(self._run[-4:])) + max(0, len(self._run) - 4)))

    def _encode_end(self, whole: int) -> int:
        """Brings the draft's ids up to the run's byte `whole`; returns how many of them are as before."""
        if whole == (self._ends[-1] if self._ends else 0):
            return len(self.ids)
        place = self._restart(self._ends)
        start = self._ends[place - 1] if place else 0
        pieces = self._draft.encode(bytes(self._run[start:whole]))
        del self.ids[self._first + place :], self._ends[place:]
        for token, end in pieces:
            self.ids.append(token)
            self._ends.append(start + end)
        return self._first + place

    def _restart(self, ends: list[int]) -> int:
        """The token from which on the end of a text is encoded again: the first of its last words."""
        earliest = max(0, len(ends) - self.LOOK_BACK)
        for place in range(earliest, len(ends)):
            start = ends[place - 1] if place else 0
            if place == 0 or (self._run[start] in b" \n" and self._run[start - 1] not in b" \n\t\r"):
                return place
        while earliest > 0 and self._run[ends[earliest - 1]] & 0xC0 == 0x80:  # in the middle of a character
            earliest -= 1
        return earliest

    def translate(self, drafted: Sequence[int]) -> list[tuple[int, int]]:
        """
        Draft ids behind the text, in the target's vocabulary, as the target itself would go on.

        Returns:
            `list[tuple[int, int]]`: the target's ids, each with the number of `drafted` that it takes to say it.
        """
        pending = self.pending
        said, ends, special = bytearray(), [], None
        for number, token in enumerate(drafted, 1):
            more = self._draft.bytes_of(token)
            if more is None:
                name = self._draft.special(token)
                if name is not None and name == self._draft.eos_token and name not in self._target.special_ids:
                    name = self._target.eos_token
                special = (self._target.special_ids[name], number) if name in self._target.special_ids else None
                break
            said += more
            ends.append(len(said))
        if not said.startswith(pending):
            return []
        whole = len(said) if special is not None else _whole_characters(bytes(said))
        tokens = []
        number = 0
        for token, end in self._go_on(bytes(said[len(pending) : whole])) if whole > len(pending) else []:
            while ends[number] < end + len(pending):
                number += 1
            tokens.append((token, number + 1))
        return [*tokens, special] if special is not None else tokens

    def _go_on(self, text: bytes) -> list[tuple[int, int]]:
        """The target's ids for text behind the run, and where in it each ends."""
        ends = self._target_ends
        place = self._restart(ends)
        start = ends[place - 1] if place else 0
        here = len(self._run) - start
        pieces = self._target.encode(bytes(self._run[start:]) + text)
        if here and not any(end == here for _, end in pieces):  # the target wouldn't have ended a token here
            here = 0
            pieces = self._target.encode(text)
        found, end_before = [], here
        for token, end in pieces:
            if end <= here:
                continue
            if self._target.bytes_of(token) != text[end_before - here : end - here]:
                break  # not in the target's vocabulary
            found.append((token, end - here))
            end_before = end
        return found


class Translation:
    """
    What two tokenizers have to do with each other.

    Attributes:
        target, draft (`TokenText`): of the two.
    """

    def __init__(self, target: Any, draft: Any):
        self.target, self.draft = TokenText(target), TokenText(draft)
        self._sizes = len(target), len(draft)
        self._shared: dict[int, int] | None = None
        self._lock = threading.Lock()

    def shared(self) -> dict[int, int]:
        """The tokens that say the same in both: draft id -> target id, each id once."""
        with self._lock:
            if self._shared is None:
                ours, theirs = (text.by_content(size) for text, size in zip((self.target, self.draft), self._sizes, strict=True))
                self._shared = {token: ours[says] for says, token in theirs.items() if says in ours}
            return self._shared

    @cached_property
    def pairs(self) -> np.ndarray:
        """The same as an array of shape `(tokens, 2)`."""
        return np.array(sorted(self.shared().items()), dtype=np.int64).reshape(-1, 2)

    @property
    def overlap(self) -> float:
        """The share of the draft's vocabulary that the target has too."""
        return len(self.shared()) / max(1, self._sizes[1])


def tokenizers_of(target: Any, draft: Any, tokenizer: Any, assistant_tokenizer: Any) -> tuple[Any, Any] | None:
    """
    The tokenizers of two models, those that the call has or else those in the models' folders, as functions that load them; `None` if
    they are the same or one isn't to be found.

    Args:
        target, draft (`PreTrainedModel`): the models.
        tokenizer, assistant_tokenizer (*optional*): theirs, as far as the call has them.
    """
    if not are_known(target, draft, tokenizer, assistant_tokenizer) or (tokenizer is not None and tokenizer is assistant_tokenizer):
        return None
    names = [getattr(model, "name_or_path", None) or "" for model in (target, draft)]
    if tokenizer is None and assistant_tokenizer is None and len({_fingerprint(_file_of(name)) for name in names}) == 1:
        return None
    ours, theirs = (
        partial(_load, name) if given is None else partial(lambda it: it, given)
        for given, name in zip((tokenizer, assistant_tokenizer), names, strict=True)
    )
    return ours, theirs


def are_known(target: Any, draft: Any, tokenizer: Any, assistant_tokenizer: Any) -> bool:
    """Whether the call or the models' folders have both tokenizers."""
    sides = ((target, tokenizer), (draft, assistant_tokenizer))
    return all(given is not None or _file_of(getattr(model, "name_or_path", None) or "") is not None for model, given in sides)


@lru_cache(maxsize=32)
def _file_of(name: str) -> str | None:
    """The tokenizer's file in a model's folder, or in the cache of what was loaded from a hub."""
    if not name:
        return None
    from transformers.utils import cached_file

    try:
        return cached_file(name, "tokenizer.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    except Exception:  # whatever a hub library makes of a name: then there is no file
        return None


@lru_cache(maxsize=16)
def _fingerprint(file: str | None) -> str | None:
    if file is None:
        return None
    with open(file, "rb") as opened:
        return hashlib.sha256(opened.read()).hexdigest()


@lru_cache(maxsize=4)
def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, local_files_only=True)


@lru_cache(maxsize=8)
def translation_of(target: Any, draft: Any) -> Translation | None:
    """
    The translation between two tokenizers, made once for a pair; `None` if they have the same vocabulary, by its contents.

    Args:
        target, draft (`PreTrainedTokenizerBase`): the tokenizers.
    """
    return None if target is draft or same_vocabulary(target, draft) else Translation(target, draft)


def same_vocabulary(target: Any, draft: Any) -> bool:
    """Whether ids mean the same in two tokenizers, but for a few that only one has or that hardly occur."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return True
    fewer, more = sorted((ours, theirs), key=len)
    return sum(more.get(token) == number for token, number in fewer.items()) >= 0.99 * len(fewer)
