"""
A suffix automaton over token ids with counts, in flat arrays, compiled by numba. All functions here; the classes are in `index`.

Source: the online construction of Blumer et al. (1985), for several sequences. Each state stands for all substrings that occur at the
same places; its link leads to the longest suffix that occurs at more. Added to it: how often a state's substrings occur, and which
token follows them most often (on a tie, the one that did so first: answers quote what came before their own words). Both are kept for
contexts of up to `max_depth` tokens, the only ones asked for, so that a token costs at most `max_depth` steps even in a text like
"aaaa…".

A state is one row of `states`:

| LENGTH | LINK | COUNT | END | TOKEN | NEXT |
|---|---|---|---|---|---|
| of the longest substring | state | occurrences | where the first ends in `text` | that follows most often, or NONE | state it leads to |

Most states have one way on, which stands in the row. The ways on of the others are rows of `edges` as well, found through the hash table
`buckets`, and linked in a ring for each state; NEXT is then the complement (`~`) of the state.

An automaton is handed over as its `meta`, a row of numbers with the addresses of its arrays, and so is a context that asks, as its
`asker`: so a call takes a microsecond, each array handed over would add a tenth of one, and one call can go through several automata.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from ..kernels import compiled, pointer


LENGTH, LINK, COUNT, END, TOKEN, NEXT = range(6)
STATE_FIELDS = 6
OWNER, EDGE_TOKEN, TARGET, IN_BUCKET, IN_RING = range(5)
EDGE_FIELDS = 5
NONE = -1
ROOT = 0
# `meta`: what changes from token to token, what stays, and where the arrays are and how many rows they have.
NUM_STATES, NUM_EDGES, NUM_TOKENS, LAST, ACTIVE, ACTIVE_LENGTH, WANTED_EDGES, MAX_DEPTH = range(8)
STATES, STATES_ROOM, EDGES, EDGES_ROOM, BUCKETS, TEXT, TEXT_ROOM = range(8, 15)
FREQUENT = 15  # from here on the most frequent tokens, the first the most, and behind each how often it occurs
NUM_FREQUENT = 16
META_FIELDS = FREQUENT + 2 * NUM_FREQUENT
# `asker`: whether its context is the end of the only automaton's text, not another text's; the automata (of their `meta` the addresses);
# for each the state and the length of the longest suffix of the other text that occurs there; what the other text goes on with first.
# Then room: for `max_depth + 1` states, for two results' tokens and their probabilities, so many each, and for MAX_BRANCHES of both.
IS_OWN, NUM_AUTOMATA, METAS, PLACES, NEW, CHAIN, CHAIN_ROOM, TOKENS, PROBS, RESULT_ROOM, BRANCH_TOKENS, BRANCH_PROBS = range(12)
ASKER_FIELDS = 12
MAX_BRANCHES = 32
SEPARATOR = -1
# A longer context says more than its few occurrences let it seem: in replays of code, edits and answers 1.0 takes up to 3 % fewer tokens
# a step than 2.5, and no more are taken if shorter contexts can't win at all.
SHORTER_PROMISE = 2.5
ROUNDING = 1e-9  # no more is a tie, which the first keeps
SEEN_BRANCHES = 4
"""Ways on of a state that are looked at: the most frequent one and the latest. Each waits for memory, and more of them bring nothing."""
SETTLED = 0.05
"""With no more doubt left than this, shorter contexts aren't asked."""
ANYWHERE = 0.7
"""What is left when all contexts were asked: so much of it goes to the text's own tokens, by how often they occur, the rest to others."""


@njit(inline="always")
def _states(meta: Any) -> Any:
    return carray(pointer(meta[STATES]), (meta[STATES_ROOM], STATE_FIELDS), np.int32)


@njit(inline="always")
def _edges(meta: Any) -> Any:
    return carray(pointer(meta[EDGES]), (meta[EDGES_ROOM], EDGE_FIELDS), np.int32)


@njit(inline="always")
def _buckets(meta: Any) -> Any:
    return carray(pointer(meta[BUCKETS]), (meta[EDGES_ROOM],), np.int32)


@njit(inline="always")
def _text(meta: Any) -> Any:
    return carray(pointer(meta[TEXT]), (meta[TEXT_ROOM],), np.int32)


@njit(inline="always")
def _bucket(state: Any, token: Any, num_buckets: Any) -> Any:
    mixed = np.uint64(state) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.int64(((mixed >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32))


@compiled
def _edge(state: Any, token: Any, edges: Any, buckets: Any) -> Any:
    edge = buckets[_bucket(state, token, buckets.shape[0])]
    while edge != NONE and (edges[edge, OWNER] != state or edges[edge, EDGE_TOKEN] != token):
        edge = edges[edge, IN_BUCKET]
    return edge


@compiled
def follow(state: Any, token: Any, states: Any, edges: Any, buckets: Any) -> Any:
    """The state that `token` leads to, or NONE."""
    next_ = states[state, NEXT]
    if states[state, TOKEN] == token:
        return next_ if next_ >= 0 else ~next_
    if states[state, TOKEN] == NONE or next_ >= 0:
        return NONE
    edge = _edge(state, token, edges, buckets)
    return edges[edge, TARGET] if edge != NONE else NONE


@compiled
def _new_edge(state: Any, token: Any, target: Any, edges: Any, buckets: Any, meta: Any) -> Any:
    edge = meta[NUM_EDGES]
    meta[NUM_EDGES] += 1
    bucket = _bucket(state, token, buckets.shape[0])
    edges[edge, OWNER] = state
    edges[edge, EDGE_TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, IN_BUCKET] = buckets[bucket]
    edges[edge, IN_RING] = edge
    buckets[bucket] = edge
    return edge


@compiled
def _lead(state: Any, token: Any, target: Any, states: Any, edges: Any, buckets: Any, meta: Any) -> None:
    """A new way on from a state."""
    if states[state, TOKEN] == NONE:
        states[state, TOKEN] = token
        states[state, NEXT] = target
        return
    if states[state, NEXT] >= 0:
        first = _new_edge(state, states[state, TOKEN], states[state, NEXT], edges, buckets, meta)
        states[state, NEXT] = ~states[state, NEXT]
    else:
        first = _edge(state, states[state, TOKEN], edges, buckets)
    edge = _new_edge(state, token, target, edges, buckets, meta)
    edges[edge, IN_RING] = edges[first, IN_RING]
    edges[first, IN_RING] = edge


@compiled
def _redirect(state: Any, token: Any, target: Any, states: Any, edges: Any, buckets: Any) -> None:
    if states[state, NEXT] >= 0:
        states[state, NEXT] = target
        return
    edges[_edge(state, token, edges, buckets), TARGET] = target
    if states[state, TOKEN] == token:
        states[state, NEXT] = ~target


@compiled
def _clone(state: Any, length: Any, states: Any, edges: Any, buckets: Any, meta: Any) -> Any:
    """A state of its own for the substrings of `state` up to `length`, before they get an occurrence that the others don't have."""
    clone = meta[NUM_STATES]
    meta[NUM_STATES] += 1
    states[clone] = states[state]
    states[clone, LENGTH] = length
    states[state, LINK] = clone
    if states[state, NEXT] < 0:
        first = _edge(state, states[state, TOKEN], edges, buckets)
        new_first = _new_edge(clone, edges[first, EDGE_TOKEN], edges[first, TARGET], edges, buckets, meta)
        edge, new_edge = edges[first, IN_RING], new_first
        while edge != first:
            newer = _new_edge(clone, edges[edge, EDGE_TOKEN], edges[edge, TARGET], edges, buckets, meta)
            edges[newer, IN_RING] = new_first
            edges[new_edge, IN_RING] = newer
            edge, new_edge = edges[edge, IN_RING], newer
    return clone


@compiled
def _edges_wanted(token: Any, states: Any, edges: Any, buckets: Any, meta: Any) -> Any:
    """The most edges that `token` can need."""
    wanted, state = 0, meta[LAST]
    target = follow(state, token, states, edges, buckets)
    while target == NONE:
        wanted += 2
        state = states[state, LINK]
        if state == NONE:
            return wanted
        target = follow(state, token, states, edges, buckets)
    if states[state, LENGTH] + 1 != states[target, LENGTH]:
        wanted += 2  # the state that is split may be one of those above
        if states[target, NEXT] >= 0:
            return wanted
        edge = first = _edge(target, states[target, TOKEN], edges, buckets)
        while True:
            wanted += 1
            edge = edges[edge, IN_RING]
            if edge == first:
                break
    return wanted


@njit(inline="always")
def suffix_state(state: Any, length: Any, states: Any) -> Any:
    """The state of the suffix of `length` tokens of a substring of `state`."""
    while states[state, LENGTH] > length:  # what its link leads to is shorter, and mostly need not be fetched from memory
        link = states[state, LINK]
        if states[link, LENGTH] < length:
            break
        state = link
    return state


@njit(inline="always")
def _note_frequent(token: Any, occurrences: Any, meta: Any) -> None:
    """A token occurs once more: it moves up among the most frequent ones, or in."""
    place = FREQUENT + 2 * (NUM_FREQUENT - 1)
    if occurrences <= meta[place + 1]:
        return
    for at in range(FREQUENT, place, 2):
        if meta[at] == token and meta[at + 1] > 0:
            place = at
            break
    while place > FREQUENT and meta[place - 1] < occurrences:
        meta[place], meta[place + 1] = meta[place - 2], meta[place - 1]
        place -= 2
    meta[place], meta[place + 1] = token, occurrences


@compiled
def _append(token: Any, max_depth: Any, states: Any, edges: Any, buckets: Any, text: Any, meta: Any) -> None:
    position, state = meta[NUM_TOKENS], meta[LAST]
    text[position] = token
    meta[NUM_TOKENS] = position + 1
    target = follow(state, token, states, edges, buckets)
    last = NONE
    if target == NONE:
        last = meta[NUM_STATES]
        meta[NUM_STATES] += 1
        states[last, LENGTH] = states[state, LENGTH] + 1
        states[last, LINK] = ROOT
        states[last, COUNT] = 0
        states[last, END] = position
        states[last, TOKEN] = NONE
        states[last, NEXT] = 0
        while target == NONE:
            _lead(state, token, last, states, edges, buckets, meta)
            state = states[state, LINK]
            if state == NONE:
                break
            target = follow(state, token, states, edges, buckets)
    if state != NONE:
        if states[state, LENGTH] + 1 != states[target, LENGTH]:
            clone = _clone(target, states[state, LENGTH] + 1, states, edges, buckets, meta)
            old = target
            while state != NONE and follow(state, token, states, edges, buckets) == old:
                _redirect(state, token, clone, states, edges, buckets)
                state = states[state, LINK]
            target = clone
        if last == NONE:
            last = target  # an earlier sequence began with the same tokens
        else:
            states[last, LINK] = target
    meta[LAST] = last

    # One more occurrence of every suffix of up to `max_depth + 1` tokens, and of this token after every suffix before.
    length = meta[ACTIVE_LENGTH]
    before = suffix_state(meta[ACTIVE], length, states)
    length = min(length + 1, max_depth + 1)
    active = suffix_state(follow(before, token, states, edges, buckets), length, states)
    meta[ACTIVE], meta[ACTIVE_LENGTH] = active, length
    state = single = active
    while state != ROOT:
        states[state, COUNT] += 1
        single = state
        state = states[state, LINK]
    _note_frequent(token, states[single, COUNT], meta)
    state = before
    while state != NONE:
        if states[state, TOKEN] != token:
            target = edges[_edge(state, token, edges, buckets), TARGET]
            if states[target, COUNT] > states[~states[state, NEXT], COUNT]:
                states[state, TOKEN] = token
                states[state, NEXT] = ~target
        state = states[state, LINK]


@compiled
def extend(tokens: Any, meta: Any) -> Any:
    """
    Appends `tokens` to the present sequence.

    Returns:
        how many were appended: fewer than there are if an array is too small (`meta[WANTED_EDGES]`: how many edges must fit).
    """
    states, edges, buckets, text = _states(meta), _edges(meta), _buckets(meta), _text(meta)
    for i in range(tokens.shape[0]):
        if meta[NUM_STATES] + 2 > states.shape[0] or meta[NUM_TOKENS] + 2 > text.shape[0]:
            return i
        wanted = meta[NUM_EDGES] + _edges_wanted(tokens[i], states, edges, buckets, meta)
        if wanted > edges.shape[0]:
            meta[WANTED_EDGES] = wanted
            return i
        _append(tokens[i], meta[MAX_DEPTH], states, edges, buckets, text, meta)
    return tokens.shape[0]


@compiled
def rebuild_buckets(meta: Any) -> None:
    """Enters all edges into a new hash table."""
    edges, buckets = _edges(meta), _buckets(meta)
    buckets[:] = NONE
    for edge in range(meta[NUM_EDGES]):
        bucket = _bucket(edges[edge, OWNER], edges[edge, EDGE_TOKEN], buckets.shape[0])
        edges[edge, IN_BUCKET] = buckets[bucket]
        buckets[bucket] = edge


@compiled
def count(state: Any, length: Any, meta: Any) -> Any:
    """How often the suffix of `length` tokens of a state's substrings occurs."""
    states = _states(meta)
    return states[suffix_state(state, length, states), COUNT]


@njit(inline="always")
def _asker(address: Any) -> Any:
    return carray(pointer(address), (ASKER_FIELDS,), np.int64)


@njit(inline="always")
def _automaton(asker: Any, number: Any) -> Any:
    metas = carray(pointer(asker[METAS]), (asker[NUM_AUTOMATA],), np.int64)
    return carray(pointer(metas[number]), (META_FIELDS,), np.int64)


@njit(inline="always")
def _places(asker: Any) -> Any:
    return carray(pointer(asker[PLACES]), (asker[NUM_AUTOMATA], 2), np.int64)


@compiled
def advance(address: Any, num_new: Any) -> None:
    """Follows the other text of the asker at `address` over the first `num_new` tokens of NEW."""
    asker = _asker(address)
    places, new = _places(asker), carray(pointer(asker[NEW]), (num_new,), np.int32)
    for i in range(asker[NUM_AUTOMATA]):
        meta = _automaton(asker, i)
        states, edges, buckets = _states(meta), _edges(meta), _buckets(meta)
        state, length = places[i, 0], places[i, 1]
        for token in new:
            state = suffix_state(state, length, states)
            target = follow(state, token, states, edges, buckets)
            while target == NONE and state != ROOT:
                state = states[state, LINK]
                length = states[state, LENGTH]
                target = follow(state, token, states, edges, buckets)
            if target == NONE:
                length = 0
            else:
                length = min(length + 1, meta[MAX_DEPTH])
                state = suffix_state(target, length, states)
        places[i, 0], places[i, 1] = state, length


@njit(inline="always")
def _chance(followed: Any, occurrences: Any, context: Any) -> Any:
    """
    The chance that a token comes next that followed so many of so many occurrences of a context of so many tokens: absolute discounting
    (Ney, Essen and Kneser, 1994), the discount smaller for a longer context. Measured on code, edits and answers, the token after a
    context that occurred once is right in 40 % of cases after one token, 50 % after two, 70 % after five, 85 % after sixteen.
    """
    return (followed - 3.0 / (context + 4.0)) / occurrences


@compiled
def _walk(
    state: Any, size: Any, limit: Any, min_prob: Any, needed: Any, max_depth: Any, chain: Any, chain_length: Any, states: Any, edges: Any,
    text: Any, num_tokens: Any, tokens: Any, probs: Any,
) -> Any:  # fmt: skip
    """
    The likeliest way on from a state's substring of `size` tokens: at each step the token that follows most often.

    `chain` holds the states of the text's own suffixes if it is the text itself that goes on: their last occurrence, at its very end, is
    followed by nothing yet, and where the way reaches that end it goes on as a shorter suffix did: a repetition goes on repeating.

    Returns:
        the number of tokens, and the sum of their probabilities: the expected number of accepted ones. A way that can't come to more than
        `needed` isn't followed to its end, since in a large text each step waits for memory.
    """
    prob, score, n, copied = 1.0, 0.0, 0, NONE
    while n < limit and score + prob * (limit - n) > needed:
        if copied != NONE:  # one occurrence only: what follows is read off the text
            if copied < num_tokens and text[copied] != SEPARATOR:
                prob *= _chance(1, 1, size + n)
                if prob < min_prob:
                    break
                tokens[n] = text[copied]
                probs[n] = prob
                score += prob
                n += 1
                copied += 1
                continue
            if chain_length == 0:
                break
            copied = NONE
            state = chain[0]
        count = states[state, COUNT]
        for i in range(chain_length):
            if chain[i] == state:
                # Its end is no occurrence; without another, the longest suffix that has one goes on.
                while i < chain_length and states[chain[i], COUNT] < 2:
                    i += 1
                if i == chain_length:
                    return n, score
                state = chain[i]
                count = states[state, COUNT] - 1
                break
        if count == 1:
            copied = states[state, END] + 1
            continue
        next_ = states[state, NEXT]
        if states[state, TOKEN] == NONE:
            break
        target = next_ if next_ >= 0 else ~next_
        prob *= _chance(states[target, COUNT], count, size + n)
        if prob < min_prob:
            break
        tokens[n] = states[state, TOKEN]
        probs[n] = prob
        score += prob
        n += 1
        state = suffix_state(target, max_depth, states)
    return n, score


@compiled
def _propose(
    state: Any, length: Any, is_own: Any, max_tokens: Any, factor: Any, min_prob: Any, meta: Any, chain: Any, tokens: Any, probs: Any,
    row: Any, best_n: Any, best_size: Any, best_score: Any,
) -> Any:  # fmt: skip
    """The best of the ways on from all suffixes of a context (see `propose`), and of the one of `best_size` that stands in `row`."""
    states, edges, text = _states(meta), _edges(meta), _text(meta)
    length = min(length, meta[MAX_DEPTH])
    state = suffix_state(state, length, states)
    chain_length = 0
    if is_own:
        own = state
        while own != ROOT:
            chain[chain_length] = own
            chain_length += 1
            own = states[own, LINK]
    while state != ROOT:
        size = min(states[state, LENGTH], length)
        if states[state, COUNT] > is_own:
            limit = int(min(max_tokens, size * factor + 1e-6))
            needed = best_score * SHORTER_PROMISE if size < best_size else best_score
            if needed >= limit:
                break
            n, score = _walk(
                state, size, limit, min_prob, needed, meta[MAX_DEPTH], chain, chain_length, states, edges, text, meta[NUM_TOKENS],
                tokens[1 - row], probs[1 - row],
            )  # fmt: skip
            if score > needed + ROUNDING:
                row, best_n, best_size, best_score = 1 - row, n, size, score
        state = states[state, LINK]
    return row, best_n, best_size, best_score


@compiled
def propose(address: Any, num_new: Any, max_tokens: Any, factor: Any, min_prob: Any) -> Any:
    """
    The best of the ways on from all suffixes of a context, by the expected number of accepted tokens, of which a shorter suffix has to
    promise `SHORTER_PROMISE` times as many as a longer one. Of several automata those are asked that know the longest suffix, and the
    others where these have nothing to say.

    Args:
        address, num_new: as in `advance`, which comes first.
        max_tokens, factor: at most `max_tokens`, and at most `factor` times the length of the suffix.
        min_prob: tokens less likely than this are left out.

    Returns:
        the first place in TOKENS and PROBS, the one behind the last, the length of the suffix, the score.
    """
    asker = _asker(address)
    places, chain = _places(asker), carray(pointer(asker[CHAIN]), (asker[CHAIN_ROOM],), np.int64)
    tokens = carray(pointer(asker[TOKENS]), (2, asker[RESULT_ROOM]), np.int32)
    probs = carray(pointer(asker[PROBS]), (2, asker[RESULT_ROOM]), np.float64)
    row, n, size, score = 0, 0, 0, 0.0
    if asker[IS_OWN]:
        meta = _automaton(asker, 0)
        row, n, size, score = _propose(
            meta[ACTIVE], meta[ACTIVE_LENGTH], True, max_tokens, factor, min_prob, meta, chain, tokens, probs, row, n, size, score
        )
    else:
        advance(address, num_new)
        longest = 0
        for i in range(asker[NUM_AUTOMATA]):
            longest = max(longest, places[i, 1])
        for knows_longest in (True, False):
            for i in range(asker[NUM_AUTOMATA]):
                if (places[i, 1] == longest) == knows_longest and longest > 0:
                    row, n, size, score = _propose(
                        places[i, 0], places[i, 1], False, max_tokens, factor, min_prob, _automaton(asker, i), chain, tokens, probs,
                        row, n, size, score,
                    )  # fmt: skip
            if score > 0.0:
                break
    first = row * asker[RESULT_ROOM]
    return first, first + n, size, score


@njit(inline="always")
def _add_branch(token: Any, prob: Any, n: Any, tokens: Any, probs: Any) -> Any:
    for i in range(n):
        if tokens[i] == token:
            probs[i] += prob
            return n
    if n < MAX_BRANCHES:
        tokens[n], probs[n] = token, prob
        n += 1
    return n


@njit(inline="always")
def _add_frequent(share: Any, n: Any, meta: Any, tokens: Any, probs: Any) -> Any:
    """Among the tokens that are frequent in a text `share` is shared out by how frequent they are."""
    for at in range(FREQUENT, FREQUENT + 2 * NUM_FREQUENT, 2):
        if meta[at + 1] > 0:
            n = _add_branch(meta[at], share * meta[at + 1] / meta[NUM_TOKENS], n, tokens, probs)
    return n


@njit(inline="always")
def _share_out(state: Any, length: Any, ends: Any, factor: Any, n: Any, left: Any, meta: Any, tokens: Any, probs: Any) -> Any:
    """
    What follows a state's substring of `length` tokens and its suffixes, from the longest to the shortest: each shares out what the longer
    ones left over (absolute discounting, as in `_chance`). `ends` occurrences are the text's own end.

    Returns:
        how many branches there are now, and what is left over.
    """
    states, edges, buckets = _states(meta), _edges(meta), _buckets(meta)
    while state != ROOT and left > SETTLED:
        size = min(states[state, LENGTH], length)
        occurrences = states[state, COUNT] - ends
        if occurrences > 0 and states[state, TOKEN] != NONE and size * factor + 1e-6 >= 1.0:
            taken = 0.0
            next_ = states[state, NEXT]
            edge = start = NONE
            token, target = states[state, TOKEN], next_
            if next_ < 0:
                target = ~next_
                edge = start = _edge(state, token, edges, buckets)
            for _ in range(SEEN_BRANCHES):
                prob = left * _chance(states[target, COUNT], occurrences, size)
                taken += prob
                n = _add_branch(token, prob, n, tokens, probs)
                if edge == NONE:
                    break
                edge = edges[edge, IN_RING]
                if edge == start:
                    break
                token, target = edges[edge, EDGE_TOKEN], edges[edge, TARGET]
            left -= taken
        state = states[state, LINK]
    return n, left


@compiled
def branch(address: Any, first: Any, first_prob: Any, factor: Any, min_prob: Any, memory: Any) -> Any:
    """
    The tokens that may come next in the asker's own text beside `first`, which does with a chance of `first_prob`: what followed the
    text's suffixes in itself, then in the memory, then what is frequent in both.

    Args:
        first: NONE if there is none; `first_prob` is 0 then.
        factor, min_prob: as in `propose`.
        memory: the address of an asker that follows this text in others, of which the largest is looked into; 0 if there is none.

    Returns:
        how many stand in BRANCH_TOKENS and BRANCH_PROBS, the likeliest first.
    """
    asker = _asker(address)
    meta = other = _automaton(asker, 0)
    tokens = carray(pointer(asker[BRANCH_TOKENS]), (MAX_BRANCHES,), np.int32)
    probs = carray(pointer(asker[BRANCH_PROBS]), (MAX_BRANCHES,), np.float64)
    length = min(meta[ACTIVE_LENGTH], meta[MAX_DEPTH])
    state = suffix_state(meta[ACTIVE], length, _states(meta))
    n, left = _share_out(state, length, 1, factor, 0, 1.0, meta, tokens, probs)
    if memory != 0:
        remembering = _asker(memory)
        places = _places(remembering)
        largest, other = 0, _automaton(remembering, 0)
        for i in range(1, remembering[NUM_AUTOMATA]):
            if _automaton(remembering, i)[NUM_TOKENS] > other[NUM_TOKENS]:
                largest, other = i, _automaton(remembering, i)
        n, left = _share_out(places[largest, 0], places[largest, 1], 0, factor, n, left, other, tokens, probs)
    if factor == np.inf:
        share = ANYWHERE * left if memory == 0 else 0.5 * ANYWHERE * left
        n = _add_frequent(share, n, meta, tokens, probs)
        if memory != 0:
            n = _add_frequent(share, n, other, tokens, probs)

    # Beside a first token that is as likely as this.
    known = 0.0
    for i in range(n):
        if tokens[i] == first:
            known = probs[i]
    scale = (1.0 - first_prob) / (1.0 - known) if known < 1.0 else 0.0
    kept = 0
    for i in range(n):
        token, prob = tokens[i], probs[i] * scale
        if token != first and prob >= min_prob:
            at = kept
            while at > 0 and probs[at - 1] < prob:
                tokens[at], probs[at] = tokens[at - 1], probs[at - 1]
                at -= 1
            tokens[at], probs[at] = token, prob
            kept += 1
    return kept
