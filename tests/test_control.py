"""The gate: measured costs, estimated acceptance, and the depth that follows from them. Simulated; no clock, no model."""

import random

import pytest

from assistgen.control import AcceptanceRates, DepthController, ForwardCosts, ShadowedDraft
from assistgen.drafters.base import Draft


BFLOAT16 = {1: 264, 2: 216, 3: 241, 4: 243, 5: 246, 8: 267, 9: 276, 12: 303, 16: 340}
FLOAT32 = {1: 65, 2: 101, 3: 121, 5: 85, 9: 93, 16: 105}


def cost(table, width):
    below = max(w for w in table if w <= width)
    above = min((w for w in table if w >= width), default=below)
    share = (width - below) / (above - below) if above > below else 0
    return table[below] * (1 - share) + table[above] * share


def simulate(table, accept, tokens=2000, seed=0, depth="adaptive"):
    """Speed over plain decoding on a text of numbers 0, 1, 2, …; each drafted token is right with probability `accept`."""
    rng = random.Random(seed)
    controller, costs, seconds, at, shadows = DepthController(depth), ForwardCosts(), 0.0, 0, []
    while at < tokens:
        right = 0
        while right < 15 and rng.random() < accept:
            right += 1
        draft = Draft([at + i if i < right else -1 for i in range(15)], "ngram", (2,))
        k = controller.trim([draft], costs)
        committed = list(range(at, at + min(right, k) + 1))
        shadows.append(ShadowedDraft(draft))
        shadows = [shadow for shadow in shadows if shadow.follow(committed, controller)]
        spent = cost(table, k + 1) * rng.uniform(0.97, 1.03)
        costs.record(1, k + 1, spent)
        seconds += spent
        at += len(committed)
    return at * cost(table, 1) / seconds


@pytest.mark.parametrize("table", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
def test_never_noticeably_slower_where_nothing_is_accepted(table):
    assert simulate(table, 0.0) > 0.98


def test_float32_leaves_short_drafts_alone():
    """One token in five right: a draft of two in float32 costs more than it brings, a forward in bfloat16 is as good as free."""
    assert simulate(FLOAT32, 0.2) > 0.97
    assert simulate(FLOAT32, 0.2, depth="constant") < 0.85
    assert simulate(BFLOAT16, 0.2) > 1.05


@pytest.mark.parametrize("table", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
def test_deep_where_drafts_are_right(table):
    assert simulate(table, 0.95) > 0.9 * simulate(table, 0.95, depth="constant") > 4


def test_acceptance_follows_the_evidence():
    rates = AcceptanceRates()
    weak, strong = Draft([1] * 8, "ngram", (1,)), Draft([1] * 8, "ngram", (5,))
    for _ in range(60):
        rates.observe(weak, 0, False)
        for position in range(4):
            rates.observe(strong, position, True)
    weak, strong = (rates.expected("ngram", draft.evidence, 8) for draft in (weak, strong))
    assert weak[8] < 0.1
    assert strong[8] > 6
    assert weak[0] == strong[0] == 0.0
    assert all(b >= a for a, b in zip(strong, strong[1:], strict=False))


def test_costs_interpolate_and_fade():
    costs = ForwardCosts()
    assert costs.curve(1, 4) is None
    for _ in range(12):
        for width, seconds in FLOAT32.items():
            costs.record(1, width, seconds)
    curve = costs.curve(1, 16)
    assert len(curve) == 16
    assert curve[0] == 65
    assert curve[1] == pytest.approx(101, rel=0.05)
    assert curve[3] == pytest.approx((121 + 85) / 2, rel=0.05)
    assert costs.curve(2, 3) is None
    for _ in range(20 * ForwardCosts.HALF_LIFE):
        costs.record(1, 1, 65)
    assert costs.curve(1, 16)[8] < 67  # so old that it is worth another look
    assert "1×9" in costs.to_dict()


def test_rows_decide_together():
    controller, costs = DepthController(), ForwardCosts()
    for _ in range(12):
        for width in range(1, 17):
            costs.record(2, width, 60 + 12 * width)
    good, bad = Draft(list(range(15)), "ngram", (7,)), Draft(list(range(15)), "ngram", (1,))
    for _ in range(80):
        controller.observe(bad, 0, False)
        for position in range(15):
            controller.observe(good, position, True)
    assert controller.trim([bad, bad], costs) == 0
    assert controller.trim([good, bad], costs) > 5
    assert DepthController("constant").trim([Draft([1, 2], "ngram"), Draft([], "ngram")], costs) == 2
    assert controller.trim([Draft([], "ngram"), Draft([], "ngram")], costs) == 0


def test_a_draft_that_was_not_verified_still_teaches():
    controller = DepthController()
    shadow = ShadowedDraft(Draft([1, 2, 3], "ngram", (4,)))
    assert shadow.follow([1], controller)
    assert not shadow.follow([2, 9], controller)
    assert controller.to_dict()["acceptance"]["ngram/4"][0] == [1.0, 1.0]
    assert controller.to_dict()["acceptance"]["ngram/4"][2] == [1.0, 0.0]
