"""SmolLM2-135M in float32: the truth on real text."""

import pytest
import torch

import assistgen
from assistgen import compat, identity
from assistgen.streaming import IncrementalText


pytestmark = [pytest.mark.weights, pytest.mark.exactness]

CODE = "def area(w, h):\n    return w * h\n\ndef volume(w, h, d):\n    return w * h * d\n"
NOTE = "The meeting moved from Tuesday 10:00 to Thursday 14:30. Room B12 is too small, so we meet in the library on the second floor."
PROMPTS = {
    "copy": [f"Repeat word for word: {NOTE}", f"Copy this code:\n{CODE}", "Repeat this list: red, green, blue, red, green, blue",
             'Repeat this JSON: {"name": "Ada", "born": 1815, "city": "London"}'],
    "edit": [f"Rename w to width:\n{CODE}", f"Add a docstring to each function:\n{CODE}", f"Correct the spelling: {NOTE}",
             "Replace Paris by Rome: I live in Paris. Paris is big. I love Paris."],
    "question": [f"When is the meeting? {NOTE}", "What is the capital of France?", "How many legs does a spider have?",
                 f"What does this code do?\n{CODE}"],
    "open": ["Tell me about the sea.", "Write a poem about autumn.", "Why is the sky blue?", "Give me three tips for running."],
    "multilingual": ["Translate to French: the cat sleeps.", "Écris une phrase sur l'été.", "写一个关于猫的句子。",
                     "Напиши слово «дом» три раза."],
}  # fmt: skip


def chat(tokenizer, text, **kwargs):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True, **kwargs
    )


@pytest.mark.parametrize("kind", PROMPTS)
def test_identity(smollm, kind):
    model, tokenizer = smollm
    accepted = 0
    for text in PROMPTS[kind]:
        inputs = chat(tokenizer, text)
        plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        fast = assistgen.generate(
            model, **inputs, max_new_tokens=40, do_sample=False, return_dict_in_generate=True,
            speculation={"method": "ngram", "depth": "constant"},
        )  # fmt: skip
        comparison = identity.compare(model, plain[0], fast.sequences[0])
        assert comparison.identical or comparison.proven_tie, (text, str(comparison))
        accepted += fast.speculation.num_accepted_tokens
    assert accepted > 0


def test_batch_of_eight(smollm):
    model, tokenizer = smollm
    tokenizer.padding_side = "left"
    texts = [text for texts in PROMPTS.values() for text in texts][::3] + PROMPTS["copy"][:1]
    messages = [[{"role": "user", "content": text}] for text in texts[:8]]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True)
    plain = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    fast = assistgen.generate(
        model, **inputs, max_new_tokens=32, do_sample=False, return_dict_in_generate=True,
        speculation={"method": "ngram", "depth": "constant"},
    )  # fmt: skip
    for row in range(8):
        # The comparison's forward knows no padding, so it sees the row without it.
        start = int((inputs["attention_mask"][row] == 0).sum())
        comparison = identity.compare(model, plain[row, start:], fast.sequences[row, start:])
        assert comparison.identical or comparison.proven_tie, str(comparison)
    assert fast.speculation.num_accepted_tokens > 0
    assert not fast.speculation.fallbacks


def test_chat_of_five_turns(smollm):
    """A kept cache gives the same chat as none, and the prompt isn't fed again."""
    model, tokenizer = smollm
    turns = [f"Remember this: {NOTE}", "Repeat it word for word.", "When do we meet?", "Repeat it again.", "Where do we meet?"]
    ids = torch.empty(1, 0, dtype=torch.long)
    kept = None
    fed = []
    handle = model.register_forward_pre_hook(lambda m, a, kw: fed.append(kw["input_ids"].shape[1]), with_kwargs=True)
    accepted = 0
    for turn in turns:
        question = chat(tokenizer, turn)["input_ids"]
        ids = torch.cat([ids, question], dim=1)
        fed.clear()
        output = assistgen.generate(
            model, ids, max_new_tokens=32, do_sample=False, return_dict_in_generate=True, **{compat.CACHE: kept},
            speculation={"method": "ngram", "depth": "constant"},
        )  # fmt: skip
        assert fed[0] <= question.shape[1] + 1 if kept is not None else fed[0] == ids.shape[1]
        plain = model.generate(ids, max_new_tokens=32, do_sample=False)
        comparison = identity.compare(model, plain[0], output.sequences[0])
        assert comparison.identical or comparison.proven_tie, str(comparison)
        accepted += output.speculation.num_accepted_tokens
        ids, kept = output.sequences, getattr(output, compat.CACHE)
    handle.remove()
    assert accepted > 20


def test_sampled_text_is_the_same(smollm):
    model, tokenizer = smollm
    inputs = chat(tokenizer, PROMPTS["copy"][0])
    accepted = 0
    for seed in range(4):
        kwargs = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 32}
        torch.manual_seed(seed)
        plain = model.generate(**inputs, **kwargs)
        torch.manual_seed(seed)
        fast = assistgen.generate(
            model, **inputs, **kwargs, return_dict_in_generate=True, speculation={"method": "ngram", "depth": "constant"}
        )
        assert torch.equal(plain, fast.sequences)
        accepted += fast.speculation.num_accepted_tokens
    assert accepted > 0


@pytest.mark.parametrize("text", ["naïve café — 東京 🎉👩‍👩‍👧 done", "  two  spaces\n\ttab\n", "<|im_start|>x<|im_end|>", "éééé", ""])
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_joined_are_the_whole(smollm, text, skip):
    _, tokenizer = smollm
    ids = tokenizer(text)["input_ids"]
    incremental = IncrementalText(tokenizer, skip_special_tokens=skip)
    pieces = [incremental.push([token]) for token in ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + incremental.end() == tokenizer.decode(ids, skip_special_tokens=skip)
