"""A draft model's steps from a copy with 8 bits a weight: they say what the model says, and where they can't be used nothing is."""

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

import assistgen
from assistgen import compat, fused, kernels, linear
from assistgen.control import DepthController, ForwardCosts
from assistgen.tokens import TokenBuffer

from .tiny import VOCAB, build, pad_left, prompt


pytestmark = pytest.mark.exactness


def qwen3():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, head_dim=16, initializer_range=0.3, **shape))
    for module in model.modules():
        if type(module).__name__ == "Qwen3RMSNorm":
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.float().eval()


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama": lambda: build("llama", dtype=torch.float32),
    "llama, all heads alike": lambda: build("llama", dtype=torch.float32, num_key_value_heads=4),
    "llama with biases": lambda: with_biases(build("llama", dtype=torch.float32, attention_bias=True, mlp_bias=True)),
    "llama, tied": lambda: build("llama", dtype=torch.float32, tie_word_embeddings=True),
    "llama, llama3 rotation": lambda: build("llama", dtype=torch.float32, rope_parameters=LLAMA3),
    "llama, yarn": lambda: build("llama", dtype=torch.float32, rope_parameters=YARN),
    "llama in bfloat16": lambda: build("llama", dtype=torch.bfloat16),
    "llama, fits tiles": lambda: build("llama", dtype=torch.float32, hidden_size=128, intermediate_size=192),
    "mistral": lambda: build("mistral", dtype=torch.float32, sliding_window=None),
    "qwen2": lambda: with_biases(build("qwen2", dtype=torch.float32)),
    "qwen3": qwen3,
}


def with_biases(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            torch.nn.init.normal_(module.bias)
    return model


def representable(model):
    """With weights that 8 bits can hold, so that its copy is no other model."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                scale = module.weight.float().abs().amax(1, keepdim=True).clamp_(min=1e-9) / 127
                module.weight.copy_((module.weight.float() / scale).round() * scale)
    return model


@pytest.fixture
def eager(monkeypatch):
    """Copies are made at once, however slow; counts the tokens of their forwards."""
    counts = []
    forward = fused.EightBits.forward

    def counted(self, ids, *args):
        counts.append(len(ids))
        return forward(self, ids, *args)

    monkeypatch.setattr(linear, "MIN_WORK", 0)
    monkeypatch.setattr(linear, "MARGIN", 0.0)
    monkeypatch.setattr(fused.EightBits, "forward", counted)
    return counts


def run(copy, ids, cells, start=0, row=0):
    """Logits of all of a row's tokens from `start` on."""
    numbers = torch.arange(len(ids))
    return copy.forward(ids, torch.stack([torch.full_like(ids, row), numbers + start], dim=1), numbers, cells)


@pytest.mark.parametrize("has_tiles", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_models(monkeypatch, name, has_tiles):
    if not has_tiles:
        monkeypatch.setattr(kernels, "has_tiles", lambda kind: False)
    model = representable(MODELS[name]())
    ids = prompt(40, seed=1)[0]
    with torch.no_grad():
        true = model(ids[None]).logits[0].float()
        copy = fused.EightBits(model)
    cells, start, parts = fused.Cells(copy, rows=1), 0, []
    for count in (5, 1, 2, 16, 3, 8, 4, 1):
        parts.append(run(copy, ids[start : start + count], cells, start))
        start += count
    tolerance = 0.3 if model.dtype == torch.bfloat16 else 0.05 if copy.is_in_tiles else 1e-3
    assert copy.is_in_tiles == (kernels.has_tiles("int8") and name == "llama, fits tiles")
    torch.testing.assert_close(torch.cat(parts), true, rtol=tolerance, atol=tolerance)
    assert copy.likeness > 0.99


def test_only_rounding_parts_a_copy_from_its_model():
    model = MODELS["qwen2"]()
    weight = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    with torch.no_grad():
        copy = fused.EightBits(model)
        true = model(prompt(12)).logits[0]
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, weight)
    own = run(copy, prompt(12)[0], fused.Cells(copy, rows=1))
    assert not torch.equal(own, true) and torch.nn.functional.cosine_similarity(own, true, dim=-1).min() > 0.98


@pytest.mark.parametrize("name", ["llama", "llama, fits tiles", "qwen3"])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_number_of_threads_changes_nothing(threads, name):
    model, usual = MODELS[name](), torch.get_num_threads()
    with torch.no_grad():
        copy = fused.EightBits(model)
    ids = prompt(11)[0]
    expected = run(copy, ids, fused.Cells(copy, rows=1))
    try:
        torch.set_num_threads(threads)
        assert torch.equal(run(copy, ids, fused.Cells(copy, rows=1)), expected)
    finally:
        torch.set_num_threads(usual)


def test_more_positions_than_there_was_room_for(monkeypatch):
    monkeypatch.setattr(fused, "CELLS", 4)
    model = representable(MODELS["llama"]())
    ids = prompt(30)[0]
    with torch.no_grad():
        true, copy = model(ids[None]).logits[0], fused.EightBits(model)
    cells = fused.Cells(copy, rows=1)
    assert cells.length < 30
    for at in range(30):
        torch.testing.assert_close(run(copy, ids[at : at + 1], cells, at)[0], true[at], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen2", "llama, fits tiles"])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 6, 9, 16, 20])
@pytest.mark.parametrize("lengths", [(24,), (24, 17), (24, 17, 20), (24, 17, 20, 9)], ids=str)
def test_rows_advance_on_their_own(lengths, width, name):
    """
    Padded prompts, rows that left, wrong branches that are gone back from, logits of some tokens only, and so much at once that it is
    taken in by parts, or read by the model itself.
    """
    model = representable(MODELS[name]())
    texts = [prompt(length + width, seed=length) for length in lengths]
    batch = pad_left([text[:, :-width] for text in texts])
    with torch.no_grad():
        true = [model(text).logits[0] for text in texts]
        copy = fused.EightBits(model)
        mask = batch["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)
        kwargs = {"use_cache": True, compat.CACHE: DynamicCache(), "attention_mask": mask, "position_ids": positions}
        tokens = TokenBuffer(batch["input_ids"])
        runner = fused.FusedRows(copy, model, tokens, Settings, kwargs, returns_cache=False, rows_come_back=True)
        runner.prefill()
        for rows in (list(range(len(lengths))), [len(lengths) - 1]):
            starts, tolerance = [max(lengths)] * len(rows), 0.1 if copy.is_in_tiles else 1e-3
            for wrong, wanted in ((True, 1), (False, 1), (False, width), (False, max(1, width - 1))):
                for row in rows:
                    tokens.ids[row, starts[0] : starts[0] + width] = 5 if wrong else texts[row][0, -width:]
                logits = runner.forward(rows, starts, [width] * len(rows), width, logits_to_keep=wanted).logits
                for row, own in zip(rows, logits, strict=True):
                    assert own.shape[0] == wanted
                    if not wrong:
                        torch.testing.assert_close(own, true[row][-wanted:], rtol=tolerance, atol=tolerance)


class Settings:
    prefill_chunk_size, output_attentions, max_length = None, False, 1 << 30


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_output_is_plain_generates(eager, name, rows):
    model, draft = MODELS[name](), MODELS[name]()
    inputs = pad_left([prompt(18 + row, seed=row) for row in range(rows)])
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    made = len(eager)
    fast = assistgen.generate(
        model, **inputs, max_new_tokens=24, do_sample=False, return_dict_in_generate=True,
        speculation={"method": "draft_model", "model": draft, "depth": "constant", "num_speculative_tokens": 4},
    )  # fmt: skip
    assert torch.equal(fast.sequences, plain)
    assert len(eager) > made
    assert fast.speculation.num_accepted_tokens > fast.speculation.num_draft_tokens / 2
    assert fast.speculation.fallbacks == {}


def test_drafts_are_drawn_from_it(eager):
    model, draft = MODELS["llama"](), MODELS["llama"]()
    fast = assistgen.generate(
        model, prompt(18), max_new_tokens=24, do_sample=True, top_k=0, return_dict_in_generate=True,
        speculation={"method": "draft_model", "model": draft, "depth": "constant", "draft_sample_method": "probabilistic"},
    )  # fmt: skip
    assert len(eager) > 0 and fast.speculation.num_accepted_tokens > 0 and fast.speculation.fallbacks == {}


@pytest.mark.parametrize("copies", ["none", "in the second turn", "in both"])
@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_next_turn_goes_on_where_the_last_one_ended(eager, monkeypatch, in_inference_mode, copies):
    if copies != "in both":
        monkeypatch.setattr(linear, "MIN_WORK", 1 << 60)
    model, draft = MODELS["llama"](), MODELS["llama"]()
    speculator = assistgen.Speculator({"method": "draft_model", "model": draft, "depth": "constant"})
    with torch.inference_mode(in_inference_mode):
        first = assistgen.generate(model, prompt(30), max_new_tokens=20, do_sample=False, speculation=speculator)
    read = []
    eager.clear()
    if copies == "in the second turn":
        monkeypatch.setattr(linear, "MIN_WORK", 0)
    prefill = type(draft)._prefill
    monkeypatch.setattr(type(draft), "_prefill", lambda self, *args, **kwargs: read.append(self) or prefill(self, *args, **kwargs))
    longer = torch.cat([first, prompt(30, seed=5)], dim=1)
    second = assistgen.generate(model, longer, max_new_tokens=20, do_sample=False, return_dict_in_generate=True, speculation=speculator)
    assert second.speculation.num_accepted_tokens > 0 and second.speculation.fallbacks == {}
    assert (draft in read) == in_inference_mode  # what was kept in inference mode can't be written to outside
    assert (sum(eager) > 0) == (copies != "none")
    assert torch.equal(second.sequences, model.generate(longer, max_new_tokens=20, do_sample=False))


def test_what_was_learned_of_another_speed_is_forgotten(eager, monkeypatch):
    model, draft = MODELS["llama"](), MODELS["llama"]()
    forgotten = []
    monkeypatch.setattr("assistgen.control.RoundPlan.renew", lambda self, source: forgotten.append(source))
    speculator = assistgen.Speculator({"method": "draft_model", "model": draft, "depth": "constant"})
    for min_work in (1 << 60, 1 << 60, 0, 0):
        monkeypatch.setattr(linear, "MIN_WORK", min_work)
        assistgen.generate(model, prompt(20), max_new_tokens=12, do_sample=False, speculation=speculator)
        assert (len(eager) > 0) == (min_work == 0)
    assert forgotten == ["draft_model"]


def test_renewed_knowledge():
    controller = DepthController()
    plan = controller.plan(1, ForwardCosts())
    plan.spent("draft_model", 2, 4.0)
    plan.spent("other", 2, 4.0)
    plan.renew("draft_model")
    assert list(controller.to_dict()["drafters"]) == ["other"]


def refused(change=lambda model: None, **overrides):
    model = build("llama", dtype=torch.float32, **overrides)
    change(model)
    return model


class Adapted(torch.nn.Linear):
    pass


def adapt(model):
    model.model.layers[1].mlp.down_proj.__class__ = Adapted


def exchange(model):
    model.model.layers[0].forward = model.model.layers[0].forward


def narrow(model):
    for name, shape in (("gate_proj", (32, 40)), ("up_proj", (32, 40)), ("down_proj", (40, 32))):
        setattr(model.model.layers[1].mlp, name, torch.nn.Linear(*shape, bias=False))


REFUSED = {
    "another family": lambda: build("gemma3", dtype=torch.float32),
    "a subclass": lambda: refused(lambda model: setattr(model, "__class__", type("Other", (type(model),), {}))),
    "double precision": lambda: build("llama"),
    "mixed types": lambda: refused(lambda model: model.lm_head.half()),
    "windows": lambda: build("mistral", dtype=torch.float32),
    "a hook": lambda: refused(lambda model: model.model.layers[0].register_forward_hook(lambda *_: None)),
    "an exchanged forward": lambda: refused(exchange),
    "an adapter": lambda: refused(adapt),
    "another activation": lambda: refused(hidden_act="gelu"),
    "positions that depend on the length": lambda: refused(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "layers of several sizes": lambda: refused(narrow),
    "odd sizes": lambda: refused(intermediate_size=44),
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_that_has_no_copy(eager, name):
    model = REFUSED[name]()
    assert fused.eight_bits(model, 100) is None and not fused.can_be_copied(model)
    assert fused.eight_bits(build("llama", dtype=torch.float32), 100) is not None  # it's not for another reason


def test_big_model_has_no_copy(eager, monkeypatch):
    monkeypatch.setattr(fused, "MAX_WEIGHTS", 1000)
    assert fused.eight_bits(build("llama", dtype=torch.float32), 100) is None


def test_not_for_a_few_tokens(eager, monkeypatch):
    model, other = MODELS["llama"](), MODELS["llama"]()
    monkeypatch.setattr(linear, "MIN_WORK", linear.work(model, 30))
    assert fused.eight_bits(model, 20) is None and fused.eight_bits(other, 20) is None
    assert fused.eight_bits(model, 20) is not None
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert fused.eight_bits(model, 20) is None and fused.eight_bits(model, 20) is not None


def test_recorded_outputs_do_not_rule_it_out(eager):
    model = MODELS["llama"]()
    model(prompt(5), output_hidden_states=True)
    assert fused.eight_bits(model, 100) is not None


def test_logits_that_are_no_numbers_stay_so():
    for name in ("llama", "llama, fits tiles"):
        model = MODELS[name]()
        with torch.no_grad():
            copy = fused.EightBits(model)
            copy._embeddings[7, 3] = float("nan")
        logits = run(copy, torch.tensor([5, 7]), fused.Cells(copy, rows=1))
        assert logits[0].isfinite().all() and logits[1].isnan().all()


@pytest.mark.parametrize(("what", "value"), [("LIKENESS", 1.1), ("MARGIN", 1e9)])
def test_copy_that_is_unlike_or_slow_is_not_used(eager, monkeypatch, what, value):
    monkeypatch.setattr(fused if what == "LIKENESS" else linear, what, value)
    model = MODELS["llama"]()
    assert fused.eight_bits(model, 100) is None
    measured = len(eager)
    assert fused.eight_bits(model, 100) is None and len(eager) == measured  # and not measured again


def test_copy_follows_its_model(eager):
    model = MODELS["llama"]()
    first = fused.eight_bits(model, 100)
    assert fused.eight_bits(model, 100) is first
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(2)
    second = fused.eight_bits(model, 100)
    assert second is not first
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    third = fused.eight_bits(model, 100)
    assert third is not second
    model.lm_head.weight.data += 0.1  # as adapters are merged
    assert fused.eight_bits(model, 100) is not third


def test_copy_ends_with_its_model(eager):
    model = MODELS["llama"]()
    copy = weakref.ref(fused.eight_bits(model, 100))
    assert copy() is not None
    del model
    gc.collect()
    assert copy() is None


def test_kernel_that_does_not_run_is_no_fault_of_the_call(eager, monkeypatch, caplog):
    def broken(*args):
        raise NotImplementedError("no compiler")

    monkeypatch.setattr(fused.EightBits, "forward", broken)
    model, draft = MODELS["llama"](), MODELS["llama"]()
    fast = assistgen.generate(model, prompt(18), max_new_tokens=12, do_sample=False, speculation={"method": "draft_model", "model": draft})
    assert torch.equal(fast, model.generate(prompt(18), max_new_tokens=12, do_sample=False))
    assert "kernel" in caplog.text


def test_where_torch_has_other_threads(eager, other_threads, caplog):
    assert fused.eight_bits(MODELS["llama"](), 100) is None
    assert eager == [] and caplog.text == ""


def test_target_is_not_copied(eager):
    """A draft made of the target's own layers runs on its weights."""
    model = MODELS["llama"]()
    assistgen.generate(
        model, prompt(18), max_new_tokens=12, do_sample=False, speculation={"method": "early_exit", "assistant_early_exit": 1}
    )
    assistgen.generate(model, prompt(18), max_new_tokens=12, do_sample=False, speculation={"method": "draft_model", "model": model})
    assert eager == []


def test_defaults_of_dtype_and_device_are_somebody_elses():
    model = representable(MODELS["llama"]())
    ids = prompt(12)[0]
    with torch.no_grad():
        true = model(ids[None]).logits[0]
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                copy = fused.EightBits(model)
                cells = fused.Cells(copy, rows=1)
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(run(copy, ids, cells), true, rtol=1e-3, atol=1e-3)
