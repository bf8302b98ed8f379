"""Draft models with a foreign tokenizer: the alignment of texts, and what comes of it."""

import random

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from assistgen.translation import Alignment, Translation, translation_of


CORPUS = [
    "The old lighthouse stood on a rocky cliff above the sea. Every evening, the keeper climbed ninety-nine steps.",
    "def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n\tprint(i, add(i, 1))\n",
    "Größe, naïve café, 東京タワー, مرحبا, привет мир, emoji 👍🏽 🎉, odd   whitespace \t\n\n end.",
    '{"name": "value", "list": [1, 2, 3], "nested": {"key": null}}\n' * 3,
]


def byte_level(vocab_size=400):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS * 4, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def sentence_piece(vocab_size=500):
    """With ▁, a space of its own before the first word, and byte fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for text in CORPUS for word in text.replace(" ", " ▁").split(" ")] * 4
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special[:4])
    tokenizer.train_from_iterator(words, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    state = __import__("json").loads(tokenizer.to_str())
    for name in special[4:]:
        state["model"]["vocab"].setdefault(name, len(state["model"]["vocab"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(__import__("json").dumps(state)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ) if fast else None


@pytest.fixture(scope="module")
def small():
    return {"byte level": byte_level(), "sentence piece": sentence_piece()}


TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(["the ", "old", " light", "house", "\n", "    ", "\t", "def f(x):", "👍🏽", "東京", "é", "e\u0301", "▁", "<|im_",
                              "start|>", "<|im_end|>", "</s>", "<0x41>", "Ġ", "  ", "…", "\r\n", "1234", "ı", "ﬁ", "\u200b"]), max_size=30)
    .map("".join),
)  # fmt: skip


def said(text, ids):
    return b"".join(text.bytes_of(token) or b"" for token in ids)


def play(target, draft, text, rng, wrong=0.0):
    """
    A target that says `text` and a draft model that knows what it will say, but for some mistakes. Returns drafted and accepted tokens
    and the rounds.
    """
    translation = Translation(target, draft)
    truth = [token for token, _ in translation.target.encode(text.encode())]
    assert said(translation.target, truth) == text.encode()
    alignment = Alignment(translation.target, translation.draft)
    at = rng.randrange(len(truth)) if truth else 0
    kept = alignment.extend(truth[:at])
    assert kept == 0
    drafted = accepted = rounds = 0
    while at < len(truth):
        spoken = said(translation.target, truth[:at])
        known = said(translation.draft, alignment.ids)
        assert spoken == known + alignment.pending and len(alignment.pending) < 4
        rest = [token for token, _ in translation.draft.encode((spoken[len(known) :] and alignment.pending) + text.encode()[len(spoken) :])]
        guess = rest[: rng.randrange(1, 9)]
        if rng.random() < wrong:
            guess[-1] = rng.randrange(len(draft))
        tokens = [token for token, _ in alignment.translate(guess)]
        matches = 0
        while matches < len(tokens) and at + matches < len(truth) and tokens[matches] == truth[at + matches]:
            matches += 1
        committed = truth[at : at + matches + 1]
        before = list(alignment.ids)
        kept = alignment.extend(committed)
        assert alignment.ids[:kept] == before[:kept]
        at += len(committed)
        drafted, accepted, rounds = drafted + len(tokens), accepted + matches, rounds + 1
    return drafted, accepted, rounds


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, seed=st.integers(0, 1000), way=st.sampled_from([("byte level", "sentence piece"), ("sentence piece", "byte level")]))
@example(text="e\u0301 <|im_end|> ▁ 👍🏽", seed=1, way=("byte level", "sentence piece"))
@example(text="e\u0301 <|im_end|> ▁ 👍🏽", seed=1, way=("sentence piece", "byte level"))
def test_the_alignment_says_the_same_bytes_whatever_the_text(small, text, seed, way):
    target, draft = (small[name] for name in way)
    play(target, draft, text, random.Random(seed), wrong=0.3)


@pytest.mark.parametrize("way", [("byte level", "sentence piece"), ("sentence piece", "byte level")])
def test_what_the_draft_knows_is_accepted_and_nothing_drifts(small, way):
    target, draft = (small[name] for name in way)
    rng, rounds = random.Random(1), 0
    total = [0, 0]
    while rounds < 2000:
        text = " ".join(rng.choice(CORPUS) for _ in range(40))
        drafted, accepted, more = play(target, draft, text, rng)
        total[0], total[1], rounds = total[0] + drafted, total[1] + accepted, rounds + more
    assert total[1] > 0.85 * total[0]
