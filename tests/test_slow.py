"""What needs Gemma or the Qwen pair: `make test-slow`."""

import copy
import random
from functools import lru_cache

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import assistgen
from assistgen import identity, weights

from .test_real_models import CODE, NOTE, chat
from .test_universal import CORPUS, TEXTS, byte_level, play, sentence_piece


pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

DICT = {"do_sample": False, "return_dict_in_generate": True}


def assert_same(model, inputs, plain, fast):
    """Row by row, without the padding that the comparison's own forward doesn't know."""
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    for row in range(len(plain)):
        start = int((mask[row] == 0).sum())
        comparison = identity.compare(model, plain[row, start:], fast[row, start:])
        assert comparison.identical or comparison.proven_tie, str(comparison)


@pytest.fixture(scope="module")
def gemma():
    return weights.load("gemma-3-270m", torch.float32)


@pytest.mark.parametrize("rows", [1, 8])
def test_gemma_beyond_its_window(gemma, rows):
    """Mixed layers with a window of 512, prompts longer than that, each row at its own pace."""
    model, tokenizer = gemma
    assert model.config.sliding_window == 512
    lines = [f"Item {n}: the {('red', 'green', 'blue')[n % 3]} box holds {n * 7 % 31} coins." for n in range(60)]
    texts = ["\n".join(lines[: 36 + row]) + "\n" + "\n".join(lines[: 3 + row]) + "\nItem" for row in range(rows)]
    ids = [[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]
    width = max(map(len, ids))
    inputs = {
        "input_ids": torch.tensor([[tokenizer.pad_token_id or 0] * (width - len(row)) + row for row in ids]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids]),
    }
    assert min(map(len, ids)) > 540
    plain = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    fast = assistgen.generate(model, **inputs, max_new_tokens=48, **DICT, speculation={"method": "ngram", "depth": "constant"})
    assert_same(model, inputs, plain, fast.sequences)
    assert fast.speculation.num_accepted_tokens > 10 * rows
    assert not fast.speculation.fallbacks


def nf4(name, dtype):
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(weights.locate(name), dtype=dtype, quantization_config=config).eval()


@pytest.fixture(scope="module")
def qwen():
    target, tokenizer = weights.load("qwen2.5-coder-1.5b", torch.float32)
    draft, _ = weights.load("qwen2.5-coder-0.5b", torch.float32)
    tokenizer.padding_side = "left"
    return target, draft, tokenizer


def batch(tokenizer, rows):
    texts = [f"Add type hints:\n{CODE}", f"Shorten: {NOTE}", "Write a haiku about rain.", "List the primes below 20."][:rows]
    if rows == 1:
        return dict(chat(tokenizer, texts[0]))
    messages = [[{"role": "user", "content": text}] for text in texts]
    return dict(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("pair", ["plain", "nf4 draft", "nf4 target", "padded"])
def test_qwen_pair(qwen, pair, rows):
    target, draft, tokenizer = qwen
    if pair == "nf4 draft":
        draft = nf4("qwen2.5-coder-0.5b", torch.float32)
    elif pair == "nf4 target":
        target = nf4("qwen2.5-coder-1.5b", torch.float32)
    elif pair == "padded":
        draft = copy.deepcopy(draft)
        draft.resize_token_embeddings(target.config.vocab_size + 128, mean_resizing=False)
    inputs = batch(tokenizer, rows)
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    fast = assistgen.generate(
        target, **inputs, max_new_tokens=24, **DICT,
        speculation={"method": "draft_model", "model": draft, "num_speculative_tokens": 5, "depth": "constant"},
    )  # fmt: skip
    assert_same(target, inputs, plain, fast.sequences)
    assert fast.speculation.num_accepted_tokens > 8 * rows
    assert not fast.speculation.fallbacks


@pytest.mark.parametrize("rows", [1, 4])
def test_4_bit_targets_in_fixed_shapes(rows):
    pytest.importorskip("bitsandbytes")
    _, tokenizer = weights.load("smollm2-135m", torch.float32)
    tokenizer.padding_side = "left"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        weights.locate("smollm2-135m"),
        dtype=torch.float32,
        quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True),
    ).eval()
    inputs = batch(tokenizer, rows)
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    fast = assistgen.generate(
        model, **inputs, max_new_tokens=24, **DICT, speculation={"method": "ngram", "depth": "constant", "compile": True}
    )
    assert_same(model, inputs, plain, fast.sequences)
    assert fast.speculation.num_accepted_tokens > 2 * rows and not fast.speculation.fallbacks
    assert fast.speculation.num_captures > 0


FOREIGN = [
    ("qwen2.5-coder-1.5b", "smollm2-135m", None),
    ("qwen2.5-coder-1.5b", "smollm2-135m", True),
    ("qwen2.5-coder-1.5b", "gemma-3-270m", None),
    ("gemma-3-270m", "smollm2-135m", None),
    ("smollm2-135m", "qwen2.5-coder-0.5b", None),
    ("smollm2-135m", "qwen2.5-coder-0.5b", True),
]


@pytest.fixture(scope="module")
def loaded():
    return lru_cache(lambda name: weights.load(name, torch.float32))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("target", "draft", "by_vocabulary"), FOREIGN)
def test_a_draft_with_a_foreign_tokenizer(loaded, target, draft, by_vocabulary, rows):
    model, tokenizer = loaded(target)
    drafting, foreign = loaded(draft)
    tokenizer.padding_side = "left"
    if tokenizer.chat_template:
        inputs = batch(tokenizer, rows)
    else:  # Gemma is no chat model, and its tokenizer needs to be told of the BOS
        texts = [f"<bos>{text}" for text in ("1, 2, 3, 4, 5, 6,", NOTE, CODE, "The capital of France is Paris. The capital of Italy is")]
        inputs = dict(tokenizer(texts[:rows], return_tensors="pt", padding=True, add_special_tokens=False))
        inputs.pop("token_type_ids", None)
    before = [parameter.clone() for parameter in drafting.parameters()]
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    fast = assistgen.generate(
        model, **inputs, max_new_tokens=24, **DICT,
        speculation={"method": "draft_model", "model": drafting, "num_speculative_tokens": 5, "depth": "constant",
                     "use_heterogeneous_vocab": by_vocabulary},
    )  # fmt: skip
    assert_same(model, inputs, plain, fast.sequences)
    stats = fast.speculation
    assert stats.num_accepted_tokens > 4 * rows and not stats.fallbacks
    assert stats.drafters["draft_model"].route == ("vocabulary" if by_vocabulary else "text")
    assert all(torch.equal(one, other) for one, other in zip(before, drafting.parameters(), strict=True))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("way", ["early exit", "nf4 twin"])
def test_a_model_drafts_for_itself(loaded, way, rows):
    model, tokenizer = loaded("smollm2-135m")
    tokenizer.padding_side = "left"
    if way == "nf4 twin":
        pytest.importorskip("bitsandbytes")
        speculation = {"method": "draft_model", "model": assistgen.nf4_twin(model)}
    else:
        speculation = {"method": "early_exit", "assistant_early_exit": 29}
    inputs = batch(tokenizer, rows)
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    fast = assistgen.generate(
        model, **inputs, max_new_tokens=24, **DICT, speculation=speculation | {"num_speculative_tokens": 4, "depth": "constant"}
    )
    assert_same(model, inputs, plain, fast.sequences)
    assert fast.speculation.num_accepted_tokens > 2 * rows and not fast.speculation.fallbacks


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, seed=st.integers(0, 1000), way=st.permutations(range(5)))
def test_real_vocabularies_say_the_same_bytes(text, seed, way):
    names = ("qwen2.5-coder-1.5b", "smollm2-135m", "gemma-3-270m")
    tokenizers = [*(real_tokenizer(name) for name in names), *small_tokenizers()]
    play(tokenizers[way[0]], tokenizers[way[1]], text, random.Random(seed), wrong=0.3)


@pytest.mark.parametrize(("target", "draft"), [(a, b) for a in range(5) for b in range(5) if a != b and min(a, b) < 3])
def test_nothing_drifts_between_real_vocabularies(target, draft):
    names = ("qwen2.5-coder-1.5b", "smollm2-135m", "gemma-3-270m")
    tokenizers = [*(real_tokenizer(name) for name in names), *small_tokenizers()]
    rng, rounds, drafted, accepted = random.Random(1), 0, 0, 0
    while rounds < 2000:
        text = " ".join(rng.choice(CORPUS) for _ in range(40))
        one, other, more = play(tokenizers[target], tokenizers[draft], text, rng)
        drafted, accepted, rounds = drafted + one, accepted + other, rounds + more
    assert accepted > 0.8 * drafted


@lru_cache
def real_tokenizer(name):
    return transformers.AutoTokenizer.from_pretrained(weights.locate(name))


@lru_cache
def small_tokenizers():
    return byte_level(), sentence_piece()
