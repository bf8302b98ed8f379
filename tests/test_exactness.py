"""The accelerated call against plain `generate()` with the same arguments, in float64: every family, cache and way of calling."""

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import assistgen
from assistgen import compat

from .oracles import OracleGenerator, OracleSpeculator, constant
from .tiny import FAMILIES, build, changing, pad_left, prompt


pytestmark = pytest.mark.exactness

NEW = 32
DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def both(model, inputs, speculation, **kwargs):
    """Plain and accelerated; `speculation="oracle"` drafts what plain decoding said."""
    plain = model.generate(**inputs, **kwargs, return_dict_in_generate=True)
    if speculation == "oracle":
        speculation = oracle(plain.sequences, inputs["input_ids"].shape[1])
    fast = assistgen.generate(model, **inputs, **kwargs, speculation=speculation, return_dict_in_generate=True)
    return plain, fast


def oracle(sequences, prompt_length):
    return OracleSpeculator(sequences[:, prompt_length:].tolist())


def assert_speculated(output):
    stats = output.speculation
    assert stats.num_accepted_tokens > 0
    assert not stats.fallbacks
    assert stats.target_forwards < stats.num_tokens


def kwargs_of(cache, family):
    if cache == "static":
        return {"cache_implementation": "static"}
    return {}


def ways(way, model):
    """Inputs and arguments of one way of calling; `None` where the cell makes no sense."""
    if way == "one row":
        return {"input_ids": prompt(24, period=5)}, {"do_sample": False}
    if way == "ragged batch":
        return pad_left([prompt(24, 1, 5), prompt(9, 2, 3), prompt(17, 3, 4)]), {"do_sample": False}
    if way == "several return sequences":
        return {"input_ids": prompt(24, period=5)}, {"do_sample": True, "num_return_sequences": 3, "temperature": 1e-4}
    if way == "sampled":
        return {"input_ids": prompt(24, period=5)}, {"do_sample": True, "temperature": 0.05}
    raise KeyError(way)


@pytest.mark.parametrize("way", ["one row", "ragged batch", "several return sequences", "sampled"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_cache_way(family, cache, way):
    model = build(family)
    inputs, kwargs = ways(way, model)
    kwargs |= kwargs_of(cache, family) | {"max_new_tokens": NEW}
    if cache == "static" and family in ("mistral", "gemma3"):
        # Static sliding-window layers can't go back once they pass the window: decoded plainly, with the reason.
        torch.manual_seed(7)
        plain = model.generate(**inputs, **kwargs)
        torch.manual_seed(7)
        fast = assistgen.generate(model, **inputs, **kwargs, speculation=constant(), return_dict_in_generate=True)
        assert torch.equal(plain, fast.sequences)
        assert "static sliding-window" in next(iter(fast.speculation.fallbacks))
        return
    torch.manual_seed(7)
    plain = model.generate(**inputs, **kwargs, **DICT)
    torch.manual_seed(7)
    fast = assistgen.generate(model, **inputs, **kwargs, **DICT, speculation=oracle(plain.sequences, inputs["input_ids"].shape[1]))
    assert torch.equal(plain.sequences, fast.sequences)
    assert_speculated(fast)
    for p, f in zip(plain.scores, fast.scores, strict=True):
        torch.testing.assert_close(p, f, atol=1e-3, rtol=1e-3)
    assert cache_length(plain) == cache_length(fast)


def cache_length(output):
    return compat.length_of(getattr(output, compat.CACHE))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "full layers"])
def test_second_turn_on_a_kept_cache(family, cache):
    from transformers import DynamicCache

    model = build(family)
    first = prompt(24, period=5)
    outputs = []
    for speculates in (False, True):
        speculation = None
        handed_in = {compat.CACHE: DynamicCache()} if cache == "full layers" else {}
        turn = assistgen.generate(
            model, first, speculation=speculation, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **handed_in
        )
        kept = getattr(turn, compat.CACHE)
        if speculates:
            speculation = oracle(outputs[0][0].sequences, 46)
        second = torch.cat([turn.sequences, prompt(10, seed=5, period=4)], dim=1)
        fed = count_tokens(model)
        turn = assistgen.generate(
            model, second, speculation=speculation, max_new_tokens=NEW, do_sample=False, **{compat.CACHE: kept}, **DICT
        )
        fed.remove()
        assert getattr(turn, compat.CACHE) is kept
        outputs.append((turn, compat.length_of(kept), fed.total))
    (plain, plain_length, _), (fast, fast_length, total) = outputs
    assert torch.equal(plain.sequences, fast.sequences)
    assert plain_length == fast_length
    assert fast.speculation.num_accepted_tokens > 0
    for p, f in zip(plain.scores, fast.scores, strict=True):
        torch.testing.assert_close(p, f, atol=1e-3, rtol=1e-3)
    # Eleven new tokens of context (the last of turn one was never cached), then the verified ones: the prompt isn't fed again.
    stats = fast.speculation
    assert total == 11 + stats.num_draft_tokens + stats.target_forwards - 1


class count_tokens:
    """Tokens that reach the target."""

    def __init__(self, model):
        self.total = 0
        self._handle = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        self.total += kwargs["input_ids"].numel()

    def remove(self):
        self._handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_second_turn_of_a_batch(family):
    """Rows end at different lengths; the returned cache continues as plain generate's does."""
    model = build(family)
    inputs = pad_left([prompt(24, 1, 5), prompt(9, 2, 3), prompt(17, 3, 4)])
    ends = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, 24 + 6].item()
    follow = torch.cat([prompt(6, seed=n) for n in (11, 12, 13)])
    results = []
    for speculates in (False, True):
        kwargs = {"do_sample": False, "return_dict_in_generate": True, "speculation": None}
        if speculates:
            kwargs["speculation"] = oracle(results[0][0].sequences, 24)
        turn = assistgen.generate(model, **inputs, max_new_tokens=20, eos_token_id=ends, **kwargs)
        mask = torch.cat([inputs["attention_mask"], (turn.sequences[:, 24:] != 0).long(), torch.ones_like(follow)], dim=1)
        ids = torch.cat([turn.sequences, follow], dim=1)
        kept = {compat.CACHE: getattr(turn, compat.CACHE)}
        if speculates:
            kwargs["speculation"] = oracle(results[0][1].sequences, ids.shape[1])
        second = assistgen.generate(model, ids, attention_mask=mask, max_new_tokens=20, **kept, **kwargs)
        results.append((turn, second))
    (plain1, plain2), (fast1, fast2) = results
    assert torch.equal(plain1.sequences, fast1.sequences)
    assert torch.equal(plain2.sequences, fast2.sequences)
    assert_speculated(fast1)
    assert not fast2.speculation.fallbacks
    assert cache_length(plain2) == cache_length(fast2)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_row_accepts_all_and_the_next_nothing(family):
    model = build(family)
    inputs = pad_left([prompt(12, 1), prompt(7, 2), prompt(10, 3)])
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    truth = plain[:, 12:].tolist()
    speculator = OracleSpeculator([truth[0], None, truth[2]])
    fast = assistgen.generate(model, **inputs, max_new_tokens=NEW, do_sample=False, speculation=speculator, return_dict_in_generate=True)
    assert torch.equal(plain, fast.sequences)
    first, second, third = fast.speculation.rows
    assert first.num_accepted_tokens == first.num_draft_tokens > 20
    assert third.num_accepted_tokens == third.num_draft_tokens > 20
    assert second.num_draft_tokens > 20
    assert second.num_accepted_tokens <= 3  # a wrong draft may be right by chance
    assert [row.num_tokens for row in fast.speculation.rows] == [NEW] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_finished_rows_stop_costing(family):
    model = build(family)
    inputs = pad_left([prompt(12, 1), prompt(7, 2)])
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    ends = plain[0, 12 + 3].item()
    if ends in plain[1, 12:].tolist():
        pytest.skip("the token ends both rows")
    widths = []
    handle = model.register_forward_pre_hook(lambda m, a, kw: widths.append(len(kw["input_ids"])), with_kwargs=True)
    fast = assistgen.generate(model, **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=ends, speculation=constant())
    handle.remove()
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=ends), fast)
    assert widths[-1] == 1


class RowIndependentStop(StoppingCriteria):
    row_independent = True

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.shape[0] == 1 or not self.row_independent
        return torch.tensor([int(row[-1]) in self.ids for row in input_ids])


class Favour(LogitsProcessor):
    """Depends on the prefix's length: shows if a row sees another row's prefix."""

    row_independent = True

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, (input_ids.shape[1] * 7 + int(input_ids.sum()) % 3) % scores.shape[1]] += 2.0
        return scores


def test_row_independent_processors_and_criteria_in_a_batch():
    """Without an end-of-sequence token plain generate() lets a stopped row talk on until the last one stops."""
    model = build()
    inputs = pad_left([prompt(24, 1, 5), prompt(9, 2, 3), prompt(17, 3, 4)])
    for seed in range(12):
        stop = RowIndependentStop({(seed * 13 + n * 29) % 78 + 2 for n in range(4)})
        kwargs = {"max_new_tokens": NEW, "do_sample": False, "stopping_criteria": [stop]}
        stop.row_independent = False
        plain = model.generate(**inputs, **kwargs)
        stop.row_independent = True
        fast = assistgen.generate(model, **inputs, **kwargs, speculation=oracle(plain, 24), return_dict_in_generate=True)
        assert torch.equal(plain, fast.sequences)
        assert fast.speculation.num_accepted_tokens > 0
        assert not fast.speculation.fallbacks

    fast = assistgen.generate(
        model, **inputs, max_new_tokens=NEW, do_sample=False, logits_processor=[Favour()], speculation=constant(),
        return_dict_in_generate=True,
    )  # fmt: skip
    assert not fast.speculation.fallbacks
    for row in range(3):  # sum of the prefix's ids includes no padding, so a row alone sees the same
        alone = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        plain = model.generate(**alone, max_new_tokens=NEW, do_sample=False, logits_processor=[Favour()])
        assert torch.equal(plain[0], fast.sequences[row])


def test_unmarked_processors_and_criteria_decode_a_batch_plainly():
    model = build()
    inputs = pad_left([prompt(24, 1, 5), prompt(9, 2, 3)])

    class Unmarked(Favour):
        row_independent = False

    for extra in ({"logits_processor": [Unmarked()]}, {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]}):
        plain, fast = both(model, inputs, constant(), max_new_tokens=NEW, do_sample=False, **extra)
        assert torch.equal(plain.sequences, fast.sequences)
        assert "row_independent" in next(iter(fast.speculation.fallbacks))
        assert fast.speculation.num_tokens == 2 * NEW
        assert fast.speculation.target_forwards == NEW


ROW_INDEXED = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(2 + batch * 10, 60 + batch * 5))},
    "sequence_bias": {"sequence_bias": [[[5, 6], 4.0], [[9], 3.0]]},
    "bad_words_ids": {"bad_words_ids": [[7], [8, 9], [10, 11, 12]]},
    "suppress_tokens": {"suppress_tokens": [4, 5, 6, 30, 31]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 3},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(2, 30))},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "several eos": {"eos_token_id": [5, 9, 33, 40]},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ROW_INDEXED)
def test_processors_of_the_configuration(name, rows):
    model = build("qwen2", seed=3)
    prompts = [prompt(24, 1, 5), prompt(9, 2, 3), prompt(17, 3, 4)][:rows]
    inputs = pad_left(prompts)
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **ROW_INDEXED[name], **DICT)
    truth = [row[inputs["input_ids"].shape[1] :].tolist() for row in plain.sequences]
    fast = assistgen.generate(
        model, **inputs, max_new_tokens=NEW, do_sample=False, **ROW_INDEXED[name], **DICT, speculation=OracleSpeculator(truth)
    )
    assert torch.equal(plain.sequences, fast.sequences)
    if plain.sequences.shape[1] > inputs["input_ids"].shape[1] + 2:
        assert fast.speculation.num_accepted_tokens > 0
    assert not fast.speculation.fallbacks


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_chunks(family):
    model = build(family)
    plain, fast = both(model, {"input_ids": prompt(40, period=6)}, "oracle", max_new_tokens=NEW, do_sample=False, prefill_chunk_size=16)
    assert torch.equal(plain.sequences, fast.sequences)
    assert fast.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_a_recurrent_model_is_decoded_plainly_with_the_reason(rows):
    model = build("mamba")
    inputs = {"input_ids": torch.cat([prompt(20, n, 4) for n in range(rows)])}
    plain, fast = both(model, inputs, constant(), max_new_tokens=12, do_sample=False)
    assert torch.equal(plain.sequences, fast.sequences)
    assert fast.speculation.fallbacks
    assert fast.speculation.num_drafts == 0


def test_positions_end_where_the_model_ends():
    """GPT-2's learned positions: a draft across the end would index past the table."""
    model = build("gpt2", n_positions=48)
    ids = prompt(20, period=4)
    plain = model.generate(ids, max_length=48, do_sample=False, **DICT)
    generator = OracleGenerator(plain.sequences, depth=10)
    fast = assistgen.generate(model, ids, max_length=48, do_sample=False, speculation=generator, **DICT)
    assert torch.equal(plain.sequences, fast.sequences)
    assert fast.speculation.num_accepted_tokens > 20


RECOMPUTES = compat.CACHE == "cache"
"""Before 5.24 Phi-3 forgets the text where it drops its cache."""


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("length", [20, 38, 39, 40, 41, 60])
def test_a_rotary_embedding_that_changes_once(length, window):
    """Phi-3 drops its cache there. Drafts end before, and begin behind it."""
    model, ids = changing("longrope", sliding_window=window), prompt(length, period=5)
    plain = model.generate(ids, max_new_tokens=40, do_sample=False, **DICT)
    forwards = []
    handle = model.model.register_forward_pre_hook(lambda m, a, kw: forwards.append(kw["input_ids"].shape[1]), with_kwargs=True)
    generator = OracleGenerator(plain.sequences, right=lambda position: position % 7)
    fast = assistgen.generate(model, ids, max_new_tokens=40, do_sample=False, speculation=generator, **DICT)
    handle.remove()
    assert torch.equal(plain.sequences, fast.sequences)
    for p, f in zip(plain.scores, fast.scores, strict=True):
        torch.testing.assert_close(p, f, atol=1e-5, rtol=1e-5)  # recorded in float32
    if not RECOMPUTES:
        assert fast.speculation.fallbacks
        return
    assert fast.speculation.num_accepted_tokens > 20
    assert sum(width >= 20 for width in forwards) == 1 + (length <= 40)  # the prompt, and all when the cache is dropped


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("case", ["row", "padded", "rows", "short"])
def test_a_rotary_embedding_that_changes(kind, case):
    model, new = changing(kind), 12 if case == "short" else 40
    inputs = pad_left([prompt(15, 2), prompt(24, 1)])
    if case == "padded":
        inputs = {name: ids[:1] for name, ids in inputs.items()}
    elif case != "short":
        inputs = {"input_ids": torch.cat([prompt(24, seed, 5) for seed in range(1 + (case == "rows"))])}
    plain, fast = both(model, inputs, "oracle", max_new_tokens=new, do_sample=False)
    assert torch.equal(plain.sequences, fast.sequences)
    if case == "short" or (kind == "longrope" and case == "row" and RECOMPUTES):
        assert_speculated(fast)
    else:
        assert fast.speculation.num_drafts == 0
        assert "rotary" in next(iter(fast.speculation.fallbacks))


@pytest.mark.parametrize("rows", [1, 2])
def test_prompt_tuning(rows):
    """PEFT puts its prompt before what it takes for the prompt, and hands on the last token only."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(dtype=torch.float32), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    inputs = {"input_ids": torch.cat([prompt(24, seed, 5) for seed in range(rows)])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    plain, fast = both(model, inputs, constant(), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(plain.sequences, fast.sequences)
    assert any("prompt learning" in reason for reason in fast.speculation.fallbacks)


@pytest.mark.parametrize("new", range(1, 13))
def test_length_budget(new):
    model = build()
    ids = prompt(12)
    truth = model.generate(ids, max_new_tokens=40, do_sample=False)
    longest = []
    handle = model.register_forward_pre_hook(lambda m, a, kw: longest.append(kw["input_ids"].shape[1]), with_kwargs=True)
    fast = assistgen.generate(model, ids, max_new_tokens=new, do_sample=False, speculation=OracleGenerator(truth))
    handle.remove()
    assert torch.equal(fast, truth[:, : 12 + new])
    assert sum(longest) <= 12 + new  # never a forward past the final length
