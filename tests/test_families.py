"""Every model family: the accelerated call equals plain `generate()`, speculates where it can, and leaves everything as it was."""

import contextlib
import copy
import dataclasses
import logging
import random
import warnings

import pytest
import torch
import transformers as tf

import assistgen
from assistgen import compat

from .families import FAMILIES, IMAGE_TOKEN, SMALL, _whisper_config
from .oracles import TreeSpeculator
from .tiny import VOCAB, prompt


COLUMNS = ("greedy", "sampled", "batch", "second turn")
NEW = 24
RECURRENT = (
    "qwen3_next qwen3_5 qwen3_5_moe olmo_hybrid kimi_linear bailing_hybrid lara_mini bamba falcon_h1 zaya granite_hybrid nemotron_h mamba2"
)
CANT_DRAFT = [name for name in f"{RECURRENT} lfm2 lfm2_moe lfm3".split() if name in FAMILIES]  # some are newer than 5.17

TAKES_TREES = ("llama", "qwen2", "gpt2", "qwen3", "gpt_neox", "opt", "phi", "mixtral", "lora", "llava")

pytestmark = pytest.mark.exactness


def call(family, model, column, speculation=None):
    """One call of a column, plainly or with speculation."""
    inputs = dict(family.inputs(3 if column == "batch" else 1))
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    if column == "sampled":
        settings |= {"do_sample": True, "temperature": 0.5}
    if column == "second turn":
        first = model.generate(**inputs, do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, prompt(4, 5)], dim=1)
        inputs = inputs | {"decoder_input_ids": longer} if model.config.is_encoder_decoder else {"input_ids": longer}
        inputs[compat.CACHE] = getattr(first, compat.CACHE)
    torch.manual_seed(3)
    if speculation is None:
        return model.generate(**inputs, **settings)
    return assistgen.generate(model, speculation=speculation, **inputs, **settings)


def state_of(model):
    """Everything of a model that a call might change."""
    modules = {
        name: (module.training, len(module._forward_hooks), len(module._forward_pre_hooks), sorted(set(vars(module)) - {"generate"}))
        for name, module in model.named_modules()
    }
    weights = {name: (id(weight), int(weight._version), weight.requires_grad) for name, weight in model.named_parameters()}
    return weights, modules, model.config.to_json_string(), model.generation_config.to_json_string()


@contextlib.contextmanager
def complaints():
    """Warnings and log records of transformers and of ours."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("transformers", "assistgen")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for logger in loggers:
            logger.setLevel(logging.WARNING)
            logger.addHandler(handler)
        try:
            yield said
        finally:
            said += [str(warning.message) for warning in caught]
            for logger, level in zip(loggers, before, strict=True):
                logger.removeHandler(handler)
                logger.setLevel(level)


def check(family, model, column, speculation, draft=None):
    """Compares with plain decoding; returns the statistics."""
    with complaints() as plainly:
        plain = call(family, model, column)
    if draft is not None:
        call(family, draft, "greedy")  # transformers hooks itself into some models at their first forward
    before, draft_before = state_of(model), draft is not None and state_of(draft)
    with complaints() as said:
        fast = call(family, model, column, speculation(plain) if callable(speculation) else speculation)
    assert torch.equal(plain.sequences, fast.sequences)
    assert set(said) <= set(plainly)
    assert state_of(model) == before
    assert draft is None or state_of(draft) == draft_before
    caches = [getattr(output, compat.CACHE, None) for output in (plain, fast)]
    if all(caches):
        assert compat.length_of(caches[0]) == compat.length_of(caches[1])
    return fast.speculation


def assert_speculated(family, column, stats):
    rows = 3 if column == "batch" else 1
    assert stats.num_accepted_tokens > 0 and not stats.fallbacks
    assert stats.target_forwards < NEW and stats.num_tokens == rows * NEW


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", FAMILIES)
def test_draft_free(name, column):
    """The answer is among the texts that are looked up, after something else."""
    family = FAMILIES[name]
    if column in family.without:
        pytest.skip("plain generate() doesn't do that")

    def speculation(plain):
        texts = [[7, 8, 9, *said[:10], 5, *said[10:]] for said in plain.sequences[:, -NEW:].tolist()]
        return {"method": "ngram", "depth": "constant", "num_speculative_tokens": 5, "lookup_ids": texts}

    stats = check(family, family.build(), column, speculation)
    if family.plain:
        assert any(family.plain in reason for reason in stats.fallbacks) and stats.num_accepted_tokens == 0
    else:
        assert_speculated(family, column, stats)
        assert column == "sampled" or stats.num_accepted_tokens < stats.num_draft_tokens  # and rolled back


@pytest.mark.parametrize("column", [column for column in COLUMNS if column != "batch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_trees(name, column, moved):
    """Where the model can be told what each token sees; chains elsewhere."""
    family = FAMILIES[name]
    if column in family.without or family.plain:
        pytest.skip("plain generate() doesn't do that" if column in family.without else "decoded plainly")
    stats = check(family, family.build(), column, lambda plain: TreeSpeculator(plain.sequences[0, -NEW:].tolist()))
    assert_speculated(family, column, stats)
    assert (len(moved) > 3) == (name in TAKES_TREES)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", FAMILIES)
def test_draft_model(name, column):
    """A draft of the family's own kind: the same weights, a little off."""
    family = FAMILIES[name]
    if column in family.without:
        pytest.skip("plain generate() doesn't do that")
    model = family.build()
    draft = model if name == "lora" else family.build()
    speculation = {"method": "draft_model", "model": draft, "depth": "constant", "num_speculative_tokens": 4}
    if name in CANT_DRAFT and not family.plain:
        with pytest.raises(ValueError, match="`model` can't draft: .*can't be rolled back"):
            call(family, model, column, speculation)
        return
    if draft is not model:
        for parameter in list(draft.parameters())[-3:]:
            parameter.add_(torch.randn_like(parameter) * 0.003)
    stats = check(family, model, column, speculation, draft)
    if family.plain:
        assert any(family.plain in reason for reason in stats.fallbacks)
    else:
        assert_speculated(family, column, stats)


def assert_same(model, speculation, inputs, accepted=True, **settings):
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True} | settings
    plain = model.generate(**inputs, **settings)
    fast = assistgen.generate(model, speculation=speculation, **inputs, **settings)
    assert torch.equal(plain.sequences, fast.sequences)
    assert accepted is None or (fast.speculation.num_accepted_tokens > 0) == accepted
    return fast.speculation


DRAFTING = {"method": "draft_model", "depth": "constant", "num_speculative_tokens": 4}


@pytest.mark.parametrize("rows", [1, 3])
def test_a_decoder_shares_the_targets_encoder(rows):
    """Whisper with a decoder-only draft (distil-whisper's way) and BART with one: the target's own decoder, so all is accepted."""
    for name, make in (("whisper", lambda: tf.WhisperForCausalLM(_whisper_config())), ("bart", None)):
        family = FAMILIES[name]
        model = family.build()
        draft = make() if make else tf.BartForCausalLM(copy.deepcopy(model.config))
        draft = draft.to(torch.float64).eval()
        draft.model.decoder.load_state_dict(model.model.decoder.state_dict())
        draft.set_output_embeddings(model.get_output_embeddings())
        stats = assert_same(model, DRAFTING | {"model": draft}, family.inputs(rows))
        assert not stats.fallbacks
        assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3_vl"])
@pytest.mark.parametrize("rows", [1, 3])
def test_images_never_reach_a_draft_that_knows_text_only(name, rows):
    family = FAMILIES[name]
    model = family.build()
    draft = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)).to(torch.float64).eval()
    seen = []
    draft.get_input_embeddings().register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    stats = assert_same(model, DRAFTING | {"model": draft}, family.inputs(rows), accepted=False, max_new_tokens=8)
    assert stats.num_draft_tokens > 0 and not stats.fallbacks
    prompts = family.inputs(rows)["input_ids"]
    assert not bool((seen[0] == IMAGE_TOKEN).any()) and seen[0].shape[1] == prompts.shape[1] - 4


def test_drafts_come_from_the_source_text():
    """A model that copies: its encoder's text, from any place on."""

    class Copying(tf.LogitsProcessor):
        row_independent = True

        def __init__(self, source):
            self.source = source

        def __call__(self, input_ids, scores):
            rows = torch.full_like(scores, -1e3)
            for row in rows:
                row[self.source[min(input_ids.shape[1] - 1, len(self.source) - 1)]] = 0.0
            return rows

    for name in ("t5", "bart"):
        family = FAMILIES[name]
        model, inputs = family.build(), {"input_ids": torch.arange(10, 26)[None]}
        copying = {"logits_processor": [Copying(inputs["input_ids"][0].tolist())], "max_new_tokens": 16}
        for method in ("ngram", "suffix"):
            stats = assert_same(model, {"method": method, "depth": "constant"}, inputs, **copying)
            assert stats.target_forwards < stats.num_tokens / 2
            assert stats.num_accepted_tokens_per_pos[0] > 0
        first = next(
            chunk
            for chunk in assistgen.stream(
                model, _Letters(), **inputs, speculation={"method": "ngram", "depth": "constant"}, do_sample=False, **copying
            )
            if chunk.drafter
        )
        assert first.draft_ids[:2] == inputs["input_ids"][0, 1:3].tolist()


class _Letters:
    def decode(self, ids, **kwargs):
        return "".join(chr(48 + token) for token in ids)


def test_prompts_of_embeddings():
    model = FAMILIES["llama"].build()
    ids = prompt(20, 1, period=5)
    embeddings = {"inputs_embeds": model.get_input_embeddings()(ids)}
    assert_same(model, {"method": "ngram", "depth": "constant", "lookup_ids": ids}, embeddings)
    assert_same(model, DRAFTING | {"model": model, "lookup_ids": ids[0].tolist()}, embeddings)
    with pytest.raises(ValueError, match="`lookup_ids`"):
        assistgen.generate(model, **embeddings, speculation=DRAFTING | {"model": model}, max_new_tokens=4)


@pytest.mark.parametrize(
    ("wrong", "error"), [([5, VOCAB], ValueError), ([[5], [6]], ValueError), ("text", TypeError), ([5, -1], ValueError)]
)
def test_wrong_lookup_ids_are_refused_before_any_forward(wrong, error):
    model = FAMILIES["llama"].build()
    model.register_forward_pre_hook(lambda *arguments: pytest.fail("a forward pass"))
    with pytest.raises(error, match="`lookup_ids`"):
        assistgen.generate(model, prompt(8), speculation={"method": "ngram", "lookup_ids": wrong}, max_new_tokens=4)


def test_an_adapters_base_drafts_for_it():
    """The draft is the model without its adapter, whether it is named by the model with it, or by the base inside."""
    model = FAMILIES["lora"].build()
    ids = prompt(20, 1, period=5)
    for draft in (model, model.get_base_model()):
        chunks = assistgen.stream(model, _Letters(), ids, speculation=DRAFTING | {"model": draft}, max_new_tokens=12, do_sample=False)
        text, compared = ids[0].tolist(), 0
        for chunk in chunks:
            if chunk.drafter:
                with model.disable_adapter():
                    alone = model.generate(torch.tensor([text]), max_new_tokens=len(chunk.draft_ids), do_sample=False)
                assert alone[0, len(text) :].tolist() == chunk.draft_ids
                compared += 1
            text += chunk.token_ids
        assert compared > 3
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        assistgen.generate(model, ids, speculation=DRAFTING | {"model": model}, max_new_tokens=4)


def test_a_draft_on_a_cache_that_goes_on_gets_no_images():
    family = FAMILIES["llava"]
    model = family.build()
    stats = check(family, model, "second turn", DRAFTING | {"model": family.build()})
    assert stats.num_draft_tokens > 0 and not stats.fallbacks


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["opt", "t5", "bart", "gpt_neox", "qwen2_5_vl"])
def test_both_attentions(name, attention):
    """In float32: eager attention makes padded rows NaN in float64, in plain `generate()` too."""
    family = dataclasses.replace(FAMILIES[name], dtype=torch.float32)
    model = family.build()
    model.set_attn_implementation(attention)
    for rows in (1, 3):
        inputs = {key: value.float() if value.is_floating_point() else value for key, value in family.inputs(rows).items()}
        stats = assert_same(model, DRAFTING | {"model": model}, inputs, output_attentions=attention == "eager", output_hidden_states=True)
        assert not stats.fallbacks


class _LastToken(tf.StoppingCriteria):
    row_independent = True

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([int(row[-1]) in self.tokens for row in input_ids])


class _Steps:
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize(
    "name", ["t5", "bart", "whisper", "qwen2_5_vl", "gemma3_vl", "llava", "gpt_neox", "qwen3_next", "bamba", "falcon_h1", "lfm2", "opt"]
)
@pytest.mark.parametrize("seed", range(6))
def test_random_calls(name, seed):
    """Stops, processors, outputs and streams of rows that share the cache's length."""
    family, draw = FAMILIES[name], random.Random(seed)
    model, rows = family.build(), draw.choice([1, 3, 3])
    ids = lambda count: [draw.randrange(2, VOCAB) for _ in range(count)]  # noqa: E731
    settings = {"max_new_tokens": draw.choice([1, 7, 24, 40]), "do_sample": False, "return_dict_in_generate": True}
    settings |= {"output_scores": True, "output_logits": True, "output_hidden_states": draw.random() < 0.5}
    if draw.random() < 0.6:
        settings["eos_token_id"] = ids(draw.choice([1, 6, 16]))
    if draw.random() < 0.3:
        settings["repetition_penalty"] = 1.3
    if draw.random() < 0.3:
        settings["no_repeat_ngram_size"] = 3
    if draw.random() < 0.3:
        settings["bad_words_ids"] = [ids(1), ids(2)]
    criteria = [_LastToken(ids(8))] if draw.random() < 0.5 else []
    inputs = family.inputs(rows)

    def run(function, **more):
        streamer = _Steps() if name != "whisper" else None  # which takes none
        output = function(**inputs, **settings, stopping_criteria=tf.StoppingCriteriaList(criteria), streamer=streamer, **more)
        return output, streamer

    plain, plain_steps = run(model.generate)
    said = [[7, *row[-24:][: draw.randrange(4, 20)], 5, *row[-12:]] for row in plain.sequences.tolist()]
    speculation = {"method": draw.choice(["ngram", "suffix"]), "depth": "constant", "num_speculative_tokens": draw.choice([2, 5, 15]),
                   "lookup_ids": said}  # fmt: skip
    if draw.random() < 0.4 and name not in CANT_DRAFT:
        speculation = DRAFTING | {"model": model if draw.random() < 0.5 else family.build(seed=1)}
    fast, steps = run(lambda **arguments: assistgen.generate(model, speculation=speculation, **arguments))
    assert torch.equal(plain.sequences, fast.sequences)
    assert not fast.speculation.fallbacks
    if steps is not None:
        assert steps.values == plain_steps.values and steps.ended == 1
    start = plain.sequences.shape[1] - len(plain.scores)
    for step, (expected, got) in enumerate(zip(plain.scores, fast.scores, strict=True)):
        live = plain.sequences[:, start + step] != 0
        assert torch.allclose(expected[live].float(), got[live].float(), atol=1e-3, rtol=1e-3)
    if settings["output_hidden_states"]:
        field = "decoder_hidden_states" if model.config.is_encoder_decoder else "hidden_states"
        for step, (expected, got) in enumerate(zip(getattr(plain, field), getattr(fast, field), strict=True)):
            live = plain.sequences[:, start + step] != 0
            for one, other in zip(expected, got, strict=True):
                assert torch.allclose(one[live][:, -1].float(), other[live][:, -1].float(), atol=1e-3)
    assert compat.length_of(getattr(plain, compat.CACHE)) == compat.length_of(getattr(fast, compat.CACHE))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_quantised_cache_is_decoded_plainly(rows):
    model = dataclasses.replace(FAMILIES["llama"], dtype=torch.float32).build()
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    inputs = FAMILIES["llama"].inputs(rows)
    try:
        plain = model.generate(**inputs, **settings)
    except ValueError:
        pytest.skip("this transformers has no quantised cache of its own")
    output = assistgen.generate(model, **inputs, **settings, speculation="ngram", return_dict_in_generate=True)
    assert torch.equal(plain, output.sequences)
    assert any("can't be rolled back" in reason for reason in output.speculation.fallbacks)


@pytest.mark.parametrize("name", ["bart", "qwen3_next", "bamba"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_wait_for_others(name, seed):
    """One row says what is looked up and runs ahead of the others, which end early, in the middle of drafts that are rejected."""
    family = FAMILIES[name]
    model, inputs, draw = family.build(seed), family.inputs(3), random.Random(seed)
    free = model.generate(**inputs, max_new_tokens=90, do_sample=False).tolist()
    row = draw.randrange(3)
    eos = [free[other][-draw.randrange(30, 80)] for other in range(3) if other != row and draw.random() < 0.7] or [1]
    settings = {"max_new_tokens": 90, "do_sample": False, "eos_token_id": eos, "return_dict_in_generate": True}
    texts = [[*text[-90:], 7, 9] if number == row else [5, 6, 5, 7, *text[-90:][::3]] for number, text in enumerate(free)]
    plain = model.generate(**inputs, **settings)
    for depth, most in (("constant", 60), ("constant", 15), ("adaptive", 15)):
        speculation = {"method": "ngram", "depth": depth, "num_speculative_tokens": most, "prompt_lookup_min": 1, "lookup_ids": texts}
        output = assistgen.generate(model, **inputs, **settings, speculation=speculation)
        assert torch.equal(plain.sequences, output.sequences) and not output.speculation.fallbacks


@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_up_to_the_last_position(rows):
    """Learned positions: a forward that reaches past them fails."""
    for name, positions in (("bart", "max_position_embeddings"), ("gpt2", "max_position_embeddings"), ("whisper", "max_target_positions")):
        family = FAMILIES[name]
        model, inputs = family.build(), family.inputs(rows)
        limit = getattr(model.config, positions)
        most = limit - (inputs["input_ids"].shape[1] if name == "gpt2" else 1)
        settings = {"max_new_tokens": most, "do_sample": False, "return_dict_in_generate": True}
        plain = model.generate(**inputs, **settings)
        texts = [[*text, 7] if number == 0 else [5, 7, *text[::2]] for number, text in enumerate(plain.sequences.tolist())]
        output = assistgen.generate(
            model, **inputs, **settings, speculation={"method": "ngram", "depth": "constant", "lookup_ids": texts, "prompt_lookup_min": 1}
        )
        assert torch.equal(plain.sequences, output.sequences) and output.speculation.num_accepted_tokens > 20


def test_a_draft_model_ends_at_its_own_positions():
    model = FAMILIES["llama"].build()
    draft = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=32)).to(torch.float64).eval()
    for length in (20, 31, 40):
        ids = prompt(length, 1, period=5)
        plain = model.generate(ids, max_new_tokens=20, do_sample=False)
        output = assistgen.generate(
            model, ids, max_new_tokens=20, do_sample=False, return_dict_in_generate=True, speculation=DRAFTING | {"model": draft}
        )
        assert torch.equal(plain, output.sequences) and not output.speculation.fallbacks
        assert (output.speculation.num_draft_tokens > 0) == (length == 20)


def test_an_interrupt_in_a_batch_is_what_the_user_gets():
    family = FAMILIES["bart"]
    model, inputs = family.build(), family.inputs(3)
    calls = []

    def interrupt(*arguments):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt

    model.model.decoder.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        assistgen.generate(model, **inputs, max_new_tokens=30, do_sample=False, return_dict_in_generate=True, speculation="ngram")
    assert len(calls) == 8


def test_an_adapter_is_never_switched_off():
    """Also not while a draft that was given up still runs."""
    model = FAMILIES["lora"].build()
    ids = prompt(20, 1, period=5)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    switched = []
    for module in model.modules():
        if hasattr(module, "_disable_adapters"):
            module.register_forward_pre_hook(lambda layer, arguments: switched.append(layer._disable_adapters))
    output = assistgen.generate(model, ids, max_new_tokens=12, do_sample=False, speculation=DRAFTING | {"model": model})
    assert torch.equal(plain, output) and switched and not any(switched)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CANT_DRAFT)
def test_a_recurrent_target_with_a_draft_model(name, rows):
    """A draft of another family and other weights: mostly rejected, so that states go back in nearly every round."""
    family = FAMILIES[name]
    if family.plain:
        pytest.skip("decoded plainly")
    stats = assert_same(family.build(), DRAFTING | {"model": FAMILIES["llama"].build()}, family.inputs(rows), accepted=None)
    assert stats.num_draft_tokens > stats.num_accepted_tokens and not stats.fallbacks
