"""The four ways in, what they restore, and what they refuse."""

import copy
import logging
import threading

import pytest
import torch
from transformers import BitsAndBytesConfig, GenerationConfig, LogitsProcessor, TextGenerationPipeline, TextIteratorStreamer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import assistgen
from assistgen import NGramCandidateGenerator, SpeculationConfig, Speculator, compat

from .oracles import OracleGenerator, constant
from .test_stopping import Collect, speaker, tokenizer  # noqa: F401
from .tiny import build, pad_left, prompt


pytestmark = pytest.mark.exactness

KW = {"max_new_tokens": 30, "do_sample": False}


def test_the_four_ways_agree(speaker, tokenizer, tmp_path):  # noqa: F811
    model, ids, _ = speaker
    ids = torch.cat([ids, ids, ids], dim=1)
    plain = model.generate(ids, **KW)
    assert torch.equal(plain, model.generate(ids, **assistgen.speculate("ngram"), **KW))
    assert torch.equal(plain, assistgen.generate(model, ids, speculation="prompt_lookup", **KW))
    with assistgen.enable(model, "ngram"):
        assert torch.equal(plain, model.generate(ids, **KW))
        assert torch.equal(plain, model.generate(ids, **assistgen.speculate("ngram"), **KW))
    chunks = assistgen.stream(model, tokenizer, ids, speculation="ngram", skip_special_tokens=False, **KW)
    pieces = list(chunks)
    assert [i for piece in pieces for i in piece.token_ids] == plain[0, ids.shape[1] :].tolist()
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(plain[0, ids.shape[1] :])
    assert torch.equal(plain, chunks.output.sequences)
    assert chunks.output.speculation.num_tokens == 30


def test_keyword_arguments_stream_and_stop(speaker, tokenizer):  # noqa: F811
    """`model.generate(**inputs, **speculate(...), streamer=..., stop_strings=[...], tokenizer=...)`."""
    model, ids, truth = speaker
    word = next(
        text for p in range(5, 30) if (text := tokenizer.decode(truth[0, 12 + p : 14 + p])) and "\N{REPLACEMENT CHARACTER}" not in text
    )
    kwargs = {"max_new_tokens": 40, "do_sample": False, "stop_strings": [word], "tokenizer": tokenizer}
    plain = model.generate(ids, **kwargs)
    assert plain.shape[1] < 52
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    arguments = {"input_ids": ids, **assistgen.speculate(constant()), "streamer": streamer, **kwargs}
    thread = threading.Thread(target=lambda: model.generate(**arguments))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(plain[0, 12:])


def test_closing_a_stream_ends_generation_within_a_round(speaker, tokenizer):  # noqa: F811
    model, ids, truth = speaker
    forwards = []
    handle = model.register_forward_pre_hook(lambda *a: forwards.append(1))
    chunks = assistgen.stream(model, tokenizer, ids, speculation=OracleGenerator(truth, 4), **KW)
    first = next(chunks)
    assert (first.draft_ids, first.drafter) == ([], None)
    chunk = next(chunks)
    assert chunk.sources == ["OracleGenerator"] * 4 + ["target"]
    assert (chunk.draft_ids, chunk.drafter) == (chunk.token_ids[:4], "OracleGenerator")
    done = len(forwards)
    chunks.close()
    handle.remove()
    assert len(forwards) == done == 2
    output = chunks.output
    assert torch.equal(output.sequences, truth[:, : 12 + 6])
    assert output.speculation.num_tokens == 6
    assert output.speculation.num_accepted_tokens == 4
    assert compat.length_of(getattr(output, compat.CACHE)) == 17
    assert list(chunks) == []

    with assistgen.stream(model, tokenizer, ids, speculation="ngram", **KW) as chunks:
        pass
    assert torch.equal(chunks.output.sequences, ids)


def test_a_chunk_tells_what_was_rejected(speaker, tokenizer):  # noqa: F811
    model, ids, truth = speaker
    generator = OracleGenerator(truth, 4, right=lambda position: position != 15)
    chunks = list(assistgen.stream(model, tokenizer, ids, speculation=generator, **KW))
    assert chunks[1].draft_ids[:2] == chunks[1].token_ids[:2] and len(chunks[1].draft_ids) == 4
    assert chunks[1].sources == ["OracleGenerator"] * 2 + ["target"]
    assert chunks[1].draft_ids[2] != chunks[1].token_ids[2] == int(truth[0, 15])


def test_gradients_stay_as_they_were_while_a_stream_is_open(speaker, tokenizer):  # noqa: F811
    model, ids, _ = speaker
    with torch.enable_grad():
        chunks = assistgen.stream(model, tokenizer, ids, speculation="ngram", **KW)
        next(chunks)
        assert torch.is_grad_enabled()
        chunks.close()
        assert torch.is_grad_enabled()


def test_enable_restores_what_was_there():
    model = build()
    speculator = assistgen.enable(model, "ngram")
    ids = prompt(40, period=5)
    output = model.generate(ids, return_dict_in_generate=True, **KW)
    assert output.speculation.num_tokens == 30
    assert speculator.stats.num_tokens == 30
    model.generate(ids, speculation=None, **KW)
    assert speculator.stats.num_tokens == 30
    other = model.generate(
        ids, return_dict_in_generate=True, **KW,
        speculation={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    )  # fmt: skip
    assert torch.equal(other.sequences, output.sequences)
    assert speculator.stats.num_tokens == 30
    assistgen.disable(model)
    assert "generate" not in vars(model)
    assistgen.disable(model)

    marker = lambda *args, **kwargs: "mine"  # noqa: E731
    model.generate = marker
    with assistgen.enable(model, "ngram"), assistgen.enable(model, {"method": "ngram"}):
        assert torch.equal(model.generate(ids, **KW), output.sequences)
    assert model.generate is marker


def test_enabled_models_can_be_copied():
    model = build()
    assistgen.enable(model, "ngram")
    twin = copy.deepcopy(model)
    assert twin.generate.__self__ is twin
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    ids = prompt(20)
    assert not torch.equal(twin.generate(ids, **KW), model.generate(ids, **KW))


def test_pipeline(speaker, tokenizer):  # noqa: F811
    model, ids, _ = speaker
    text = "the cat sat on the mat; the other cat sat there too, the cat sat"
    pipe = TextGenerationPipeline(model=model, tokenizer=tokenizer)
    kwargs = {"max_new_tokens": 20, "do_sample": False, "return_full_text": False}
    plain = pipe(text, **kwargs)
    with assistgen.enable(model, "ngram") as speculator:
        assert pipe(text, **kwargs) == plain
    assert speculator.stats.num_tokens == 20


def test_transformers_own_arguments(caplog):
    model, ids = build(), prompt(40, period=5)
    plain = model.generate(ids, **KW)
    output = assistgen.generate(model, ids, prompt_lookup_num_tokens=3, return_dict_in_generate=True, **KW)
    assert torch.equal(plain, output.sequences)
    assert len(output.speculation.num_accepted_tokens_per_pos) <= 3
    config = GenerationConfig(max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(plain, assistgen.generate(model, ids, generation_config=config, speculation="ngram"))
    assert config.prompt_lookup_num_tokens == 3
    with assistgen.enable(model, "ngram"):
        assert torch.equal(plain, model.generate(ids, None, **KW))
        assert torch.equal(plain, model.generate(ids, assistant_model=model, **KW))


def test_prompt_lookup_in_our_loop_and_our_ngram_in_theirs():
    model, ids = build(seed=1), prompt(40, period=5)
    plain = model.generate(ids, **KW)
    theirs = PromptLookupCandidateGenerator(num_output_tokens=4, max_matching_ngram_size=2, max_length=70)
    output = assistgen.generate(model, ids, speculation=theirs, return_dict_in_generate=True, **KW)
    assert torch.equal(plain, output.sequences)
    assert output.speculation.num_draft_tokens > 0
    ours = NGramCandidateGenerator(num_speculative_tokens=4, max_length=70)
    model._get_candidate_generator = lambda **kwargs: ours
    for _ in range(2):  # the second call is another text to the same generator
        assert torch.equal(plain, model.generate(ids, prompt_lookup_num_tokens=1, **KW))
        other = prompt(21, seed=3, period=4)
        del model._get_candidate_generator
        expected = model.generate(other, **KW)
        model._get_candidate_generator = lambda **kwargs: ours
        assert torch.equal(expected, model.generate(other, prompt_lookup_num_tokens=1, **KW))
    del model._get_candidate_generator
    draft, logits = ours.get_candidates(torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7]]))
    assert draft.tolist() == [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]]
    assert logits is None


BAD = {
    "unknown method": ("ngrams", {}, ValueError, "ngram"),
    "layers left out": ("early_exit", {}, ValueError, "assistant_early_exit"),
    "layers of nothing": ({"method": "ngram", "assistant_early_exit": 1}, {}, ValueError, "assistant_early_exit"),
    "too many layers": ({"method": "early_exit", "assistant_early_exit": 2}, {}, ValueError, "assistant_early_exit"),
    "unknown key": ({"method": "ngram", "num_speculative_token": 3}, {}, ValueError, "num_speculative_tokens"),
    "wrong type": ({"method": "ngram", "num_speculative_tokens": "4"}, {}, TypeError, "num_speculative_tokens"),
    "bool": ({"method": "ngram", "num_speculative_tokens": True}, {}, TypeError, "num_speculative_tokens"),
    "zero": ({"method": "ngram", "num_speculative_tokens": 0}, {}, ValueError, "num_speculative_tokens"),
    "negative": ({"method": "ngram", "prompt_lookup_min": -1}, {}, ValueError, "prompt_lookup_min"),
    "min over max": ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, {}, ValueError, "prompt_lookup_min"),
    "unknown depth": ({"method": "ngram", "depth": "deep"}, {}, ValueError, "depth"),
    "lossy": ({"method": "ngram", "synthetic_acceptance_length": 2}, {}, ValueError, "synthetic_acceptance_length"),
    "not a speculation": (42, {}, TypeError, "speculation"),
    "beams": ("ngram", {"num_beams": 3}, ValueError, "num_beams"),
    "no cache": ("ngram", {"use_cache": False}, ValueError, "use_cache"),
    "contrastive": ("ngram", {"penalty_alpha": 0.6, "top_k": 4}, ValueError, "penalty_alpha"),
    "constrained": ("ngram", {"force_words_ids": [[5]], "num_beams": 2}, ValueError, "num_beams"),
    "stop strings without tokenizer": ("ngram", {"stop_strings": ["x"]}, ValueError, "tokenizer"),
    "another loop": ("ngram", {"custom_generate": lambda *a, **k: None}, ValueError, "custom_generate"),
    "unused argument": ("ngram", {"no_such_argument": 1}, ValueError, "no_such_argument"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_any_forward(case):
    speculation, kwargs, error, named = BAD[case]
    model = build()
    forwards = []
    model.register_forward_pre_hook(lambda *a: forwards.append(1))
    with pytest.raises(error, match=named):
        assistgen.generate(model, prompt(12), speculation=speculation, max_new_tokens=4, **kwargs)
    with pytest.raises(error, match=named):
        assistgen.stream(model, None, prompt(12), speculation=speculation, max_new_tokens=4, **kwargs)
    assert not forwards


def test_one_row_where_one_row_is_meant():
    model = build()
    batch = pad_left([prompt(9, 1), prompt(12, 2)])
    with pytest.raises(ValueError, match="one row"):
        assistgen.stream(model, None, **batch, max_new_tokens=4)
    with pytest.raises(ValueError, match="one row"):
        assistgen.generate(model, **batch, speculation=OracleGenerator(prompt(20)), max_new_tokens=4)
    with pytest.raises(ValueError, match="one row"):
        NGramCandidateGenerator().get_candidates(batch["input_ids"])
    with pytest.raises(TypeError, match="model"):
        assistgen.enable(torch.nn.Linear(2, 2))


def test_an_enabled_model_runs_beams_plainly_with_one_warning(caplog):
    model, ids = build(), prompt(12)
    plain = model.generate(ids, num_beams=3, **KW)
    model.generation_config.num_beams = 3
    with assistgen.enable(model, "ngram"), caplog.at_level(logging.WARNING, logger="assistgen"):
        assert torch.equal(plain, model.generate(ids, **KW))
        assert torch.equal(plain, model.generate(ids, **KW))
        with pytest.raises(ValueError, match="num_beams"):
            model.generate(ids, speculation="ngram", **KW)
    assert sum("num_beams" in record.message for record in caplog.records) == 1


class Fails(Exception):
    pass


class FailAt(LogitsProcessor):
    row_independent = True

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == self.length:
            raise Fails
        return scores


class FailingStreamer(Collect):
    def put(self, value):
        super().put(value)
        if len(self.ids) == 7:
            raise Fails


@pytest.mark.parametrize("where", ["processor", "criterion", "streamer"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_failure_reaches_the_caller_and_leaves_everything_usable(family, where):
    model, ids = build(family), prompt(14)
    truth = model.generate(ids, max_new_tokens=40, do_sample=False)
    first = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    kept = getattr(first, compat.CACHE)
    streamer = FailingStreamer() if where == "streamer" else Collect()
    extra = {}
    if where == "processor":
        extra["logits_processor"] = [FailAt(14 + 4 + 6)]
    if where == "criterion":
        extra["stopping_criteria"] = [lambda ids, scores: FailAt(14 + 4 + 7)(ids, torch.zeros(1, dtype=torch.bool))]
    with pytest.raises(Fails):
        assistgen.generate(
            model, first.sequences, speculation=OracleGenerator(truth, 6), streamer=streamer, **extra, **KW, **{compat.CACHE: kept}
        )
    assert streamer.ended == 1
    committed = 14 + 4 + len(streamer.ids)
    assert streamer.ids == truth[0, 18:committed].tolist()
    assert all(not getattr(layer, "record_past", False) for layer in kept.layers)
    # The cache holds what was committed, but for the last token: generation goes on from there.
    length = compat.length_of(kept)
    assert length in (committed - 1, committed)
    again = assistgen.generate(
        model, truth[:, : length + 1], speculation=OracleGenerator(truth, 6), do_sample=False, max_length=50, **{compat.CACHE: kept}
    )
    assert torch.equal(again, truth[:, :50])


def test_a_failing_drafter_does_not_fail_the_call(caplog):
    model, ids = build(), prompt(14)
    plain = model.generate(ids, **KW)

    class Broken(OracleGenerator):
        def get_candidates(self, input_ids, **kwargs):
            if input_ids.shape[1] > 22:
                raise Fails("no more")
            return super().get_candidates(input_ids)

    class Foreign(OracleGenerator):
        def get_candidates(self, input_ids, **kwargs):
            return torch.cat([input_ids, torch.tensor([[5, 99999]])], dim=1), None

    for generator, reason in ((Broken(plain, 3), "Fails"), (Foreign(plain), "ValueError")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="assistgen"):
            output = assistgen.generate(model, ids, speculation=generator, return_dict_in_generate=True, **KW)
        assert torch.equal(plain, output.sequences)
        assert reason in next(iter(output.speculation.fallbacks))
        assert len(caplog.records) == 1
        assert caplog.records[0].exc_info


def test_nothing_of_the_users_is_changed():
    model, ids = build("gemma3"), prompt(40, period=5)
    config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=3)
    processors, criteria = [FailAt(10**6)], [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]
    before = (model.generation_config.to_dict(), model.config.to_dict(), config.to_dict(), set(vars(model)))
    assistgen.generate(model, ids, generation_config=config, logits_processor=processors, stopping_criteria=criteria, speculation="ngram")
    assert before == (model.generation_config.to_dict(), model.config.to_dict(), config.to_dict(), set(vars(model)))
    assert len(processors) == len(criteria) == 1


def test_a_speculator_is_shared_by_threads():
    model, speculator = build(seed=1), Speculator("ngram")
    prompts = [prompt(30, seed, 5) for seed in range(6)]
    plain = [model.generate(ids, **KW) for ids in prompts]
    results = [None] * 6

    @torch.no_grad()
    def work(n):
        results[n] = assistgen.generate(model, prompts[n], speculation=speculator, **KW)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(p, r) for p, r in zip(plain, results, strict=True))
    assert speculator.stats.num_tokens == 180
    assert speculator.controller.to_dict()["depth"] == "adaptive"


def test_every_form_of_speculation():
    model, ids = build(), prompt(20, period=4)
    plain = model.generate(ids, **KW)
    for speculation in ("ngram", {"method": "ngram"}, SpeculationConfig(), Speculator(), NGramCandidateGenerator(), None):
        assert torch.equal(plain, assistgen.generate(model, ids, speculation=speculation, **KW))


def test_a_modules_cache_that_cannot_be_written(monkeypatch, tmp_path):
    import transformers.utils

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(transformers.utils, "HF_MODULES_CACHE", str(tmp_path / "file" / "modules"))
    with pytest.raises(OSError, match="HF_MODULES_CACHE"):
        assistgen.speculate("ngram")


def test_batch_streamer_gets_steps_of_all_rows():
    model = build()
    inputs = pad_left([prompt(24, 1, 5), prompt(9, 2, 3), prompt(17, 3, 4)])
    ends = model.generate(**inputs, **KW)[0, 24 + 6].item()

    class Steps:
        def __init__(self):
            self.steps, self.ended = [], 0

        def put(self, value):
            self.steps.append(value)

        def end(self):
            self.ended += 1

    for eos in (None, ends):
        plain, fast = Steps(), Steps()
        model.generate(**inputs, **KW, eos_token_id=eos, streamer=plain)
        assistgen.generate(model, **inputs, **KW, eos_token_id=eos, streamer=fast, speculation=constant())
        assert fast.ended == 1
        assert len(plain.steps) == len(fast.steps)
        assert all(torch.equal(p, f) for p, f in zip(plain.steps, fast.steps, strict=True))


def test_processes_that_decode_together(monkeypatch):
    """Ranks in step are refused; ranks with parts of one model choose the same depth, whatever their clocks say."""
    model, ids = build(seed=1), prompt(40, period=5)
    with monkeypatch.context() as patch:
        patch.setattr(compat, "ranks_in_step", lambda model: True)
        with pytest.raises(ValueError, match="synced_gpus"):
            assistgen.generate(model, ids, speculation="ngram", **KW)
    plain = model.generate(ids, **KW)
    model._tp_size = 2
    store = assistgen.SuffixStore()
    store.add(plain[0].tolist())
    speculator = Speculator({"method": "suffix", "store": store})
    output = assistgen.generate(model, ids, speculation=speculator, return_dict_in_generate=True, **KW)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.num_accepted_tokens > 10
    assert speculator.controller.to_dict()["acceptance"] == {}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_8_bit_targets_whose_tokens_depend_on_each_other(threshold, rows):
    """Plainly, with the reason: transformers' own prompt lookup gives another text there."""
    model, ids = build(), torch.cat([prompt(24, seed, period=5) for seed in range(rows)])
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    output = assistgen.generate(model, ids, max_new_tokens=12, do_sample=False, speculation=constant(), return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert any("8-bit" in reason for reason in output.speculation.fallbacks) == (threshold > 0)
    assert (output.speculation.num_draft_tokens == 0) == (threshold > 0)
