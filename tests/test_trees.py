"""Draft trees: several guesses for a place in one forward, of which the target's own is kept."""

import pytest
import torch
from transformers import DynamicCache

import assistgen
from assistgen import Speculator, compat
from assistgen.bans import HardBans
from assistgen.control import DepthController, ForwardCosts, ShadowedDraft
from assistgen.drafters.base import Draft, Drafter, chance_of, evidence_of
from assistgen.drafters.suffix import SuffixDrafter
from assistgen.fallback import Breaker, GuardedDrafter
from assistgen.stats import SpeculationStats
from assistgen.target import RowsApart

from .oracles import PARENTS, OracleTrees, TreeSpeculator, assert_same_distribution, count_pairs
from .test_stopping import tokenizer  # noqa: F401
from .tiny import VOCAB, build, changing, pad_left, prompt


NEW = 32
DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def both(model, inputs, **kwargs):
    """Plain and accelerated, from the same seed."""
    torch.manual_seed(3)
    plain = model.generate(**inputs, **kwargs, **DICT)
    torch.manual_seed(3)
    truth = plain.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return plain, assistgen.generate(model, **inputs, **kwargs, **DICT, speculation=TreeSpeculator(truth))


def assert_equal(plain, fast):
    assert torch.equal(plain.sequences, fast.sequences)
    for p, f in zip(plain.scores + plain.logits, fast.scores + fast.logits, strict=True):
        torch.testing.assert_close(p, f, atol=1e-5, rtol=1e-5)  # recorded in float32
    for p, f in zip(getattr(plain, compat.CACHE).layers, getattr(fast, compat.CACHE).layers, strict=True):
        torch.testing.assert_close(p.keys, f.keys, atol=1e-5, rtol=1e-4)  # "eager" goes through float32
        torch.testing.assert_close(p.values, f.values, atol=1e-5, rtol=1e-4)
    assert not fast.speculation.fallbacks
    assert fast.speculation.num_tokens == NEW
    assert fast.speculation.target_forwards < NEW / 2


@pytest.mark.exactness
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_family(family, attention, moved):
    model = build(family, attn_implementation=attention)
    assert_equal(*both(model, {"input_ids": prompt(24, period=5)}, do_sample=False, max_new_tokens=NEW))
    assert len(moved) > 5


@pytest.mark.exactness
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_filling_behind_a_tree(attention, moved, monkeypatch):
    monkeypatch.setattr(OracleTrees, "constant_depth", False)
    monkeypatch.setattr(DepthController, "trim", lambda self, drafts, costs: max(len(draft.tokens) for draft in drafts))
    monkeypatch.setattr(DepthController, "width", lambda self, rows, depth, room, costs: min(depth + 3, room) + 1)
    model = build(attn_implementation=attention)
    assert_equal(*both(model, {"input_ids": prompt(24, period=5)}, do_sample=False, max_new_tokens=NEW))
    assert len(moved) > 5


@pytest.mark.exactness
@pytest.mark.parametrize("length", [24, 48])
def test_a_rotary_embedding_that_changes(length, moved):
    """Up to where Phi-3 drops its cache, and behind it."""
    model, new = changing("longrope"), NEW if compat.CACHE == "cache" or length > 40 else 40 - length
    ids = prompt(length, period=5)
    plain, fast = both(model, {"input_ids": ids}, do_sample=False, max_new_tokens=new)
    assert torch.equal(plain.sequences, fast.sequences)
    for p, f in zip(plain.scores, fast.scores, strict=True):
        torch.testing.assert_close(p, f, atol=1e-5, rtol=1e-5)
    assert bool(moved) != bool(fast.speculation.fallbacks)


@pytest.mark.exactness
@pytest.mark.parametrize(
    "kwargs",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 9, "repetition_penalty": 1.2},
        {"do_sample": False, "no_repeat_ngram_size": 3, "repetition_penalty": 1.3},
        {"do_sample": False, "prefill_chunk_size": 7},
    ],
    ids=lambda kwargs: ",".join(kwargs),
)
def test_arguments(kwargs, moved):
    assert_equal(*both(build(), {"input_ids": prompt(24, period=5)}, max_new_tokens=NEW, **kwargs))
    assert len(moved) > 5


@pytest.mark.exactness
def test_padding(moved):
    inputs = pad_left([prompt(9, 2), prompt(24, 1)])
    assert_equal(*both(build(), {name: ids[:1] for name, ids in inputs.items()}, do_sample=False, max_new_tokens=NEW))
    assert len(moved) > 5


@pytest.mark.exactness
def test_second_turn(moved):
    model, turns = build(), []
    for speculates in (False, True):
        ids, cache = prompt(24, period=5), {}
        for turn in range(2):
            kwargs = {"max_new_tokens": NEW, "do_sample": False, **DICT, **cache}
            if speculates:
                speculation = TreeSpeculator(turns[turn].sequences[0, ids.shape[1] :].tolist())
                output = assistgen.generate(model, ids, speculation=speculation, **kwargs)
                assert_equal(turns[turn], output)
            else:
                output = model.generate(ids, **kwargs)
                turns.append(output)
            cache = {compat.CACHE: getattr(output, compat.CACHE)}
            ids = torch.cat([output.sequences, prompt(6, seed=8)], dim=1)
        if not speculates:  # the first turn's cache has gone on
            turns[0] = model.generate(prompt(24, period=5), max_new_tokens=NEW, do_sample=False, **DICT)
    assert len(moved) > 10


@pytest.mark.exactness
@pytest.mark.parametrize("end", ["length", "token", "criterion"])
def test_stops_inside_a_tree(end, moved):
    """At every place that the text may end."""
    model, ids = build(), prompt(24, period=5)
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, 24:].tolist()
    for length in range(2, 16):
        kwargs = {"max_new_tokens": NEW, "do_sample": False}
        if end == "length":
            kwargs["max_new_tokens"] = length
        elif end == "token":
            kwargs["eos_token_id"] = text[length]
        else:
            kwargs["stopping_criteria"] = [lambda ids, scores, last=length: torch.tensor([ids.shape[1] >= 24 + last])]
        plain = model.generate(ids, **kwargs)
        assert torch.equal(plain, assistgen.generate(model, ids, **kwargs, speculation=TreeSpeculator(text)))
    assert len(moved) > 5


@pytest.mark.exactness
@pytest.mark.parametrize("what", ["sliding", "window", "static", "states", "batch", "in step", "constant", "heuristic"])
def test_where_chains_are_drafted(what):
    """Where a tree couldn't be verified, or wouldn't be cut to what pays."""
    model = build("mistral" if what in ("sliding", "window") else "llama")
    inputs = {"input_ids": prompt(24, period=5)}
    kwargs = {"max_new_tokens": NEW, "do_sample": False}
    speculation = {"method": "suffix", "depth": what if what in ("constant", "heuristic") else "adaptive"}
    if what == "static":
        kwargs["cache_implementation"] = "static"
    elif what == "states":
        kwargs |= {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}
    elif what in ("batch", "in step"):
        inputs = pad_left([prompt(24, 1, 5), prompt(9, 2, 3)])
    elif what == "window":  # of the model's, on a cache without one
        kwargs[compat.CACHE] = DynamicCache()
    taken = []
    propose = SuffixDrafter.propose

    def proposing(self, rows, max_tokens, plan):
        taken.append(plan.takes_trees)
        return propose(self, rows, max_tokens, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SuffixDrafter, "propose", proposing)
        if what == "in step":
            patch.setattr(RowsApart, "why_not", staticmethod(lambda *_: "in step"))
        fast = assistgen.generate(model, **inputs, **kwargs, speculation=speculation)
    plain = model.generate(**inputs, **kwargs | ({compat.CACHE: DynamicCache()} if what == "window" else {}))
    assert torch.equal(getattr(plain, "sequences", plain), getattr(fast, "sequences", fast))
    assert taken
    assert not any(taken)


def test_suffix_drafts_trees(moved, monkeypatch):
    """The whole way, every token of a tree verified: another token than the likeliest one was right."""
    monkeypatch.setattr(DepthController, "trim", lambda self, drafts, costs: max(len(draft.tokens) for draft in drafts))
    for seed in range(5):
        model, ids = build(seed=seed), prompt(60, seed)
        kwargs = {"max_new_tokens": 60, "do_sample": True, "temperature": 0.5}
        torch.manual_seed(seed)
        plain = model.generate(ids, **kwargs)
        torch.manual_seed(seed)
        assert torch.equal(plain, assistgen.generate(model, ids, **kwargs, speculation="suffix"))
    assert len(moved) > 5


def test_stream_tells_the_path(moved, tokenizer):  # noqa: F811
    """Of a tree, what was accepted, and how the guess would have gone on."""
    model, ids = build(), prompt(24, period=5)
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, 24:].tolist()
    chunks = list(assistgen.stream(model, tokenizer, ids, max_new_tokens=NEW, do_sample=False, speculation=TreeSpeculator(text)))
    assert [token for chunk in chunks for token in chunk.token_ids] == text
    for chunk in chunks[1:-1]:
        accepted = sum(source == "oracle" for source in chunk.sources)
        assert chunk.draft_ids[:accepted] == chunk.token_ids[:accepted]
        assert accepted <= len(chunk.draft_ids) <= 3
    assert any(len(chunk.draft_ids) > len(chunk.token_ids) - 1 for chunk in chunks[1:])  # and how it would have gone on
    assert len(moved) > 5


def test_sampled_distribution(monkeypatch):
    """A draw more or less than plain decoding's, or a token preferred because it was drafted, would show."""
    monkeypatch.setattr(DepthController, "trim", lambda self, drafts, costs: max(len(draft.tokens) for draft in drafts))
    model, ids = build(vocab_size=10), prompt(20) % 8 + 2
    accepted, counts = count_pairs(model, ids, Speculator("suffix"), {"max_new_tokens": 4, "do_sample": True}, 21, calls=1000)
    assert accepted > 100
    assert_same_distribution(counts)


# The draft


TREE = Draft([5, 6, 7, 8, 6], "x", (1, 2, 3, 4, 5), parents=[-1, -1, 0, 1, 0])


def test_walking():
    assert [TREE.children(node) for node in range(-1, 5)] == [[0, 1], [2, 4], [3], [], [], []]
    assert TREE.follow(-1, 6) == 1
    assert TREE.follow(0, 6) == 4
    assert TREE.follow(1, 6) is None
    assert TREE.path(4) == [0, 4]
    assert TREE.depths() == [1, 1, 2, 2, 2]
    assert [TREE.path_on(path) for path in ([], [1], [0, 4])] == [[0, 2], [1, 3], [0, 4]]
    chain = Draft([5, 6], "x")
    assert [chain.children(node) for node in range(-1, 2)] == [[0], [1], []]
    assert (chain.follow(-1, 5), chain.follow(0, 6), chain.follow(1, 6), chain.follow(-1, 6)) == (0, 1, None, None)
    assert (chain.path(1), chain.depths()) == ([0, 1], [1, 2])


def test_cutting():
    assert TREE.cut(3) == Draft([5, 6, 7], "x", TREE.evidence, parents=[-1, -1, 0])
    assert TREE.cut(1).parents is None  # a chain again
    assert TREE.without({0}) == Draft([6, 8], "x", (2, 4))
    assert TREE.without({3}) == Draft([5, 6, 7, 6], "x", (1, 2, 3, 5), parents=[-1, -1, 0, 0])


def test_one_piece_of_evidence_for_all():
    assert Draft([5, 6, 7], "x", (4,), parents=[-1, -1, 0]).without({1}) == Draft([5, 7], "x", (4, 4))


def test_bans():
    class Config:
        suppress_tokens = [8]
        bad_words_ids = [[5, 7], [9, 9, 6]]

    bans = HardBans(Config, set())
    assert bans.allowed(torch.tensor([1, 2]), TREE) == TREE.without({2, 3})
    assert bans.allowed(torch.tensor([9, 9]), TREE) == TREE.without({1, 2})
    assert bans.allowed(torch.tensor([1]), Draft([5, 6, 8, 1], "x")).tokens == [5, 6]


def test_a_tree_that_is_none():
    class Broken(Drafter):
        name = "broken"

        def begin(self, rows):
            pass

        def propose(self, rows, max_tokens, plan):
            return [Draft([1, 2], self.name, parents=self.parents)]

        def commit(self, row, tokens):
            pass

    def faults(parents, takes_trees=True):
        stats, drafter = SpeculationStats(), Broken()
        drafter.parents = parents
        guard = GuardedDrafter(drafter, Breaker(), VOCAB, stats)
        guard.begin([[1]])
        guard.propose([0], [5], DepthController().plan(1, ForwardCosts(), takes_trees=takes_trees))
        return list(stats.fallbacks)

    assert faults([-1, -1]) == []
    for parents, takes_trees in (([-1], True), ([1, -1], True), ([-1, 1], True), ([-2, -1], True), ([-1, -1], False)):
        assert faults(parents, takes_trees) == ["the drafter 'broken' failed: ValueError"]


def test_min_acceptance_goes_by_depth():
    """Of competing tokens only one can be right."""
    guard = GuardedDrafter(OracleTrees([]), Breaker(), VOCAB, SpeculationStats(), min_acceptance=0.9)
    for _ in range(100):
        guard.observe(Draft([1] * 9, "oracle", parents=PARENTS), 3)
    assert not guard._is_out
    for _ in range(100):
        guard.observe(Draft([1] * 9, "oracle", parents=PARENTS), 2)
    assert guard._is_out


# What the controller makes of it


def test_classes_of_small_chances():
    for chance in (0.001, 0.01, 0.03, 0.1, 0.2, 0.3, 0.7, 0.99):
        assert chance / 1.5 < chance_of(evidence_of(chance)) < chance * 1.5
    classes = [evidence_of(i / 1000) for i in range(1001)]
    assert classes == sorted(classes)
    assert set(classes) == set(range(min(classes), max(classes) + 1))
    assert all(evidence_of(chance_of(evidence)) == evidence for evidence in range(min(classes), max(classes)))


def test_what_a_tree_teaches():
    """All that compete for the next place, whichever of them was verified."""
    controller = DepthController()
    shadow = ShadowedDraft(TREE)
    assert shadow.follow([5], controller)
    assert not shadow.follow([6], controller)
    learned = {name: counts[0] for name, counts in controller.to_dict()["acceptance"].items()}
    assert learned == {"x/1": [1.0, 1.0], "x/2": [1.0, 0.0], "x/3": [1.0, 0.0], "x/5": [1.0, 1.0]}


def test_reaches_and_trim():
    controller, costs = DepthController(), ForwardCosts()
    for _ in range(60):
        for evidence, accepted in ((1, False), (2, True), (4, True)):
            controller.observe(Draft([0], "x", (evidence,)), 0, accepted)
    reaches = controller.rates.reaches(TREE)
    assert max(reaches[0], reaches[2], reaches[4]) < 0.1
    assert min(reaches[1], reaches[3]) > 0.85
    for width in range(1, 17):
        for _ in range(4):
            costs.record(1, width, 1.0 + 0.3 * (width > 4) * (width - 4))
    assert controller.trim([TREE], costs) == 4  # as far as the one that is worth it, and not to the last
