"""Draft models with a foreign tokenizer: the alignment of texts, and what comes of it."""

import json
import random

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import assistgen
from assistgen.translation import Alignment, Translation, same_vocabulary

from .families import FAMILIES
from .oracles import assert_same_distribution
from .tiny import build, pad_left


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
    special = ["<unk>", "<s>", "</s>", "<|im_end|>"]
    words = [word for text in CORPUS for word in text.replace(" ", " ▁").split(" ")] * 4
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special))
    state = json.loads(tokenizer.to_str())
    for byte in range(256):
        state["model"]["vocab"].setdefault(f"<0x{byte:02X}>", len(state["model"]["vocab"]))
    tokenizer = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def small():
    return {"byte level": byte_level(), "sentence piece": sentence_piece()}


TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(["the ", " light", "house", "\n", "    ", "\t", "def f(x):", "👍🏽", "東京", "é", "e\u0301", "▁", "<|im_",
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
    if said(translation.target, truth) != text.encode():
        return 0, 0, 0  # a byte that the target has no token for: it can't say that
    can_follow = said(translation.draft, [token for token, _ in translation.draft.encode(text.encode())]) == text.encode()
    alignment = Alignment(translation.target, translation.draft)
    at = rng.randrange(len(truth)) if truth else 0
    kept = alignment.extend(truth[:at])
    assert kept == 0
    drafted = accepted = rounds = 0
    while at < len(truth):
        spoken = said(translation.target, truth[:at])
        known = said(translation.draft, alignment.ids)
        if can_follow:
            assert spoken == known + alignment.pending and len(alignment.pending) < 4
        else:
            known = spoken[: len(spoken) - len(alignment.pending)]
        rest = [token for token, _ in translation.draft.encode((spoken[len(known) :] and alignment.pending) + text.encode()[len(spoken) :])]
        guess = rest[: rng.randrange(1, 9)]
        if guess and rng.random() < wrong:
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


HALVES = "al-pha bra-vo char-lie del-ta ec-ho fox-trot go-lf ho-tel in-dia jul-iett ki-lo li-ma mi-ke nov-ember os-car pa-pa que-bec"
WORDS = HALVES.replace("-", "")


class Sayer:
    """A tiny model that likes to say one text over and over: each token is followed by the one that follows it there."""

    def __new__(cls, tokenizer, seed=0, family="llama", strength=14.0, **overrides):
        ids = tokenizer(f" {WORDS}" * 2, add_special_tokens=False).input_ids
        model = build(family, seed=seed, vocab_size=len(tokenizer) + 3, **overrides)
        follows = torch.full((len(tokenizer) + 3,), ids[0])
        follows[torch.tensor(ids[:-1])] = torch.tensor(ids[1:])
        fed = []
        model.get_input_embeddings().register_forward_pre_hook(lambda module, arguments: fed.append(arguments[0]))

        def prefer(module, arguments, logits):
            following = follows[fed.pop()[:, -logits.shape[1] :]]
            return logits.scatter_add(-1, following[..., None], torch.full_like(logits[..., :1], strength))

        model.get_output_embeddings().register_forward_hook(prefer)
        return model


@pytest.fixture(scope="module")
def pair():
    """A tokenizer that has the words whole, and one that has each second one in halves."""
    halved = [half for i, word in enumerate(HALVES.split()) for half in ([word.replace("-", "")] if i % 2 else word.split("-"))]
    starts = {word.split("-")[0] for word in HALVES.split()} | set(WORDS.split())
    made = []
    for words, special in ((WORDS.split(), ["<s>", "</s>"]), (halved, ["</s>", "<x>", "<s>"])):
        tokenizer = byte_level().backend_tokenizer
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator([f" {word}" if word in starts else word for word in words], trainer)
        made.append(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))
    return made


def inputs_of(tokenizer, rows):
    texts = [" alpha bravo charlie", " mike", " hotel india juliett kilo lima"][:rows]
    parts = [tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids for text in texts]
    return {"input_ids": parts[0]} if rows == 1 else pad_left(parts)


@pytest.mark.exactness
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("by_vocabulary", [None, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_identity(pair, rows, sampled, by_vocabulary, swapped):
    tokenizer, foreign = reversed(pair) if swapped else pair
    model, draft = Sayer(tokenizer), Sayer(foreign, seed=1)
    inputs = inputs_of(tokenizer, rows)
    settings = {"max_new_tokens": 30, "do_sample": sampled, "return_dict_in_generate": True}
    before = [parameter.clone() for parameter in draft.parameters()]
    torch.manual_seed(2)
    plain = model.generate(**inputs, **settings)
    torch.manual_seed(2)
    speculation = {"method": "draft_model", "model": draft, "depth": "constant", "num_speculative_tokens": 6,
                   "use_heterogeneous_vocab": by_vocabulary}  # fmt: skip
    output = assistgen.generate(model, **inputs, **settings, speculation=speculation, tokenizer=tokenizer, assistant_tokenizer=foreign)
    if rows == 1 or not sampled:
        assert torch.equal(plain.sequences, output.sequences)
    stats = output.speculation
    assert stats.num_accepted_tokens > rows * (3 if by_vocabulary else 12) and not stats.fallbacks
    assert stats.drafters["draft_model"].route == ("vocabulary" if by_vocabulary else "text")
    assert 0.3 < stats.drafters["draft_model"].vocabulary_overlap < 1.0
    assert all(torch.equal(one, other) for one, other in zip(before, draft.parameters(), strict=True))


@pytest.mark.exactness
@pytest.mark.parametrize("rows", [1, 3])
def test_a_chain_control_and_turns(pair, rows):
    tokenizer, foreign = pair
    model, draft = Sayer(tokenizer), Sayer(foreign, seed=1)
    speculator = assistgen.Speculator({"drafters": ["ngram", {"method": "draft_model", "model": draft}]})
    ids = inputs_of(tokenizer, rows)
    for _ in range(3):
        plain = model.generate(**ids, max_new_tokens=40, do_sample=False)
        output = assistgen.generate(
            model, **ids, max_new_tokens=40, do_sample=False, return_dict_in_generate=True, speculation=speculator,
            tokenizer=tokenizer, assistant_tokenizer=foreign,
        )  # fmt: skip
        assert torch.equal(plain, output.sequences) and not output.speculation.fallbacks
        if rows == 1:
            ids = {"input_ids": plain}
    assert speculator.stats.num_accepted_tokens > 20


@pytest.mark.exactness
def test_two_drafts_in_turn_on_one_pair_of_tokenizers(pair):
    tokenizer, foreign = pair
    model, ids = Sayer(tokenizer), inputs_of(tokenizer, 1)
    plain = model.generate(**ids, max_new_tokens=30, do_sample=False)
    for draft in (Sayer(foreign, seed=1), Sayer(foreign, seed=2, family="gpt2")) * 2:
        output = model.generate(**ids, max_new_tokens=30, do_sample=False, **assistgen.speculate({"method": "draft_model", "model": draft}),
                                tokenizer=tokenizer, assistant_tokenizer=foreign, return_dict_in_generate=True)  # fmt: skip
        assert torch.equal(plain, output.sequences) and not output.speculation.fallbacks


@pytest.mark.exactness
def test_transformers_own_arguments_and_what_is_for_the_target_only(pair):
    """Bans and biases of the target's ids, some beyond the draft's vocabulary, never reach the draft."""
    tokenizer, foreign = pair
    model, draft = Sayer(tokenizer), Sayer(foreign, seed=1)
    ids = inputs_of(tokenizer, 1)
    for more in (
        {"bad_words_ids": [[len(tokenizer) - 1], [5, 6]]},
        {"suppress_tokens": [len(tokenizer) - 2]},
        {"sequence_bias": [[[len(tokenizer) - 1], -5.0]]},
        {"stop_strings": ["golf"]},
        {"repetition_penalty": 1.2},
    ):
        settings = more | {"max_new_tokens": 20, "do_sample": False, "tokenizer": tokenizer, "return_dict_in_generate": True}
        plain = model.generate(**ids, **settings)
        output = assistgen.generate(model, **ids, **settings, assistant_model=draft, assistant_tokenizer=foreign, num_assistant_tokens=5)
        assert torch.equal(plain.sequences, output.sequences)
        assert output.speculation.drafters["draft_model"].route is not None and not output.speculation.fallbacks


def test_tokenizers_of_one_size_are_told_apart_and_foreign_ones_refused(pair):
    tokenizer, foreign = pair
    turned = json.loads(tokenizer.backend_tokenizer.to_str())
    ids = turned["model"]["vocab"]
    turned["model"]["vocab"] = {token: (number if number < 2 else 2 + (number - 1) % (len(ids) - 2)) for token, number in ids.items()}
    turned = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(turned)), eos_token="</s>")
    assert len(turned) == len(tokenizer) and not same_vocabulary(tokenizer, turned)
    model = Sayer(tokenizer)
    model.register_forward_pre_hook(lambda *arguments: pytest.fail("a forward pass"))
    for other in (foreign, turned):
        with pytest.raises(ValueError, match="`use_heterogeneous_vocab=False`"):
            assistgen.generate(
                model, **inputs_of(tokenizer, 1), tokenizer=tokenizer, assistant_tokenizer=other, max_new_tokens=4,
                speculation={"method": "draft_model", "model": Sayer(other), "use_heterogeneous_vocab": False},
            )  # fmt: skip


def letters(vocabulary):
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate("?" + vocabulary)}, merges=[], unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_statistics_of_the_vocabulary_route(rule):
    """
    Of the target's nine letters the draft has six, in another order: the joint histogram of the second and third token over 6,000 rows
    a side, by `assert_same_distribution`.
    """
    ours, theirs = letters("abcdefghi"), letters("xigecay")
    model = build("llama", vocab_size=10, seed=3, initializer_range=0.15, dtype=torch.float32)
    draft = build("llama", vocab_size=8, seed=5, initializer_range=0.3, dtype=torch.float32)
    ids = torch.tensor([[2, 3, 4, 5, 6]])
    settings = {"do_sample": True, "temperature": 0.9, "top_k": 0, "max_new_tokens": 4, "num_return_sequences": 250}
    speculator = assistgen.Speculator(
        {"method": "draft_model", "model": draft, "depth": "constant", "num_speculative_tokens": 2,
         "draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    )  # fmt: skip
    counts, accepted = torch.zeros(2, 100), 0
    torch.manual_seed(5)
    for _ in range(24):
        output = assistgen.generate(model, ids, **settings, speculation=speculator, return_dict_in_generate=True, tokenizer=ours,
                                    assistant_tokenizer=theirs)  # fmt: skip
        accepted += output.speculation.num_accepted_tokens
        assert output.speculation.drafters["draft_model"].route == "vocabulary"
        for side, sequences in enumerate((model.generate(ids, **settings), output.sequences)):
            for a, b in sequences[:, 6:8].tolist():
                counts[side, a * 10 + b] += 1
    assert accepted > 500
    assert_same_distribution(counts)


@pytest.mark.exactness
def test_images_never_reach_a_foreign_draft():
    family = FAMILIES["llava"]
    alphabet = "".join(chr(48 + i) for i in range(79))
    tokenizer, foreign = letters(alphabet), letters(alphabet[::-1][:60])
    model, draft = family.build(), build("llama", vocab_size=61)
    seen = []
    draft.get_input_embeddings().register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    inputs = family.inputs(1)
    plain = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    output = assistgen.generate(
        model, **inputs, max_new_tokens=6, do_sample=False, tokenizer=tokenizer, assistant_tokenizer=foreign, return_dict_in_generate=True,
        speculation={"method": "draft_model", "model": draft, "depth": "constant", "num_speculative_tokens": 3},
    )  # fmt: skip
    assert torch.equal(plain, output.sequences) and not output.speculation.fallbacks
    assert output.speculation.num_draft_tokens > 0
    assert seen[0].shape[1] == inputs["input_ids"].shape[1] - 4


@pytest.mark.parametrize("sampled", [False, True])
def test_the_generator_in_transformers_own_loop(pair, sampled, monkeypatch):
    tokenizer, foreign = pair
    model, draft = Sayer(tokenizer), Sayer(foreign, seed=1)
    ids = inputs_of(tokenizer, 1)["input_ids"]
    settings = {"max_new_tokens": 30, "do_sample": sampled, "temperature": 0.3 if sampled else None}
    drafted = []

    class Watched(assistgen.UniversalCandidateGenerator):
        def get_candidates(self, input_ids, **kwargs):
            candidates, logits = super().get_candidates(input_ids, **kwargs)
            drafted.append((candidates.shape[1] - input_ids.shape[1], logits is not None))
            return candidates, logits

    config = model.generation_config if sampled else None
    generator = Watched(draft, len(tokenizer) + 3, tokenizer, foreign, generation_config=config, max_length=ids.shape[1] + 30)
    model._get_candidate_generator = lambda **kwargs: generator
    output = model.generate(ids, **settings, prompt_lookup_num_tokens=5)
    assert any(number > 0 and drawn == sampled for number, drawn in drafted)
    if not sampled:
        del model._get_candidate_generator
        assert torch.equal(output, model.generate(ids, **settings))
    with pytest.raises(ValueError, match="use_heterogeneous_vocab"):
        assistgen.UniversalCandidateGenerator(draft, 10, tokenizer, foreign, use_heterogeneous_vocab=False)


def test_tokenizers_stay_as_they_are_and_their_switches_do_no_harm(pair):
    tokenizer, foreign = pair
    model, draft = Sayer(tokenizer), Sayer(foreign, seed=1)
    ids = inputs_of(tokenizer, 1)
    for one in (tokenizer, foreign):
        one.pad_token = one.eos_token
        one(["alpha bravo", "alpha"], padding=True, truncation=True, max_length=3)
        assert one.backend_tokenizer.truncation and one.backend_tokenizer.padding
    states = [one.backend_tokenizer.to_str() for one in (tokenizer, foreign)]
    output = assistgen.generate(
        model, **ids, max_new_tokens=30, do_sample=False, return_dict_in_generate=True, tokenizer=tokenizer, assistant_tokenizer=foreign,
        speculation={"method": "draft_model", "model": draft, "depth": "constant", "num_speculative_tokens": 6},
    )  # fmt: skip
    assert output.speculation.num_accepted_tokens > 12 and output.speculation.drafters["draft_model"].route == "text"
    assert states == [one.backend_tokenizer.to_str() for one in (tokenizer, foreign)]
    for one in (tokenizer, foreign):
        one.backend_tokenizer.no_truncation()
        one.backend_tokenizer.no_padding()


@pytest.mark.parametrize(
    ("speculation", "more", "message"),
    [
        ({"method": "ngram", "use_heterogeneous_vocab": True}, {}, "`use_heterogeneous_vocab`"),
        ("ngram", {"assistant_tokenizer": "any"}, "`assistant_tokenizer` is for a draft model"),
        ({"drafters": [{"method": "ngram", "lookup_ids": [5]}]}, {}, "`lookup_ids` goes beside"),
        ({"drafters": ["ngram"], "assistant_early_exit": 1}, {}, "`assistant_early_exit`"),
        ("model", {"assistant_tokenizer": "any"}, "`assistant_tokenizer` needs"),
        ("vocabulary", {}, "`use_heterogeneous_vocab=True` needs"),
        ("model", {"tokenizer": "ours", "assistant_tokenizer": "word pieces"}, "aren't text"),
    ],
)
def test_what_goes_together(pair, speculation, more, message):
    model = Sayer(pair[0])
    model.register_forward_pre_hook(lambda *arguments: pytest.fail("a forward pass"))
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "al": 1, "##pha": 2}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()
    known = {"any": pair[1], "ours": pair[0], "word pieces": PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]")}
    named = {"model": {"method": "draft_model", "model": Sayer(pair[1])}}
    named["vocabulary"] = named["model"] | {"use_heterogeneous_vocab": True}
    with pytest.raises(ValueError, match=message):
        assistgen.generate(
            model, **inputs_of(pair[0], 1), max_new_tokens=4,
            speculation=named.get(speculation, speculation) if isinstance(speculation, str) else speculation,
            **{name: known[value] for name, value in more.items()},
        )  # fmt: skip
