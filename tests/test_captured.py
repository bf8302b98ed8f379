"""`compile=True`: the path of fixed shapes, uncaptured here, and once compiled by dynamo, whose compilations can be counted."""

import gc
import threading
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import assistgen
from assistgen import SpeculationConfig, Speculator, captured, compat, identity
from assistgen.captured import WIDTHS
from assistgen.drafters.draft_model import DraftModelDrafter

from .oracles import OracleSpeculator, assert_same_distribution, count_pairs, draft_blindly
from .test_draft_model import small
from .test_real_models import CODE, NOTE, chat
from .tiny import FAMILIES, WINDOW, build, pad_left, prompt


pytestmark = pytest.mark.exactness

FIXED = tuple(family for family in FAMILIES if family != "gpt2")
DICT = {"return_dict_in_generate": True}


def spec(**keys):
    return {"method": "ngram", "depth": "constant", "compile": True, **keys}


class CompiledOracle(OracleSpeculator):
    compiles = True


def batch(rows):
    return pad_left([prompt(24 - 5 * row, seed=row, period=5) for row in range(rows)])


class FakeGraphs:
    """
    What CUDA graphs do to those who use them, on a CPU: a capture runs the step a few times first, a replay writes the same output
    tensors as the one before, and nothing of Python but the captured step runs again. Here it also spoils what other captures gave out.
    """

    def __init__(self):
        self.given, self.replays = [], 0

    def __call__(self, step, memory):
        step()
        step()
        outputs = tensors(step())
        shape = step()
        self.given.append(outputs)

        def replay():
            self.replays += 1
            for others in self.given:
                for tensor in others:
                    tensor.fill_(1)
            for tensor, new in zip(outputs, tensors(step()), strict=True):
                tensor.copy_(new)
            return put(shape, list(outputs))

        return replay


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value or () for tensor in tensors(part)]


def put(value, given):
    """`value` with the given tensors in place of its own."""
    if isinstance(value, torch.Tensor) or value is None:
        return given.pop(0) if value is not None else None
    parts = [put(part, given) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def nearly(model):
    """As a draft that is right in half of all cases."""
    torch.manual_seed(0)
    head = model.lm_head.weight.clone()
    model.lm_head.weight = torch.nn.Parameter(head + 0.25 * head.std() * torch.randn_like(head))
    return model


@pytest.fixture
def graphs(monkeypatch):
    fake = FakeGraphs()
    monkeypatch.setattr(captured, "CAPTURES", {"cpu": fake})
    return fake


@pytest.fixture
def widths(monkeypatch):
    """Of every forward of fixed shape."""
    seen = []
    forward = captured.FixedMemory.forward

    def watched(self, model, width):
        seen.append((len(self.ids), self.cells, width))
        return forward(self, model, width)

    watched.__name__ = "forward"
    monkeypatch.setattr(captured.FixedMemory, "forward", watched)
    return seen


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FIXED)
def test_family_cache_rows(family, cache, rows, sampled, widths):
    model, inputs = build(family), batch(rows)
    kwargs = {"max_new_tokens": 32, "do_sample": sampled, "temperature": 0.05 if rows == 1 else 1e-4} | DICT
    if cache == "static":
        if family in ("mistral", "gemma3"):
            pytest.skip("static sliding-window caches are decoded plainly")
        kwargs["cache_implementation"] = "static"
    torch.manual_seed(1)
    plain = model.generate(**inputs, **kwargs)
    torch.manual_seed(1)
    oracle = CompiledOracle(plain.sequences[:, inputs["input_ids"].shape[1] :].tolist())
    output = assistgen.generate(model, **inputs, **kwargs, speculation=oracle)
    assert torch.equal(output.sequences, plain.sequences)
    assert output.speculation.num_accepted_tokens > 20 * rows
    assert not output.speculation.fallbacks
    assert output.speculation.num_captures == len(WIDTHS)
    assert {width for *_, width in widths} <= set(WIDTHS) and len(widths) == output.speculation.target_forwards - 1
    assert compat.length_of(getattr(output, compat.CACHE)) == compat.length_of(getattr(plain, compat.CACHE))


@pytest.mark.parametrize("family", FIXED)
def test_one_row_accepts_all_and_the_next_nothing(family):
    model, inputs = build(family), batch(3)
    plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    new = plain[:, inputs["input_ids"].shape[1] :].tolist()
    output = assistgen.generate(
        model, **inputs, max_new_tokens=40, do_sample=False, **DICT, speculation=CompiledOracle([new[0], None, new[2]])
    )
    assert torch.equal(output.sequences, plain)
    assert [row.num_accepted_tokens > 20 for row in output.speculation.rows] == [True, False, True]
    assert not output.speculation.fallbacks


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scores_and_states(attention, rows):
    # No padding: plain decoding's eager attention makes NaN of it in float64.
    model, inputs = build("llama"), {"input_ids": torch.cat([prompt(24, seed=row) for row in range(rows)])}
    model.set_attn_implementation(attention)
    wanted = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": attention == "eager"}
    kwargs = {"max_new_tokens": 20, "do_sample": False} | wanted | DICT
    plain = model.generate(**inputs, **kwargs)
    output = assistgen.generate(model, **inputs, **kwargs, speculation=CompiledOracle(plain.sequences[:, 24:].tolist()))
    assert torch.equal(output.sequences, plain.sequences) and output.speculation.num_accepted_tokens > 12 * rows
    assert not output.speculation.fallbacks
    for name in ("scores", "logits"):
        for a, b in zip(getattr(output, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(a, b)
    for name in ("hidden_states", "attentions") if attention == "eager" else ("hidden_states",):
        for ours, theirs in zip(getattr(output, name), getattr(plain, name), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("family", FIXED)
@pytest.mark.parametrize("rows", [1, 2])
def test_second_turn(family, rows):
    model, inputs = build(family), batch(rows)
    kwargs = {"max_new_tokens": 16, "do_sample": False} | DICT
    captures = assistgen.generate(model, **inputs, **kwargs, speculation=spec()).speculation.num_captures
    first = assistgen.generate(model, **inputs, **kwargs, speculation=spec())
    assert captures == len(WIDTHS) and first.speculation.num_captures == 0
    kept = getattr(first, compat.CACHE)
    question = prompt(6, seed=9).repeat(rows, 1)
    ids = torch.cat([first.sequences, question], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(rows, 22, dtype=torch.long)], dim=1)
    plain = model.generate(ids, attention_mask=mask, **kwargs)
    oracle = CompiledOracle(plain.sequences[:, ids.shape[1] :].tolist())
    second = assistgen.generate(model, ids, attention_mask=mask, **kwargs, **{compat.CACHE: kept}, speculation=oracle)
    assert torch.equal(second.sequences, plain.sequences)
    assert second.speculation.num_accepted_tokens > 10 * rows and not second.speculation.fallbacks
    assert second.speculation.num_captures == 0  # both turns' texts fit into the same cells
    assert compat.length_of(getattr(second, compat.CACHE)) == compat.length_of(getattr(plain, compat.CACHE))


def test_same_seed_same_text():
    model, ids = build(seed=1), prompt(10)
    accepted = 0
    for seed in range(20):
        kwargs = {"do_sample": True, "max_new_tokens": 14, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.1}
        torch.manual_seed(seed)
        plain = model.generate(ids, **kwargs)
        torch.manual_seed(seed)
        oracle = CompiledOracle(plain[:, 10:].tolist())
        output = assistgen.generate(model, ids, **kwargs, **DICT, speculation=oracle)
        assert torch.equal(output.sequences, plain)
        accepted += output.speculation.num_accepted_tokens
    assert accepted > 100


def test_statistics_of_probabilistic_drafts():
    """Pairs of sampled tokens, against plain decoding: see `assert_same_distribution` for the level."""
    model, ids = build(vocab_size=10, eos_token_id=None), torch.tensor([[2, 3, 4, 5]])
    speculator = Speculator(
        {
            "method": "draft_model", "model": small("llama", vocab_size=10), "draft_sample_method": "probabilistic", "depth": "constant",
            "num_speculative_tokens": 3, "compile": True,
        }
    )  # fmt: skip
    kwargs = {"do_sample": True, "max_new_tokens": 4, "num_return_sequences": 250}
    torch.manual_seed(7)
    accepted, counts = count_pairs(model, ids, speculator, kwargs, at=6, calls=6)
    assert accepted > 500 and not speculator.stats.fallbacks
    assert_same_distribution(counts)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FIXED)
def test_draft_models(family, rows, looks, monkeypatch):
    """Its own forwards are of fixed shapes too, and where nobody looks at its tokens they follow each other on the device."""
    draft_blindly(monkeypatch, looks)
    chain, chains = captured.FixedRows.chain, []

    def counted(self, *args):
        chains.append(args[3])
        return chain(self, *args)

    monkeypatch.setattr(captured.FixedRows, "chain", counted)
    model, inputs = build(family), batch(rows)
    speculator = Speculator({"method": "draft_model", "model": build(family), "depth": "constant", "compile": True})
    kwargs = {"max_new_tokens": 40, "do_sample": False} | DICT
    plain = model.generate(**inputs, **kwargs)
    for _ in range(2):
        output = assistgen.generate(model, **inputs, **kwargs, speculation=speculator)
        assert torch.equal(output.sequences, plain.sequences)
        assert output.speculation.num_accepted_tokens > 25 * rows and not output.speculation.fallbacks
    assert bool(chains) != looks and (looks or max(chains) == 14)
    assert output.speculation.draft_forwards > 5
    # A longer text in the next turn.
    ids = torch.cat([output.sequences, prompt(300, seed=5).repeat(rows, 1)], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(rows, 340, dtype=torch.long)], dim=1)
    plain = model.generate(ids, attention_mask=mask, **kwargs)
    output = assistgen.generate(model, ids, attention_mask=mask, **kwargs, speculation=speculator)
    assert torch.equal(output.sequences, plain.sequences)
    assert output.speculation.num_accepted_tokens > 25 * rows and not output.speculation.fallbacks


def test_draft_model_that_is_wrong_now_and_then(monkeypatch):
    model, inputs = build("llama"), batch(3)
    monkeypatch.setattr(DraftModelDrafter, "_draft_looking", lambda self, rows, rooms, plan: self._draft_blindly(rows, rooms))
    speculation = {"method": "draft_model", "model": small("llama"), "depth": "constant", "num_speculative_tokens": 4, "compile": True}
    plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    output = assistgen.generate(model, **inputs, max_new_tokens=40, do_sample=False, **DICT, speculation=speculation)
    assert torch.equal(output.sequences, plain)
    stats = output.speculation
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens and not stats.fallbacks


def test_nothing_is_captured_after_the_first_call(widths):
    """Other prompts, lengths, drafts and stops; the shapes stay."""
    model, kwargs = build("mistral"), {"do_sample": False} | DICT
    counts, accepted = [], 0
    for seed in range(12):
        ids = prompt(6 + 9 * seed, seed, period=4 + seed % 3)
        stop = {"eos_token_id": 5} if seed % 3 == 0 else {}
        new = 8 + 7 * seed
        plain = model.generate(ids, max_new_tokens=new, **kwargs, **stop)
        oracle = CompiledOracle(plain.sequences[:, ids.shape[1] :].tolist(), depth=seed)
        output = assistgen.generate(model, ids, max_new_tokens=new, **kwargs, **stop, speculation=oracle if seed % 2 else spec())
        assert torch.equal(output.sequences, plain.sequences)
        counts.append(output.speculation.num_captures)
        accepted += output.speculation.num_accepted_tokens
    assert accepted > 100
    assert counts == [len(WIDTHS), *[0] * 11]
    assert {(rows, cells) for rows, cells, _ in widths} == {(1, 256)} and {width for *_, width in widths} <= set(WIDTHS)


@pytest.mark.skipif(compat.CACHE != "cache", reason="takes half a minute, once is enough")
@torch._dynamo.config.patch(recompile_limit=64)
@pytest.mark.parametrize(("family", "rows"), [("llama", 1), ("gemma3", 2)])
def test_no_recompilation_in_a_compiler(family, rows, monkeypatch):
    """Each shape is compiled once, whole (a break in the graph is an error), and nothing after the first call."""
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = {"cpu": lambda step, memory: torch.compile(lambda: step(), backend=counter, fullgraph=True, dynamic=False)}
    monkeypatch.setattr(captured, "CAPTURES", compiled)
    draft_blindly(monkeypatch)
    model, draft = build(family), build(family)
    speculator = Speculator(
        {"drafters": [{"method": "ngram"}, {"method": "draft_model", "model": draft}], "depth": "constant", "compile": True}
    )
    frames = []
    for seed in range(4):
        inputs = pad_left([prompt(12 + 3 * seed + row, seed + row, period=4 * (seed % 2)) for row in range(rows)])
        kwargs = {"max_new_tokens": 24 + seed, "do_sample": False} | DICT
        plain = model.generate(**inputs, **kwargs)
        output = assistgen.generate(model, **inputs, **kwargs, speculation=speculator)
        assert torch.equal(output.sequences, plain.sequences)
        assert output.speculation.num_accepted_tokens > 10 * rows and not output.speculation.fallbacks
        frames.append(counter.frame_count)
    assert frames[0] > 3 and frames[1:] == frames[1:2] * 3, frames
    torch._dynamo.reset()


def test_a_forward_that_can_not_be_captured(monkeypatch, caplog):
    def refuse(step, memory):
        raise RuntimeError("not here")

    monkeypatch.setattr(captured, "CAPTURES", {"cpu": refuse})
    model, ids = build(), prompt(24, period=5)
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    for _ in range(2):
        output = assistgen.generate(model, ids, max_new_tokens=24, do_sample=False, **DICT, speculation=spec())
        assert torch.equal(output.sequences, plain) and output.speculation.num_accepted_tokens > 0
        assert output.speculation.fallbacks == {"not compiled: capturing the forward raised RuntimeError": 1}
    assert sum("uncaptured" in record.message for record in caplog.records) == 1


def test_what_can_not_be_of_fixed_shape_says_why(monkeypatch):
    model, ids = build("gpt2"), prompt(24, period=5)
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    output = assistgen.generate(model, ids, max_new_tokens=24, do_sample=False, **DICT, speculation=spec())
    assert torch.equal(output.sequences, plain) and output.speculation.num_accepted_tokens > 0
    reasons = [reason for reason in output.speculation.fallbacks if reason.startswith("not compiled: ")]
    assert len(reasons) == (0 if model._can_compile_fullgraph else 1)

    monkeypatch.setattr(captured, "CAPTURES", {"cpu": lambda step, memory: step})
    model = build()
    handle = model.model.layers[0].register_forward_hook(lambda *args: None)
    output = assistgen.generate(model, ids, max_new_tokens=24, do_sample=False, **DICT, speculation=spec())
    handle.remove()
    assert torch.equal(output.sequences, model.generate(ids, max_new_tokens=24, do_sample=False))
    assert any("hooks" in reason for reason in output.speculation.fallbacks)


def test_early_exit_drafts_beside_it():
    model, ids = build(num_hidden_layers=3), prompt(24, period=5)
    speculation = {"method": "early_exit", "assistant_early_exit": 2, "depth": "constant", "compile": True}
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    output = assistgen.generate(model, ids, max_new_tokens=24, do_sample=False, **DICT, speculation=speculation)
    assert torch.equal(output.sequences, plain) and output.speculation.num_draft_tokens > 0
    assert not output.speculation.fallbacks


def test_weights_that_moved_are_captured_anew():
    model, ids = build(), prompt(24, period=5)
    kwargs = {"max_new_tokens": 24, "do_sample": False} | DICT
    assert assistgen.generate(model, ids, **kwargs, speculation=spec()).speculation.num_captures > 0
    assert assistgen.generate(model, ids, **kwargs, speculation=spec()).speculation.num_captures == 0
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.roll(1, 0).clone())
    output = assistgen.generate(model, ids, **kwargs, speculation=spec())
    assert output.speculation.num_captures > 0
    assert torch.equal(output.sequences, model.generate(ids, **kwargs).sequences)


def test_threads_have_memory_of_their_own():
    model = build()
    ids = [prompt(24, seed, period=5) for seed in range(4)]
    plain = [model.generate(row, max_new_tokens=30, do_sample=False) for row in ids]
    results = {}

    def call(i):
        with torch.no_grad():
            results[i] = [assistgen.generate(model, ids[i], max_new_tokens=30, do_sample=False, speculation=spec()) for _ in range(5)]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, expected in enumerate(plain):
        assert all(torch.equal(sequences, expected) for sequences in results[i])
    assert 1 <= len(captured._kept[model]) <= captured.KEPT


def test_the_model_is_not_held():
    model = build()
    assistgen.generate(model, prompt(24, period=5), max_new_tokens=24, do_sample=False, speculation=spec())
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_beyond_a_window_and_the_smallest_cache():
    model, ids = build("gemma3"), prompt(100, period=7)
    assert ids.shape[1] > 2 * WINDOW
    plain = model.generate(ids, max_new_tokens=200, do_sample=False)
    output = assistgen.generate(model, ids, max_new_tokens=200, do_sample=False, **DICT, speculation=spec())
    assert torch.equal(output.sequences, plain)
    assert output.speculation.num_accepted_tokens > 50


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_replays(family, rows, sampled, graphs, monkeypatch):
    """Captures of target and draft, used by three calls; drafts that are mostly wrong, n-grams that put some rows ahead."""
    draft_blindly(monkeypatch)
    model, draft = build(family), nearly(build(family))
    chain = {"drafters": ["ngram", {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}], "depth": "constant"}
    captures = []
    for turn in range(3):
        inputs = pad_left([prompt(20 + 7 * turn - 4 * row, seed=turn + row, period=5 * (row % 2)) for row in range(rows)])
        eos = {"eos_token_id": 7} if turn == 2 else {}
        kwargs = {"max_new_tokens": 40, "do_sample": sampled, "temperature": 0.5 if rows == 1 else 1e-4, **eos} | DICT
        torch.manual_seed(turn)
        plain = model.generate(**inputs, **kwargs)
        torch.manual_seed(turn)
        output = assistgen.generate(model, **inputs, **kwargs, speculation=chain | {"compile": True})
        assert torch.equal(output.sequences, plain.sequences)
        assert output.speculation.num_accepted_tokens > 0 and output.speculation.draft_forwards > 0
        assert not output.speculation.fallbacks
        captures.append(output.speculation.num_captures)
        assert_same_cache(getattr(output, compat.CACHE), getattr(plain, compat.CACHE), inputs["attention_mask"])
    assert captures == [2 * len(WIDTHS) + len(captured.CHAINS), 0, 0]
    assert graphs.replays > 20


def assert_same_cache(ours, theirs, mask):
    """Padding in front of a prompt is nobody's."""
    assert compat.length_of(ours) == compat.length_of(theirs)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        for row, padding in enumerate((mask == 0).sum(1).tolist()):
            first = max(0, padding - (compat.length_of(ours) - a.keys.shape[2]))
            torch.testing.assert_close(a.keys[row, :, first:], b.keys[row, :, first:])
            torch.testing.assert_close(a.values[row, :, first:], b.values[row, :, first:])


def test_a_window_that_done_rows_must_not_push_out():
    """32 tokens of filling behind a row that is over, in a ring of a few cells more, and its last states read after that."""
    model, inputs = build("gemma3", seed=3), batch(3)
    plain = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    new = plain[:, inputs["input_ids"].shape[1] :]
    stop = int(new[0, 20])
    kwargs = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": stop} | DICT
    plain = model.generate(**inputs, **kwargs)
    truths = plain.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    oracle = CompiledOracle(truths, depth=29)
    oracle.config = SpeculationConfig(num_speculative_tokens=29)
    output = assistgen.generate(model, **inputs, **kwargs, speculation=oracle)
    assert torch.equal(output.sequences, plain.sequences)
    assert output.speculation.num_accepted_tokens > 50 and output.speculation.num_draft_tokens > 60
    assert not output.speculation.fallbacks
    assert_same_cache(getattr(output, compat.CACHE), getattr(plain, compat.CACHE), inputs["attention_mask"])


def test_rows_that_n_grams_put_ahead_of_the_draft():
    """The draft model starts late, when one row's text is much longer; both go on to the end."""
    model = build()
    ids = torch.cat([prompt(40, seed=3, period=4), prompt(40, seed=4)])
    plain = model.generate(ids, max_new_tokens=180, do_sample=False)
    chain = ["ngram", {"method": "draft_model", "model": build(), "num_speculative_tokens": 8}]
    speculation = {"drafters": chain, "depth": "constant", "compile": True}
    output = assistgen.generate(model, ids, max_new_tokens=180, do_sample=False, **DICT, speculation=speculation)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.draft_forwards > 0 and not output.speculation.fallbacks


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_calls_under_different_modes(modes):
    model, ids = build(), prompt(24, period=5)
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    for mode in modes:
        with mode():
            output = assistgen.generate(model, ids, max_new_tokens=24, do_sample=False, **DICT, speculation=spec())
        assert torch.equal(output.sequences, plain) and output.speculation.num_accepted_tokens > 0
        assert not output.speculation.fallbacks


def test_autocast_is_left_to_the_usual_way():
    model, ids = build(dtype=torch.float32), prompt(24, period=5)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model.generate(ids, max_new_tokens=16, do_sample=False)
        output = assistgen.generate(model, ids, max_new_tokens=16, do_sample=False, **DICT, speculation=spec())
    assert any("autocast" in reason for reason in output.speculation.fallbacks)
    comparison = identity.compare(model.bfloat16(), plain[0], output.sequences[0])
    assert comparison.identical or comparison.proven_tie


def test_hidden_states_do_not_rule_captures_out(graphs):
    model, ids = build(), prompt(24, period=5)
    kwargs = {"max_new_tokens": 24, "do_sample": False} | DICT
    for wanted in ({"output_hidden_states": True}, {}):
        plain = model.generate(ids, **kwargs, **wanted)
        output = assistgen.generate(model, ids, **kwargs, **wanted, speculation=spec())
        assert torch.equal(output.sequences, plain.sequences) and not output.speculation.fallbacks
        for ours, theirs in zip(output.hidden_states or (), plain.hidden_states or (), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b)
    assert graphs.replays > 4


def test_positions_of_a_draft_end_where_it_ends(graphs, monkeypatch):
    """A learned embedding has no more positions than it has, not even for filling."""
    draft_blindly(monkeypatch)
    model, draft = build("gpt2"), build("gpt2", n_positions=64)
    ids = prompt(40, period=5)
    speculation = {"method": "draft_model", "model": draft, "depth": "constant", "compile": True}
    plain = model.generate(ids, max_new_tokens=60, do_sample=False)
    output = assistgen.generate(model, ids, max_new_tokens=60, do_sample=False, **DICT, speculation=speculation)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.num_draft_tokens > 0 and not output.speculation.fallbacks


def test_positions_of_the_target_end_where_it_ends():
    """Eight wide from position 58 of 64, for five tokens: the filling has no positions of its own."""
    model, ids = build("gpt2", n_positions=64), prompt(38)
    plain = model.generate(ids, max_new_tokens=26, do_sample=False)
    oracle = CompiledOracle(plain[:, 38:].tolist(), depth=4)
    output = assistgen.generate(model, ids, max_new_tokens=26, do_sample=False, **DICT, speculation=oracle)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.num_accepted_tokens > 15 and not output.speculation.fallbacks


@pytest.mark.parametrize("value", [1, "always", "True"])
def test_wrong_values(value):
    with pytest.raises(ValueError, match="`compile` must be True, False or 'auto'"):
        assistgen.generate(build(), prompt(5), speculation={"method": "ngram", "compile": value}, max_new_tokens=2)


@pytest.mark.weights
@pytest.mark.parametrize(("method", "rows"), [("ngram", 4), ("draft_model", 1)])
def test_real_text(smollm, method, rows):
    model, tokenizer = smollm
    tokenizer.padding_side = "left"
    texts = [f"Repeat word for word: {NOTE}", f"Copy this code:\n{CODE}", "Tell me about the sea.", f"When is the meeting? {NOTE}"]
    messages = [[{"role": "user", "content": text}] for text in texts[:rows]]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True)
    speculation = spec(method=method, **({"model": model} if method == "draft_model" else {}))
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    output = assistgen.generate(model, **inputs, max_new_tokens=24, do_sample=False, **DICT, speculation=speculation)
    for row in range(rows):
        start = int((inputs["attention_mask"][row] == 0).sum())
        comparison = identity.compare(model, plain[row, start:], output.sequences[row, start:])
        assert comparison.identical or comparison.proven_tie, str(comparison)
    assert output.speculation.num_accepted_tokens > 10 and not output.speculation.fallbacks
    assert output.speculation.num_captures % len(WIDTHS) == 0


@pytest.mark.weights
def test_real_chat(smollm):
    model, tokenizer = smollm
    speculator, ids, accepted = Speculator(spec()), torch.empty(1, 0, dtype=torch.long), 0
    kept = None
    for turn in (f"Remember this: {NOTE}", "Repeat it word for word."):
        ids = torch.cat([ids, chat(tokenizer, turn)["input_ids"]], dim=1)
        plain = model.generate(ids, max_new_tokens=24, do_sample=False)
        output = assistgen.generate(model, ids, max_new_tokens=24, do_sample=False, **DICT, **{compat.CACHE: kept}, speculation=speculator)
        comparison = identity.compare(model, plain[0], output.sequences[0])
        assert comparison.identical or comparison.proven_tie, str(comparison)
        accepted += output.speculation.num_accepted_tokens
        ids, kept = output.sequences, getattr(output, compat.CACHE)
    assert accepted > 10
