"""Draft models: exactness, the acceptance rules, padded vocabularies, what is kept and what stays untouched."""

import copy

import pytest
import torch
from scipy.stats import chi2

import assistgen
from assistgen import Speculator, compat
from assistgen.acceptance import Verdict, residual, verify_block
from assistgen.control import ForwardCosts
from assistgen.drafters.base import Draft
from assistgen.target import costs_of

from .oracles import assert_same_distribution, count_pairs, draft_blindly
from .tiny import FAMILIES, build, pad_left, prompt


pytestmark = pytest.mark.exactness

KW = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}


def small(family, seed=7, **overrides):
    """A draft model of its own weights: mostly wrong, which exactness must survive."""
    return build(family, seed=seed, **({} if family in ("gemma3", "gpt2") else {"num_hidden_layers": 1}) | overrides)


def spec(model, **keys):
    return {"method": "draft_model", "model": model, "depth": "constant", **keys}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(family, depth, rows):
    model = build(family)
    inputs = pad_left([prompt(14, 1), prompt(9, 2), prompt(12, 3)][:rows])
    plain = model.generate(**inputs, **KW)
    own = assistgen.generate(model, **inputs, **KW, speculation=spec(model, num_speculative_tokens=depth))
    assert torch.equal(plain.sequences, own.sequences)
    stats = own.speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert not stats.fallbacks
    assert stats.target_forwards == 1 + -(-29 // (depth + 1))
    assert stats.draft_forwards > 0
    other = assistgen.generate(model, **inputs, **KW, speculation=spec(small(family), num_speculative_tokens=depth))
    assert torch.equal(plain.sequences, other.sequences)
    assert other.speculation.num_draft_tokens > 0
    assert not other.speculation.fallbacks


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_drafts_wider_than_a_ring(family, rows):
    model = build(family)
    inputs = pad_left([prompt(14, 1), prompt(9, 2)][:rows])
    kwargs = dict(KW, max_new_tokens=80)
    plain = model.generate(**inputs, **kwargs)
    for draft in (model, small(family)):
        output = assistgen.generate(model, **inputs, **kwargs, speculation=spec(draft, num_speculative_tokens=60))
        assert torch.equal(plain.sequences, output.sequences)
        assert not output.speculation.fallbacks


@pytest.mark.parametrize("rows", [1, 3])
def test_adaptive_depth_and_confidence(rows):
    model = build("llama")
    inputs = pad_left([prompt(14, 1), prompt(9, 2), prompt(12, 3)][:rows])
    plain = model.generate(**inputs, **KW)
    for speculation in (
        {"method": "draft_model", "model": model},
        spec(model, draft_confidence_threshold=0.9),
        {"drafters": ["ngram", {"method": "draft_model", "model": model}]},
        {"drafters": ["ngram", {"method": "draft_model", "model": small("llama")}], "depth": "constant"},
    ):
        output = assistgen.generate(model, **inputs, **KW, speculation=speculation)
        assert torch.equal(plain.sequences, output.sequences)
        assert not output.speculation.fallbacks
    sure = assistgen.generate(model, **inputs, **KW, speculation=spec(model, draft_confidence_threshold=1.0))
    assert sure.speculation.num_draft_tokens == 0


def test_chain_marks_its_sources():
    model, ids = build("llama"), prompt(30, 1, 5)
    chunks = assistgen.stream(
        model, _NoText(), ids, max_new_tokens=40, do_sample=False,
        speculation={"drafters": ["ngram", {"method": "draft_model", "model": model}], "depth": "constant"},
    )  # fmt: skip
    sources = {source for chunk in chunks for source in chunk.sources}
    assert "draft_model" in sources
    assert sources <= {"target", "ngram", "draft_model"}


class _NoText:
    def decode(self, ids, **kwargs):
        return ""


def test_transformers_own_arguments():
    model, ids = build("llama"), prompt(14)
    plain = model.generate(ids, **KW)
    output = assistgen.generate(model, ids, **KW, assistant_model=model, num_assistant_tokens=3)
    assert torch.equal(plain.sequences, output.sequences)
    assert 0 < len(output.speculation.num_accepted_tokens_per_pos) <= 3
    with assistgen.enable(model, "ngram"):
        output = model.generate(ids, **KW, assistant_model=model)
    assert output.speculation.draft_forwards > 0
    with pytest.raises(ValueError, match="assistant_model"):
        assistgen.generate(model, ids, **KW, assistant_model=model, speculation="ngram")


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("padded", ["target", "draft"])
def test_padded_vocabularies(padded, do_sample):
    """The same model with rows added to its embedding: as real pairs come."""
    model = build("llama")
    wide = copy.deepcopy(model)
    wide.resize_token_embeddings(96, mean_resizing=False)
    wide.lm_head.weight[80:] = 0
    target, draft = (wide, model) if padded == "target" else (model, wide)
    ids = prompt(14)
    kwargs = dict(KW, do_sample=do_sample)
    torch.manual_seed(5)
    plain = target.generate(ids, **kwargs)
    torch.manual_seed(5)
    output = assistgen.generate(target, ids, **kwargs, speculation=spec(draft))
    assert torch.equal(plain.sequences, output.sequences)
    assert output.speculation.num_accepted_tokens > (0 if do_sample else 20)
    if do_sample:
        output = assistgen.generate(target, ids, **kwargs, speculation=spec(draft, draft_sample_method="probabilistic"))
        assert output.sequences.max() < target.config.vocab_size
        assert output.speculation.num_accepted_tokens > 0


def test_ids_that_the_draft_model_does_not_know():
    model = build("llama")
    draft = small("llama", vocab_size=40)
    ids = prompt(14)
    plain = model.generate(ids, **KW)
    output = assistgen.generate(model, ids, **KW, speculation=spec(draft))
    assert torch.equal(plain.sequences, output.sequences)
    assert output.speculation.num_draft_tokens > 0
    assert not output.speculation.fallbacks


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_argmax_drafts_give_the_same_sampled_text(family):
    model, ids = build(family), prompt(14)
    accepted = 0
    for seed in range(20):
        kwargs = {"do_sample": True, "temperature": 0.6, "max_new_tokens": 20, "return_dict_in_generate": True}
        torch.manual_seed(seed)
        plain = model.generate(ids, **kwargs)
        torch.manual_seed(seed)
        output = assistgen.generate(model, ids, **kwargs, speculation=spec(model, num_speculative_tokens=3))
        assert torch.equal(plain.sequences, output.sequences)
        accepted += output.speculation.num_accepted_tokens
    assert accepted > 0


def test_a_speculator_keeps_the_drafts_cache():
    """The second turn's draft takes in only what is new."""
    model, draft = build("llama"), small("llama")
    speculator = Speculator(spec(draft))
    ids = prompt(60, 3)
    first = assistgen.generate(model, ids, **KW, speculation=speculator)
    follow = torch.cat([first.sequences, prompt(5, 9)], dim=1)
    fed = []
    handle = draft.register_forward_pre_hook(lambda m, a, kw: fed.append(kw["input_ids"].shape[1]), with_kwargs=True)
    plain = model.generate(follow, **KW)
    second = assistgen.generate(model, follow, **KW, speculation=speculator)
    other = assistgen.generate(model, prompt(20, 4), **KW, speculation=speculator)
    handle.remove()
    assert torch.equal(plain.sequences, second.sequences)
    assert torch.equal(model.generate(prompt(20, 4), **KW).sequences, other.sequences)
    assert fed[0] <= 5 + 12
    assert 20 in fed  # another text starts anew


def test_a_long_text_is_not_read_before_its_price_is_known(monkeypatch):
    model, draft = build("llama"), build("llama")
    fed, read = [], []
    draft.register_forward_pre_hook(lambda m, a, kw: fed.append(kw["input_ids"].shape[1]), with_kwargs=True)
    monkeypatch.setattr(
        ForwardCosts, "record_reading", lambda self, tokens, seconds: read.append(tokens) or setattr(self, "_read", [1.0, 1e6])
    )
    ids = prompt(200, 3)
    plain = model.generate(ids, **KW)
    output = assistgen.generate(model, ids, **KW, speculation=spec(draft, depth="adaptive"))
    assert fed == [64, 64] and read == [64]  # too dear
    assert torch.equal(plain.sequences, output.sequences) and output.speculation.draft_forwards == 2
    costs_of(draft)._read = [1.0, 1e-9]
    output = assistgen.generate(model, ids, **KW, speculation=spec(draft, depth="adaptive"))
    assert 200 in fed and read[1:] == [200] and output.speculation.num_accepted_tokens > 0
    assert torch.equal(plain.sequences, output.sequences)
    other, fed[:] = build("llama"), []
    other.register_forward_pre_hook(lambda m, a, kw: fed.append(kw["input_ids"].shape[1]), with_kwargs=True)
    assistgen.generate(model, ids, **KW, speculation=spec(other, depth="constant"))
    assert fed[0] == 200  # whatever it costs


def test_an_answer_that_cannot_repay_taking_in_the_text():
    """It is decoded plainly, and what was kept of an earlier text is there for its next turn."""
    model, draft = build("llama"), build("llama")
    speculator = Speculator(spec(draft, depth="adaptive"))
    ids = prompt(60, 3)
    first = assistgen.generate(model, ids, **KW, speculation=speculator)
    known = speculator.controller._known("draft_model")
    costs_of(draft).record_reading(1, 1e6)
    known.pace.tokens, known.is_idle = 1e9, False  # whatever this machine's clock made of a target that drafts for itself
    fed = []
    handle = draft.register_forward_pre_hook(lambda m, a, kw: fed.append(kw["input_ids"].shape[1]), with_kwargs=True)
    other = assistgen.generate(model, prompt(60, 4), **KW, speculation=speculator)
    # The model's price is known, whoever asks.
    assistgen.generate(model, prompt(60, 5), **KW, speculation=Speculator(spec(draft, depth="adaptive")))
    assert fed == []
    costs_of(draft).record_reading(1 << 50, 0.0)  # cheap again
    follow = torch.cat([first.sequences, prompt(5, 9)], dim=1)
    second = assistgen.generate(model, follow, **KW, speculation=speculator)
    handle.remove()
    assert 0 < max(fed) < 50
    assert torch.equal(model.generate(prompt(60, 4), **KW).sequences, other.sequences)
    assert torch.equal(model.generate(follow, **KW).sequences, second.sequences)


def test_the_draft_model_stays_as_it_is():
    model, draft = build("gemma3"), small("gemma3")
    ids = prompt(14)
    before = {name: weight.clone() for name, weight in draft.state_dict().items()}
    settings = (draft.config.to_dict(), draft.generation_config.to_dict(), set(vars(draft)), len(draft._forward_hooks))
    said = draft.generate(ids, **KW).sequences

    class Fails(Exception):
        pass

    def criterion(ids, scores):
        if ids.shape[1] > 24:
            raise Fails
        return torch.zeros(1, dtype=torch.bool)

    for kwargs in ({}, {"do_sample": True}, {"stopping_criteria": [criterion]}):
        try:
            assistgen.generate(model, ids, **KW | kwargs, speculation=spec(draft, draft_sample_method="probabilistic"))
        except Fails:
            assert "stopping_criteria" in kwargs
        assert settings == (draft.config.to_dict(), draft.generation_config.to_dict(), set(vars(draft)), len(draft._forward_hooks))
        assert all(torch.equal(before[name], weight) for name, weight in draft.state_dict().items())
        assert torch.equal(said, draft.generate(ids, **KW).sequences)


def test_the_draft_never_delays_the_first_token():
    model, draft = build("llama"), small("llama")
    order = []
    model.register_forward_pre_hook(lambda *a: order.append("target"))
    draft.register_forward_pre_hook(lambda *a: order.append("draft"))

    class Streamer:
        def put(self, value):
            order.append("token")

        def end(self):
            pass

    assistgen.generate(model, prompt(14), max_new_tokens=8, do_sample=False, speculation=spec(draft), streamer=Streamer())
    assert order[:4] == ["token", "target", "token", "draft"]  # the prompt, the prefill, the first token


def test_refusals():
    model = build("llama")
    for speculation, named in (
        ({"method": "draft_model"}, "model"),
        ({"method": "draft_model", "model": build("mamba")}, "model"),
        ({"method": "ngram", "model": model}, "model"),
        ({"method": "draft_model", "model": model, "draft_temperature": 0}, "draft_temperature"),
        ({"method": "draft_model", "model": model, "draft_confidence_threshold": 2}, "draft_confidence_threshold"),
        ({"method": "draft_model", "model": model, "rejection_sample_method": "synthetic"}, "rejection_sample_method"),
        ({"drafters": [{"method": "draft_model", "model": model}, "ngram"]}, "drafters"),
        ({"drafters": []}, "drafters"),
    ):
        with pytest.raises((ValueError, TypeError), match=named):
            assistgen.generate(model, prompt(9), speculation=speculation, max_new_tokens=4)
    with pytest.raises(ValueError, match="block"):
        assistgen.generate(
            model, prompt(9), do_sample=True, logits_processor=[lambda ids, scores: scores], max_new_tokens=4,
            speculation=spec(model, draft_sample_method="probabilistic", rejection_sample_method="block"),
        )  # fmt: skip


# The acceptance rules

P = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.5, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)


def test_standard_rule_by_enumeration():
    """Over all drafts and both outcomes the committed token has the target's distribution."""
    p, q = P[0], Q[0]
    said = torch.zeros(4, dtype=torch.float64)
    for drafted in range(4):
        accept = min(1.0, float(p[drafted] / q[drafted]))
        said[drafted] += q[drafted] * accept
        said += q[drafted] * (1 - accept) * residual(P[:1], Q[:1])[0]
    torch.testing.assert_close(said, p)


def block_law(p, q, tokens, monkeypatch):
    """The law of `verify_block` for one draft: probability of each number kept, with the distribution after it."""
    law, chances = [], []

    class Uniform:
        """Every chance that is compared with it is noted, and refused."""

        def __float__(self):
            return self

        def __lt__(self, chance):
            chances.append(chance)
            return chosen[len(chances) - 1]

    for kept in range(len(tokens) + 1):
        chances.clear()
        chosen = [i + 1 == kept for i in range(len(tokens))]
        monkeypatch.setattr("assistgen.acceptance.float", lambda v: v if isinstance(v, Uniform) else float(v), raising=False)
        monkeypatch.setattr(torch, "rand", lambda *a, **k: Uniform())
        got, after = verify_block(p, q, tokens)
        monkeypatch.undo()
        assert got == kept
        probability = chances[kept - 1] if kept else 1.0
        for later in chances[kept:]:
            probability *= 1 - later
        law.append((probability, after))
    return law


def test_block_rule_by_enumeration(monkeypatch):
    """Two drafted tokens and the one after: the first two committed have the target's joint distribution."""
    joint = torch.zeros(4, 4, dtype=torch.float64)
    for first in range(4):
        for second in range(4):
            weight = float(Q[0, first] * Q[1, second])
            for kept, (probability, after) in enumerate(block_law(P, Q, [first, second], monkeypatch)):
                if kept == 0:
                    joint += weight * probability * after[:, None] * P[1][None, :]
                elif kept == 1:
                    joint[first] += weight * probability * after
                else:
                    joint[first, second] += weight * probability
    torch.testing.assert_close(joint, P[0][:, None] * P[1][None, :])


def test_verdict_draws_from_the_target():
    """Twenty thousand drafts of the wrong distribution; a chi-squared test at a level of 1e-6."""
    torch.manual_seed(0)
    counts = torch.zeros(4)
    scores = P[:1].log().float()
    for _ in range(20_000):
        drafted = int(torch.multinomial(Q[0], 1))
        counts[Verdict(Draft([drafted], "x", probs=Q[:1].float()), do_sample=True).choose(0, scores)[0]] += 1
    expected = P[0] * 20_000
    assert float(((counts - expected) ** 2 / expected).sum()) < chi2.ppf(1 - 1e-6, df=3)


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("rows", [1, 2])
def test_statistics_of_probabilistic_drafts(rule, rows):
    """
    The joint histogram of the second and third token over 1,500 seeds a row, plain against accelerated: a two-sample chi-squared test
    at a level of 1e-5 (one false alarm in 100,000 runs of a test). The first token isn't drafted.
    """
    model = build("llama", vocab_size=10, seed=3, initializer_range=0.15, dtype=torch.float32)
    draft = small("llama", vocab_size=10, seed=5, initializer_range=0.15, dtype=torch.float32)
    ids = torch.tensor([[2, 3, 4, 5]])
    kwargs = {"do_sample": True, "temperature": 0.9, "top_k": 6, "max_new_tokens": 4}
    copies = 250
    counts = torch.zeros(2, 100)
    accepted = 0
    speculator = Speculator(
        {"method": "draft_model", "model": draft, "depth": "constant", "num_speculative_tokens": 3,
         "draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    )  # fmt: skip
    torch.manual_seed(11)
    first = torch.tensor([[2, 3, 4, 5, 6]])
    for side in (0, 1):
        for _ in range(6 if rows == 2 else 1):
            if side == 0:
                sequences = model.generate(first, **kwargs, num_return_sequences=copies if rows == 2 else 1500)
            elif rows == 2:
                output = assistgen.generate(
                    model, first, **kwargs, num_return_sequences=copies, speculation=speculator, return_dict_in_generate=True
                )
                sequences, accepted = output.sequences, accepted + output.speculation.num_accepted_tokens
            else:
                outputs = [
                    assistgen.generate(model, first, **kwargs, speculation=speculator, return_dict_in_generate=True) for _ in range(1500)
                ]
                sequences = torch.cat([output.sequences for output in outputs])
                accepted += sum(output.speculation.num_accepted_tokens for output in outputs)
            for a, b in sequences[:, ids.shape[1] + 2 : ids.shape[1] + 4].tolist():
                counts[side, a * 10 + b] += 1
    assert accepted > 500
    assert counts.sum(1).tolist() == [1500, 1500]
    assert_same_distribution(counts)


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("what", ["confidence", "bans"])
def test_no_drawn_token_is_left_out_for_what_it_is(what, rule):
    """
    A drawn token is judged, or it wasn't drawn: leaving it out because it is unlikely, dear to verify or banned, and letting the target
    draw in its place, would shift the distribution. Joint histogram of the second and third token, 6,000 rows a side, chi-squared at
    1e-5.
    """
    model = build("llama", vocab_size=10, seed=3, initializer_range=0.15, dtype=torch.float32)
    draft = small("llama", vocab_size=10, seed=5, initializer_range=0.3, dtype=torch.float32)
    ids = torch.tensor([[2, 3, 4, 5, 6]])
    kwargs = {"do_sample": True, "temperature": 0.9, "top_k": 0, "max_new_tokens": 4, "num_return_sequences": 250}
    config = {"method": "draft_model", "model": draft, "depth": "constant", "num_speculative_tokens": 2,
              "draft_sample_method": "probabilistic", "rejection_sample_method": rule}  # fmt: skip
    if what == "confidence":
        config["draft_confidence_threshold"] = 0.25
    else:
        kwargs["suppress_tokens"] = [3, 7, 8]
    speculator = Speculator(config)
    torch.manual_seed(5)
    accepted, counts = count_pairs(model, ids, speculator, kwargs, at=6, calls=24)
    assert accepted > 500
    assert_same_distribution(counts)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_drafting_without_looking(family, rows, sampled, monkeypatch):
    """The loop of devices where a look at a token makes the host wait, run here; forwards of two tokens seem cheaper than of one."""
    model = build(family)
    for _ in range(5):
        for width, seconds in ((1, 9.0), (2, 5.0), (4, 6.0)):
            costs_of(model).record(rows, width, seconds)
    draft_blindly(monkeypatch)
    inputs = pad_left([prompt(14 + 3 * row, seed=row) for row in range(rows)])
    kwargs = {"max_new_tokens": 24, "do_sample": sampled, "return_dict_in_generate": True}
    speculation = {"method": "draft_model", "model": model, "depth": "constant", "num_speculative_tokens": 4}
    torch.manual_seed(3)
    plain = model.generate(**inputs, **kwargs)
    torch.manual_seed(3)
    output = assistgen.generate(model, **inputs, **kwargs, speculation=speculation)
    if rows == 1 or not sampled:
        assert torch.equal(output.sequences, plain.sequences)
    assert not output.speculation.fallbacks
    assert output.speculation.num_accepted_tokens > (1 if sampled else 15) * rows


@pytest.mark.parametrize("rows", [1, 2])
def test_the_controller_cuts_no_drawn_tokens(rows):
    """Its estimate of a drawn token's chance depends on the token; only before the draw may it say no."""
    model, ids = build(vocab_size=10), torch.tensor([[2, 3, 4, 5]]).repeat(rows, 1)
    config = {"method": "draft_model", "model": small("llama", vocab_size=10), "num_speculative_tokens": 3}
    kwargs = {"do_sample": True, "max_new_tokens": 20, "return_dict_in_generate": True}
    for method, cuts in (("probabilistic", False), ("greedy", True)):
        speculator = Speculator(config | {"draft_sample_method": method})
        speculator.controller.trim = lambda drafts, costs: 0
        stats = assistgen.generate(model, ids, speculation=speculator, **kwargs).speculation
        assert stats.draft_forwards > 0
        assert (stats.num_draft_tokens == 0) == cuts


def test_cache_of_the_target_is_returned_whole():
    model, ids = build("mistral"), prompt(14)
    plain = model.generate(ids, **KW)
    output = assistgen.generate(model, ids, **KW, speculation=spec(small("mistral")))
    assert compat.length_of(getattr(plain, compat.CACHE)) == compat.length_of(getattr(output, compat.CACHE))
