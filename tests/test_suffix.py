"""Suffix decoding: the index against brute force, the store's bounds, sharing and files, and both inside generate()."""

import math
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import assistgen
from assistgen import SpeculationConfig, SuffixCandidateGenerator, SuffixStore
from assistgen.suffix import automaton
from assistgen.suffix.index import Cursor, SuffixIndex
from assistgen.suffix.store import Vocabulary

from .tiny import build, prompt


class BruteForce:
    """What the index should say, by scanning."""

    def __init__(self, sequences, depth):
        self.sequences, self.depth = sequences, depth

    def followers(self, context, own=False):
        """Positions (sequence, index) right after each occurrence, the text's own end left out if it is `own`."""
        found = []
        for number, sequence in enumerate(self.sequences):
            for end in range(len(context), len(sequence) + 1):
                if sequence[end - len(context) : end] == context and not (own and end == len(sequence)):
                    found.append((number, end))
        return found

    def token_at(self, place):
        number, end = place
        return self.sequences[number][end] if end < len(self.sequences[number]) else None

    def walk(self, context, limit, min_prob, own):
        tokens, probs, prob, size = [], [], 1.0, len(context)
        text = self.sequences[-1] if own else None
        while len(tokens) < limit:
            places = self.followers(context, own)
            if own and not places:
                sizes = range(min(len(context), self.depth), 0, -1)
                context = next((text[-size:] for size in sizes if self.followers(text[-size:], own)), None)
                if context is None:
                    break
                places = self.followers(context, own)
            counts = Counter(token for token in map(self.token_at, places) if token is not None)
            if not counts:
                break
            latest = {self.token_at(place): place for place in places}
            token = max(counts, key=lambda token: (counts[token], -latest[token][0], -latest[token][1]))
            prob *= (counts[token] - 3 / (size + len(tokens) + 4)) / len(places)
            if prob < min_prob:
                break
            tokens.append(token)
            probs.append(prob)
            # One occurrence goes on as it did; where there are several, a probability looks back `depth` tokens.
            context = context + [token] if len(places) == 1 else (context + [token])[-self.depth :]
        return tokens, probs

    def propose(self, context, max_tokens, factor, min_prob, own=False):
        best = ([], [], 0.0, 0)
        for size in range(min(len(context), self.depth), 0, -1):
            suffix = context[-size:]
            if self.followers(suffix, own):
                tokens, probs = self.walk(suffix, int(min(max_tokens, size * factor + 1e-6)), min_prob, own)
                if sum(probs) > best[2] * 2.5 + 1e-9:
                    best = (tokens, probs, sum(probs), size)
        return best

    def branch(self, first, first_prob, factor, min_prob, memory=None):
        """The chance of each token to come next beside `first`; `memory`: likewise of other texts."""
        text, left, probs = self.sequences[-1], 1.0, Counter()
        for reference, own in ((self, True), (memory, False)) if memory else ((self, True),):
            before = None
            for size in range(min(len(text), self.depth), 0, -1):
                places = reference.followers(text[-size:])
                if places == before or left <= 0.05:
                    continue  # the longest of several that occur together speaks for them
                before = places
                places = reference.followers(text[-size:], own)
                counts = Counter(token for token in map(reference.token_at, places) if token is not None)
                if counts and size * factor + 1e-6 >= 1:
                    shares = {token: (count - 3 / (size + 4)) / len(places) for token, count in counts.items()}
                    for token, share in shares.items():
                        probs[token] += left * share
                    left *= 1 - sum(shares.values())
        if factor == math.inf:
            for sequences in (self.sequences, memory.sequences) if memory else (self.sequences,):
                tokens = [token for sequence in sequences for token in sequence]
                for token, count in Counter(tokens).items():
                    probs[token] += 0.7 * left * count / (len(tokens) + len(sequences) - 1) / (2 if memory else 1)
        scale = (1 - first_prob) / (1 - probs.pop(first, 0.0))
        return {token: prob * scale for token, prob in probs.items() if prob * scale >= min_prob}


@st.composite
def texts(draw):
    """Random, periodic, and mixtures: copied parts with changes."""
    alphabet = draw(st.integers(1, 4))
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        part = draw(st.lists(st.integers(0, alphabet), min_size=1, max_size=12))
        parts += part * draw(st.integers(1, 4))
    return parts


RULES = {
    "max_tokens": st.integers(1, 20),
    "factor": st.sampled_from([0.5, 1.0, 2.0, math.inf]),
    "min_prob": st.sampled_from([0.0, 0.1, 0.4, 0.9]),
    "depth": st.integers(1, 9),
}


def agrees(proposal, expected):
    tokens, probs, score, size = expected
    assert proposal.tokens == tokens
    assert proposal.probs == pytest.approx(probs)
    assert proposal.score == pytest.approx(score)
    assert proposal.match_length == size
    assert proposal.parents is None


@settings(max_examples=200, deadline=None)
@given(text=texts(), step=st.integers(1, 5), **RULES)
def test_own_text_equals_brute_force(text, step, max_tokens, factor, min_prob, depth):
    index = SuffixIndex(depth, capacity=1)
    cursor = Cursor([index], is_own=True)
    for at in range(0, len(text), step):
        index.extend(text[at : at + step])
        seen = text[: at + step]
        agrees(
            cursor.propose(max_tokens, factor, min_prob), BruteForce([seen], depth).propose(seen, max_tokens, factor, min_prob, own=True)
        )


@settings(max_examples=200, deadline=None)
@given(sequences=st.lists(texts(), min_size=1, max_size=4), context=texts(), step=st.integers(1, 5), **RULES)
def test_other_texts_equal_brute_force(sequences, context, step, max_tokens, factor, min_prob, depth):
    """Sequences and the context grow by turns, so that a cursor meets states that were split under it."""
    index = SuffixIndex(depth, capacity=1)
    cursor = Cursor([index], is_own=False)
    cursor.advance(context[:1])
    seen = context[:1]
    for number, sequence in enumerate(sequences):
        index.begin_sequence()
        index.extend(sequence)
        new = context[len(seen) : len(seen) + step]
        cursor.advance(new)
        seen = seen + new
        reference = BruteForce(sequences[: number + 1], depth)
        # Occurrences that came after a cursor passed them are found once it moves on; a fresh one knows them at once.
        fresh = Cursor([index], is_own=False)
        fresh.advance(seen)
        agrees(fresh.propose(max_tokens, factor, min_prob), reference.propose(seen, max_tokens, factor, min_prob))
        longest = max((size for size in range(min(len(seen), depth) + 1) if not size or reference.followers(seen[-size:])), default=0)
        assert fresh.match_length == longest
        assert cursor.match_length <= longest


@settings(max_examples=200, deadline=None)
@given(text=texts(), remembered=st.lists(texts(), max_size=3), **RULES)
def test_branches_equal_brute_force(text, remembered, max_tokens, factor, min_prob, depth):
    text = [token % 4 for token in text]  # no more ways on than are looked at
    index = SuffixIndex(depth)
    index.extend(text)
    cursor, memory, reference = Cursor([index], is_own=True), None, None
    if remembered:
        remembered = [[token % 4 for token in sequence] for sequence in remembered]
        largest, smaller = SuffixIndex(depth), SuffixIndex(depth)
        for sequence in remembered:
            largest.begin_sequence()
            largest.extend(sequence)
        smaller.extend(remembered[0][:-1])
        memory, reference = Cursor([smaller, largest], is_own=False), BruteForce(remembered, depth)
        memory.advance(text)
    trunk = cursor.propose(max_tokens, factor, min_prob)
    first, first_prob = (trunk.tokens[0], trunk.probs[0]) if trunk.tokens else (-1, 0.0)
    expected = BruteForce([text], depth).branch(first, first_prob, factor, min_prob, reference)
    tree = cursor.branch(trunk, 40, factor, min_prob, memory)
    parents = tree.parents if tree.parents is not None else list(range(-1, len(tree.tokens) - 1))
    beside = {tree.tokens[node]: tree.probs[node] for node in range(len(tree.tokens)) if parents[node] == -1}
    if trunk.tokens:
        assert beside.pop(first) == first_prob
    assert beside == pytest.approx(expected)
    assert tree.probs == sorted(tree.probs, reverse=True)
    assert (tree.score, tree.match_length) == (trunk.score, trunk.match_length)
    trunk_nodes = [node for node in range(len(tree.tokens)) if parents[node] != -1 or tree.tokens[node] == first]
    assert [tree.tokens[node] for node in trunk_nodes] == trunk.tokens
    assert [parents[node] for node in trunk_nodes] == [-1, *trunk_nodes][: len(trunk_nodes)]
    shorter = cursor.branch(trunk, max_tokens, factor, min_prob, memory)
    assert shorter.tokens == tree.tokens[:max_tokens]
    assert shorter.probs == tree.probs[:max_tokens]
    assert shorter.parents in (None, parents[:max_tokens])


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.integers(0, 40), max_size=300), more=texts())
def test_the_most_frequent_tokens(text, more):
    text = text + more
    index = SuffixIndex(1)
    index.extend(text)
    meta = index._meta[automaton.FREQUENT :].tolist()
    noted = {token: count for token, count in zip(meta[::2], meta[1::2], strict=True) if count}
    counts = Counter(text)
    assert list(noted.values()) == [count for _, count in counts.most_common(automaton.NUM_FREQUENT)]
    assert all(counts[token] == count for token, count in noted.items())


def test_a_branch_of_another_text():
    """A store's proposal stands beside what the text itself would go on with."""
    index, other = SuffixIndex(), SuffixIndex()
    index.extend([1, 2, 3, 4, 2, 5, 1, 2])
    other.extend([7, 1, 2, 8, 9])
    cursor = Cursor([other], is_own=False)
    cursor.advance([1, 2])
    trunk = cursor.propose(4)
    tree = Cursor([index], is_own=True).branch(trunk, 5)
    assert trunk.tokens == [8, 9]
    assert tree.tokens[0] == 8
    assert {3, 9} <= set(tree.tokens)
    assert tree.parents[tree.tokens.index(9)] == 0
    assert tree.parents[tree.tokens.index(3)] == -1


@settings(max_examples=100, deadline=None)
@given(text=texts(), depth=st.integers(1, 9))
def test_counts_equal_brute_force(text, depth):
    index = SuffixIndex(depth)
    index.extend(text)
    for start in range(len(text)):
        for end in range(start + 1, min(start + depth, len(text)) + 1):
            cursor = Cursor([index], is_own=False)
            cursor.advance(text[start:end])
            assert cursor.match_length == end - start
            assert cursor.count() == len(BruteForce([text], depth).followers(text[start:end]))


def test_a_repetition_goes_on():
    index = SuffixIndex()
    index.extend([7, 1, 2, 3, 1, 2, 3])
    proposal = Cursor([index], is_own=True).propose(10)
    assert proposal.tokens == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    assert proposal.probs[:2] == pytest.approx([4 / 7, 4 / 7 * 5 / 8])  # the text's own end is no occurrence


def test_a_long_run_costs_no_more_than_any_text():
    """Without the bound on depth each token would touch as many states as came before it."""
    index = SuffixIndex()
    start = time.process_time()
    index.extend([5] * 200_000)
    assert time.process_time() - start < 5


def test_an_edge_table_that_is_full_grows():
    """Every token after every other: many ways on from few states, and states with many ways on are split."""
    torch.manual_seed(0)
    text = torch.randint(0, 300, (20_000,)).tolist()
    index = SuffixIndex(8, capacity=1)
    index.extend(text)
    reference = BruteForce([text], 8)
    for size in (1, 2, 3):
        cursor = Cursor([index], is_own=False)
        cursor.advance(text[500 : 500 + size])
        assert cursor.count() == len(reference.followers(text[500 : 500 + size]))


# The store


@settings(max_examples=100, deadline=None)
@given(
    sequences=st.lists(texts(), min_size=1, max_size=12),
    context=texts(),
    max_requests=st.integers(1, 6),
    max_tokens_kept=st.integers(1, 200),
    **RULES,
)
def test_store_keeps_the_latest(sequences, context, max_requests, max_tokens_kept, max_tokens, factor, min_prob, depth):
    store = SuffixStore(max_tokens_kept, max_requests, depth)
    cursor = store.cursor()
    for number, sequence in enumerate(sequences):
        store.add(sequence)
        cursor.advance(context[number : number + 1])
        proposal = cursor.propose(max_tokens, factor, min_prob)
        assert len(store) <= max_requests
        assert store.num_tokens <= max_tokens_kept
        kept = [list(map(int, block.tokens())) for block in store._blocks]
        whole = [token for part in sequences[: number + 1] for token in part]
        flat = [token for part in kept for token in part]
        assert flat == whole[len(whole) - len(flat) :]  # the latest, in order
        assert kept[-1][-1] == sequence[-1]
        assert all(token in whole for token in proposal.tokens)
    fresh = store.cursor()
    fresh.advance(context)
    proposal = fresh.propose(max_tokens, factor, min_prob)
    found = []
    for block in reversed(store._blocks):
        parts, at, tokens = [], 0, list(map(int, block.tokens()))
        for length in block.lengths:
            parts.append(tokens[at : at + length])
            at += length
        reference = BruteForce(parts, depth)
        longest = max((size for size in range(1, min(len(context), depth) + 1) if reference.followers(context[-size:])), default=0)
        found.append((longest, reference.propose(context, max_tokens, factor, min_prob)))
    longest = max(length for length, _ in found)
    for asked in ([entry for length, entry in found if length == longest], [entry for length, entry in found if length < longest]):
        best = max(asked, key=lambda entry: round(entry[2], 9), default=([], [], 0.0, 0))
        if best[2] > 0:
            break
    agrees(proposal, best if best[2] > 0 else ([], [], 0.0, 0))


def test_store_bounds_are_filled():
    store = SuffixStore(max_tokens=1000, max_requests=3)
    for number in range(7):
        store.add([number] * 4)
    assert len(store) == 3
    assert [block.tokens()[0] for block in store._blocks] == [4, 5, 6]
    big = SuffixStore(max_tokens=800)
    for number in range(100):
        big.add([number] * 100)
        assert big.num_tokens >= min(533, (number + 1) * 100)  # all blocks but one


def test_store_that_is_cleared_under_a_cursor():
    store = SuffixStore()
    cursor = store.cursor()
    assert cursor.propose(4).tokens == []
    store.add([1, 2, 3, 4])
    cursor.advance([1, 2])
    assert cursor.propose(4).tokens == [3, 4]
    store.clear()
    assert cursor.propose(4).tokens == []
    store.add([2, 9])
    assert cursor.propose(4).tokens == [9]


def test_store_file(tmp_path):
    store = SuffixStore(max_tokens=500, max_requests=10, max_depth=6)
    for start in range(20):
        store.add([start, 1, 2, 3, start], Vocabulary(50, "a"))
    path = tmp_path / "store"
    store.save(path)
    again = SuffixStore.load(path)
    assert (len(again), again.num_tokens, again.max_tokens, again.max_requests, again.max_depth) == (
        len(store),
        store.num_tokens,
        500,
        10,
        6,
    )
    for mine in (store, again):
        cursor = mine.cursor()
        cursor.advance([15, 1])
        assert cursor.propose(8).tokens[:3] == [2, 3, 15]
    with pytest.raises(ValueError, match="another tokenizer"):
        again.add([1], Vocabulary(50, "b"))
    assert os.listdir(tmp_path) == ["store"]
    SuffixStore().save(path)
    assert len(SuffixStore.load(path)) == 0


@pytest.mark.parametrize("damage", ["empty", "foreign", "cut", "flipped", "version"])
def test_damaged_store_file(tmp_path, damage):
    store = SuffixStore()
    store.add(list(range(100)))
    path = tmp_path / "store"
    store.save(path)
    content = path.read_bytes()
    path.write_bytes({
        "empty": b"", "foreign": b"PK\x03\x04" + content, "cut": content[:-5],
        "flipped": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "version": content.replace(b"store 1", b"store 2"),
    }[damage])  # fmt: skip
    with pytest.raises(ValueError, match="store"):
        SuffixStore.load(path)
    store.add([1, 2, 3])  # still usable
    assert len(store) == 2


def _save_for_ever(path):
    store = SuffixStore()
    store.add(list(range(200_000)))
    while True:
        store.save(path)


def test_killed_while_saving(tmp_path):
    """Whenever the process dies, the file is whole."""
    path = tmp_path / "store"
    old = SuffixStore()
    old.add([1, 2, 3])
    old.save(path)
    context = multiprocessing.get_context("spawn")
    for delay in (0.0, 0.01, 0.03, 0.07):
        process = context.Process(target=_save_for_ever, args=(path,))
        process.start()
        before = path.stat().st_mtime_ns
        deadline = time.monotonic() + 60
        while path.stat().st_mtime_ns == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert SuffixStore.load(path).num_tokens in (3, 200_000)
    assert SuffixStore.load(path).num_tokens == 200_000


def test_store_is_shared_by_threads():
    store = SuffixStore(max_tokens=5_000, max_requests=50, max_depth=8)
    errors = []

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            cursor = store.cursor()
            for _ in range(60):
                tokens = torch.randint(0, 5, (40,), generator=generator).tolist()
                store.add(tokens)
                cursor.advance(tokens[:7])
                assert all(0 <= token < 5 for token in cursor.propose(10, 2.0).tokens)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.num_tokens <= 5_000


def test_store_tells_tokenizers_apart():
    class Tokenizer:
        def __init__(self, words):
            self.words = words

        def get_vocab(self):
            return {word: number for number, word in enumerate(self.words)}

        def __len__(self):
            return len(self.words)

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [self.words.index(word) for word in text.split()]}

    one, other = Tokenizer(["a", "b", "c"]), Tokenizer(["b", "a", "c"])
    store = SuffixStore()
    store.seed_from(["a b c", "c c"], one)
    assert store.num_tokens == 5
    with pytest.raises(ValueError, match="another tokenizer"):
        store.seed_from(["a b"], other)
    store.check(Vocabulary.of(Tokenizer(["a", "b", "c"])))
    with pytest.raises(ValueError, match="another tokenizer"):
        assistgen.generate(
            build(), prompt(), max_new_tokens=4, tokenizer=other, speculation=SpeculationConfig(method="suffix", store=store)
        )
    with pytest.raises(ValueError, match="another tokenizer"):
        store.check(Vocabulary(50_000, None))


def test_bad_arguments():
    with pytest.raises(ValueError, match="max_tokens"):
        SuffixStore(max_tokens=0)
    with pytest.raises(TypeError, match="max_requests"):
        SuffixStore(max_requests=1.5)
    with pytest.raises(TypeError, match="store"):
        SpeculationConfig(method="suffix", store=[1, 2])
    with pytest.raises(ValueError, match="method='suffix'"):
        SpeculationConfig(method="ngram", store=SuffixStore())
    with pytest.raises(ValueError, match="suffix_decoding_max_cached_requests"):
        SpeculationConfig(method="suffix", store=SuffixStore(), suffix_decoding_max_cached_requests=5)
    with pytest.raises(ValueError, match="suffix_decoding_min_token_prob"):
        SpeculationConfig(method="suffix", suffix_decoding_min_token_prob=1.5)
    with pytest.raises(ValueError, match="suffix_decoding_max_spec_factor"):
        SpeculationConfig(method="suffix", suffix_decoding_max_spec_factor=0)
    with pytest.raises(ValueError, match="suffix_decoding_max_tree_depth"):
        SpeculationConfig(method="suffix", suffix_decoding_max_tree_depth=0)


# In generate()


@pytest.mark.exactness
@pytest.mark.parametrize("rows", [1, 3])
def test_the_second_time_everything_is_known(rows):
    """With a store the same request drafts its whole answer; the answer stays the same."""
    model, ids = build(), torch.cat([prompt(seed=row) for row in range(rows)])
    plain = model.generate(ids, max_new_tokens=40, do_sample=False)
    store = SuffixStore()
    config = {"method": "suffix", "store": store, "depth": "constant"}
    first = assistgen.generate(model, ids, max_new_tokens=40, do_sample=False, speculation=config, return_dict_in_generate=True)
    second = assistgen.generate(model, ids, max_new_tokens=40, do_sample=False, speculation=config, return_dict_in_generate=True)
    assert torch.equal(first.sequences, plain)
    assert torch.equal(second.sequences, plain)
    assert len(store) == 2 * rows
    assert second.speculation.target_forwards < 0.5 * 40
    assert second.speculation.num_accepted_tokens > first.speculation.num_accepted_tokens
    assert not second.speculation.fallbacks


def test_own_store_of_a_speculator():
    model, ids = build(), prompt()
    speculator = assistgen.Speculator({"method": "suffix", "suffix_decoding_max_cached_requests": 2, "depth": "constant"})
    forwards = []
    for _ in range(3):
        output = assistgen.generate(model, ids, max_new_tokens=40, do_sample=False, speculation=speculator, return_dict_in_generate=True)
        forwards.append(output.speculation.target_forwards)
    assert forwards[1] < forwards[0]
    forgetful = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    assistgen.generate(model, ids, max_new_tokens=8, speculation=forgetful)


@pytest.mark.exactness
def test_in_transformers_own_loop(monkeypatch):
    model, ids = build(), prompt()
    plain = model.generate(ids, max_new_tokens=40, do_sample=False)
    store = SuffixStore()
    store.add(plain[0].tolist())
    generator = SuffixCandidateGenerator(store=store, max_length=plain.shape[1])
    monkeypatch.setattr(model, "_get_candidate_generator", lambda *args, **kwargs: generator, raising=True)
    forwards = []
    handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    output = model.generate(ids, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=5)
    handle.remove()
    assert torch.equal(output, plain)
    assert len(forwards) < 20
