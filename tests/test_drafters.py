"""The n-gram index against a brute-force search, and the contract of a drafter."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assistgen.drafters.ngram import MAX_MATCH, NGramDrafter, NGramIndex


SEQUENCES = st.one_of(
    st.lists(st.integers(0, 3), max_size=60),
    st.builds(lambda period, n: (period * n)[: 7 * n], st.lists(st.integers(0, 5), min_size=1, max_size=7), st.integers(1, 8)),
)


def brute_force(tokens, low, high):
    """Longest n-gram first, then the most recent occurrence that something follows."""
    end = len(tokens)
    for size in range(min(high, end - 1), low - 1, -1):
        for follow in range(end - 1, size - 1, -1):
            if tokens[follow - size : follow] == tokens[end - size :]:
                while size < min(MAX_MATCH, follow) and tokens[follow - size - 1] == tokens[end - size - 1]:
                    size += 1
                return size, follow
    return 0, 0


@given(SEQUENCES, st.integers(1, 4), st.integers(0, 4), st.integers(1, 20))
@settings(max_examples=400, deadline=None)
def test_index_equals_brute_force(tokens, low, more, depth):
    index, size = NGramIndex(low, low + more), 0
    for count, token in enumerate(tokens):
        index.extend([token])
        size, follow = brute_force(tokens[: count + 1], low, low + more)
        assert index.find() == (size, follow)
    draft = index.propose(depth).tokens
    if size:
        # A draft that reaches the end of the text goes on with what it drafted itself.
        said = list(tokens)
        for _ in range(depth):
            said.append(said[follow + len(said) - len(tokens)])
        assert draft == said[len(tokens) :]
    else:
        assert draft == []


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2, 8]),  # the newest of two equal bigrams
        ([9, 1, 2, 7, 5, 1, 2, 8, 9, 1, 2], [7, 5, 1, 2]),  # a trigram beats a newer bigram
        ([4, 4, 4], [4, 4, 4, 4]),  # a run goes on
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_match_choice(tokens, draft):
    assert NGramIndex(2, 5, tokens).propose(4).tokens == draft


def test_minimum_match():
    assert NGramIndex(3, 5, [1, 2, 7, 1, 2]).propose(4).tokens == []
    assert NGramIndex(1, 1, [1, 2, 7, 3, 2]).propose(2).tokens == [7, 3]


def test_rows_are_separate():
    drafter = NGramDrafter(2, 3)
    drafter.begin([[1, 2, 3, 1, 2], [5, 6, 7]])
    assert [draft.tokens for draft in drafter.propose([0, 1], [1, 3], None)] == [[3], []]
    drafter.commit(1, [5, 6])
    assert [draft.tokens for draft in drafter.propose([1], [2], None)] == [[7, 5]]
    assert [draft.tokens for draft in drafter.propose([0, 1], [1, 0], None)] == [[3], []]


def test_drafters_and_control_know_neither_torch_nor_transformers():
    code = (
        "import sys, assistgen.config, assistgen.control, assistgen.stats, assistgen.drafters.base, assistgen.drafters.ngram, "
        "assistgen.drafters.chain, assistgen.drafters.suffix, assistgen.suffix.store;"
        "sys.exit(any(m.split('.')[0] in ('torch', 'transformers') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
