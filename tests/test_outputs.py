"""`return_dict_in_generate`: scores, logits, hidden states and attentions equal plain generate's in shape and value."""

import pytest
import torch

import assistgen
from assistgen import SpeculationStats, compat
from assistgen.target import costs_of

from .oracles import OracleSpeculator
from .tiny import FAMILIES, build, pad_left, prompt


pytestmark = pytest.mark.exactness

ALL = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "do_sample": False,
    "max_new_tokens": 24,
}


def assert_same(plain, fast, name, tolerance=1e-5):
    left, right = getattr(plain, name), getattr(fast, name)
    if left is None:
        assert right is None
        return
    assert len(left) == len(right), name
    for p, f in zip(left, right, strict=True):
        for a, b in zip(*((p, f) if isinstance(p, tuple) else ((p,), (f,))), strict=True):
            assert (a is None) == (b is None), name
            if a is not None:
                assert a.shape == b.shape, name
                torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_row(family, cache):
    model = build(family)
    model.set_attn_implementation("eager")
    kwargs = dict(ALL)
    if cache == "static":
        if family in ("mistral", "gemma3"):
            pytest.skip("decoded plainly")
        kwargs["cache_implementation"] = "static"
    ids = prompt(14)
    plain = model.generate(ids, **kwargs)
    fast = assistgen.generate(model, ids, **kwargs, speculation=OracleSpeculator([plain.sequences[0, 14:].tolist()]))
    assert torch.equal(plain.sequences, fast.sequences)
    assert fast.speculation.num_accepted_tokens >= 15
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert_same(plain, fast, name)
    assert list(plain.keys()) == list(fast.keys())


@pytest.mark.parametrize("family", FAMILIES)
def test_second_turn(family):
    from assistgen import compat

    model = build(family)
    model.set_attn_implementation("eager")
    ids = prompt(14)
    outputs = []
    for speculates in (False, True):
        turn = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        follow = torch.cat([turn.sequences, prompt(5, seed=9)], dim=1)
        speculation = OracleSpeculator([outputs[0].sequences[0, 25:].tolist()]) if speculates else None
        outputs.append(assistgen.generate(model, follow, **ALL, speculation=speculation, **{compat.CACHE: getattr(turn, compat.CACHE)}))
    plain, fast = outputs
    assert fast.speculation.num_accepted_tokens >= 15
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert_same(plain, fast, name)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batch(family, implementation):
    # In float64 plain eager attention turns padding into NaN (its softmax is in float32).
    model = build(family, dtype=torch.float32)
    model.set_attn_implementation(implementation)
    inputs = pad_left([prompt(14, 1), prompt(9, 2), prompt(12, 3)])
    kwargs = dict(ALL, output_attentions=implementation == "eager")
    plain = model.generate(**inputs, **kwargs)
    fast = assistgen.generate(model, **inputs, **kwargs, speculation=OracleSpeculator(plain.sequences[:, 14:].tolist()))
    assert torch.equal(plain.sequences, fast.sequences)
    for name in ("scores", "logits"):
        assert_same(plain, fast, name, 1e-3)
    if fast.speculation.fallbacks:
        assert family in ("mistral", "gemma3")
        assert implementation == "eager"
        return
    assert fast.speculation.num_accepted_tokens >= 45
    # States of padding are nobody's: the first entry holds them for the whole prompt.
    for p, f in zip(plain.hidden_states[1:], fast.hidden_states[1:], strict=True):
        torch.testing.assert_close(p, f, atol=1e-3, rtol=1e-3)
    if implementation == "eager":
        for p, f in zip(plain.attentions[1:], fast.attentions[1:], strict=True):
            torch.testing.assert_close(p, f, atol=1e-3, rtol=1e-3)


def test_list_form_of_output_hidden_states():
    model, ids = build(), prompt(14)
    kwargs = dict(ALL, output_attentions=False, output_hidden_states=[1])
    plain = model.generate(ids, **kwargs)
    fast = assistgen.generate(model, ids, **kwargs, speculation=OracleSpeculator([plain.sequences[0, 14:].tolist()]))
    assert fast.speculation.num_accepted_tokens > 0
    assert_same(plain, fast, "hidden_states")


def test_statistics_are_an_attribute_and_add_up():
    model, ids = build(seed=1), prompt(40, period=5)
    output = assistgen.generate(
        model, ids, max_new_tokens=40, do_sample=False, return_dict_in_generate=True, speculation={"method": "ngram", "depth": "constant"}
    )
    stats = output.speculation
    assert isinstance(stats, SpeculationStats)
    assert "speculation" not in output.keys()  # noqa: SIM118
    assert not any(part is stats for part in output.to_tuple())
    assert stats.num_tokens == 40 == sum(row.num_tokens for row in stats.rows)
    assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos) <= stats.num_draft_tokens
    assert stats.num_tokens == stats.num_accepted_tokens + stats.target_forwards
    assert stats.mean_acceptance_length == 1 + stats.num_accepted_tokens / stats.num_drafts
    assert len(stats.itl_s) == 39
    assert sum(1 for seconds in stats.itl_s if seconds > 0) == stats.target_forwards - 1
    assert stats.ttft_s > 0
    assert stats.to_dict()["draft_acceptance_rate"] == stats.draft_acceptance_rate


def test_plain_calls_have_empty_statistics():
    output = assistgen.generate(build(), prompt(8), speculation=None, max_new_tokens=4, return_dict_in_generate=True)
    assert output.speculation.num_drafts == 0
    assert output.speculation.num_accepted_tokens == 0


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_filled_up_because_that_is_cheaper(family, cache):
    """Two tokens measured to cost less than one, and nothing to draft: the filling shows nowhere."""
    if cache == "static" and family in ("mistral", "gemma3"):
        pytest.skip("decoded plainly")
    model, ids = build(family, seed=2), prompt(24)
    config = {"max_new_tokens": 24, "do_sample": False, "output_scores": True, "output_hidden_states": True, "output_attentions": True}
    if cache == "static":
        config["cache_implementation"] = "static"
    model.set_attn_implementation("eager")
    plain = model.generate(ids, return_dict_in_generate=True, **config)
    for _ in range(9):
        for width in range(1, 17):
            costs_of(model).record(1, width, {1: 9.0, 2: 5.0}.get(width, 8.0))
    widths = []
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    speculation = {"method": "ngram", "prompt_lookup_min": 20}
    fast = assistgen.generate(model, ids, speculation=speculation, return_dict_in_generate=True, **config)
    handle.remove()
    assert widths.count(2) > 15
    assert torch.equal(plain.sequences, fast.sequences)
    assert fast.speculation.num_plain_steps > 15
    for name in ("scores", "hidden_states", "attentions"):
        assert_same(plain, fast, name)
    assert compat.length_of(plain[compat.CACHE]) == compat.length_of(fast[compat.CACHE])
