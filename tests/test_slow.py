"""What needs Gemma or the Qwen pair: `make test-slow`."""

import copy

import pytest
import torch
import transformers

import assistgen
from assistgen import identity, weights

from .test_real_models import CODE, NOTE, chat


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
