"""The gate: measured costs, estimated acceptance, and the depth that follows from them. Simulated; no clock, no model."""

import json

import pytest

from assistgen.control import AcceptanceRates, DepthController, ForwardCosts, Pace, ShadowedDraft
from assistgen.drafters.base import Draft
from benchmarks.simulate import CURVES, Adaptive, Fixed, Heuristic, changing, cost, oracle, run, stationary


FLOAT32 = {1: 65, 2: 101, 3: 121, 5: 85, 9: 93, 16: 105}
PAID = 0.25
"""What a draft model's token costs here, in plain steps."""


def adaptive_and_best(curve, stream):
    """Speed over plain decoding: of the controller, and of the best of all fixed depths, 0 included."""
    plain = cost(curve, 1)
    best = max(plain / run(Fixed(k), stream, curve) for k in (1, 2, 3, 4, 5, 8, 11, 15))
    return plain / run(Adaptive(draft_ms=stream.draft_ms), stream, curve, noise=0.03), max(1.0, best)


@pytest.mark.parametrize("share", [0.0, PAID], ids=["free", "paid"])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("name", CURVES)
def test_stationary_streams(name, rate, share):
    curve = CURVES[name]
    adaptive, best = adaptive_and_best(curve, stationary(rate, length=4_000, draft_ms=share * cost(curve, 1)))
    assert adaptive > 0.95 * best


@pytest.mark.parametrize("share", [0.0, PAID], ids=["free", "paid"])
@pytest.mark.parametrize("name", CURVES)
def test_changing_streams(name, share):
    """No fixed depth does as well where the text changes."""
    curve = CURVES[name]
    adaptive, best = adaptive_and_best(curve, changing((0.95, 0.0), draft_ms=share * cost(curve, 1)))
    assert adaptive > best


@pytest.mark.parametrize("share", [0.0, PAID], ids=["free", "paid"])
@pytest.mark.parametrize("name", CURVES)
def test_never_noticeably_slower_where_nothing_is_accepted(name, share):
    curve = CURVES[name]
    stream = stationary(0.0, length=2_500, draft_ms=share * cost(curve, 1))
    assert run(Adaptive(draft_ms=stream.draft_ms), stream, curve, noise=0.03, first=200) < cost(curve, 1) / 0.98


def test_a_policy_that_knows_nothing_loses():
    """The streams tell policies apart: what is asked of the controller isn't easy."""
    curve = CURVES["135M float32, AVX-512"]
    plain = cost(curve, 1)
    assert plain / run(Fixed(5), stationary(0.0), curve) < 0.8
    assert plain / run(Heuristic(), changing((0.95, 0.0)), curve) < 0.8 * plain / run(Adaptive(), changing((0.95, 0.0)), curve)
    assert plain / oracle(stationary(0.6), curve) > plain / run(Adaptive(), stationary(0.6), curve)


def test_state_is_plain_values():
    """What was learned goes through JSON, and the next controller goes on from there."""
    policy = Adaptive(draft_ms=60.0)
    run(policy, stationary(0.8, length=500, draft_ms=60.0), CURVES["1.5B bfloat16, AVX-512"])
    state = json.loads(json.dumps(policy.controller.to_dict()))
    again = DepthController.from_dict(state)
    assert again.to_dict() == policy.controller.to_dict()
    assert again.speedup == policy.controller.speedup != 1.0
    draft = Draft([1] * 10, "drafter", (4,) * 10, is_free=False)
    assert again.trim([draft], policy.costs) == policy.controller.trim([draft], policy.costs) > 0


def test_heuristic_depth():
    controller, costs = DepthController("heuristic"), ForwardCosts()
    draft = Draft(list(range(12)), "ngram")
    assert controller.trim([draft], costs) == 5
    for accepted, expected in ((5, 7), (7, 9), (3, 8), (0, 7)):
        plan = controller.plan(1, costs)
        controller.end_round(plan, [draft.cut(controller.trim([draft], costs))], [accepted], 0.1)
        assert controller.trim([draft], costs) == expected
        assert controller.plan(1, costs).budget("ngram", 12).limit == expected


def test_what_taking_in_the_text_costs():
    """
    Measured once, it has to be repaid by the rest of the answer, of which no more is expected than was said, and 32 tokens; a drafter that
    doesn't pay is tried the more rarely for it.
    """
    controller, costs, draft_costs = DepthController(), ForwardCosts(), ForwardCosts()
    costs.record(1, 1, 0.1)

    def limit(behind, remaining=1000, said=200, time=None):
        so_far = Pace(said, said if time is None else time)
        return controller.plan(1, costs, remaining, so_far).budget("draft_model", 8, draft_costs.reading(behind)).limit

    assert limit(behind=1000, said=0) == 8  # nothing is known yet
    for _ in range(2):  # the first one's time may be the set-up's
        draft_costs.record_reading(1000, 2.0)  # 20 plain steps
    assert limit(behind=0, remaining=1) == limit(behind=1000) == limit(behind=100, remaining=20) == limit(behind=100, said=2) == 8
    assert limit(behind=100, said=1) == 0  # so early the call's rounds may still show that they do well without
    assert limit(behind=20, said=0) == 8  # 0.4 plain steps
    assert limit(behind=1000, remaining=30) == limit(behind=1000, said=0) == 0
    assert limit(behind=1000, time=110) == 0  # the draft's rounds bring 1.5 tokens a plain step, the call's own 1.8
    controller._known("draft_model").waited = 1
    # It isn't for ever, unless no draft could repay it.
    assert next(round_ for round_ in range(2, 1000) if limit(behind=1000, remaining=30)) == 8 + 20 * 32
    assert not any(limit(behind=1000, remaining=10) for _ in range(1000))
    controller._known("draft_model").waited = 0
    for behind, rounds in ((0, 8), (500, 16 + 10 * 32)):  # twice as long after a trial
        for _ in range(40):
            plan = controller.plan(1, costs)
            plan.spent("draft_model", 1, 0.1)
            controller.end_round(plan, [Draft([1], "draft_model", is_free=False)], [0], 0.1)
            if controller.to_dict()["drafters"]["draft_model"]["is_idle"]:
                break
        assert next(round_ for round_ in range(1, 1000) if limit(behind)) == rounds
    # After yet another trial in vain it would wait for 32 rounds and 320 for the text; a new one is tried earlier by the tokens to come.
    known = controller._known("draft_model")
    known.patience = 32
    plans = (controller.plan(1, costs, 1000) for _ in range(1000))
    assert next(number for number, plan in enumerate(plans, 1) if plan.budget("draft_model", 8, 1.0, is_new=True).limit) == 32 + 320 - 32


def test_a_round_that_was_held_up():
    """A drafter that pays isn't left alone for one slow round, but is if they go on being slow."""
    controller, costs = DepthController(), ForwardCosts()
    costs.record(1, 1, 0.1)
    draft = Draft([1, 1, 1], "draft_model", is_free=False)

    def end_round(seconds):
        plan = controller.plan(1, costs)
        plan.spent("draft_model", 3, seconds)
        controller.end_round(plan, [draft], [2], 0.1)
        return controller.to_dict()["drafters"]["draft_model"]["is_idle"]

    assert not any(end_round(seconds) for seconds in [0.1] * 5 + [30.0] + [0.1] * 5)
    assert any(end_round(0.3) for _ in range(20))


def test_acceptance_follows_the_evidence():
    rates = AcceptanceRates()
    weak, strong = Draft([1] * 8, "ngram", (1,)), Draft([1] * 8, "ngram", (5,))
    for _ in range(60):
        rates.observe(weak, 0, False)
        for position in range(4):
            rates.observe(strong, position, True)
    weak, strong = (rates.reaches(draft) for draft in (weak, strong))
    assert len(weak) == len(strong) == 8
    assert sum(weak) < 0.1
    assert sum(strong) > 6
    assert all(1.0 >= a >= b for a, b in zip(strong, strong[1:], strict=False))


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


def test_costs_measured_at_another_time():
    """A machine that is slower now is slower at all widths: what was measured before is still comparable."""
    costs = ForwardCosts()
    for _ in range(12):
        for width, seconds in FLOAT32.items():
            costs.record(1, width, seconds)
    for _ in range(20):
        costs.record(1, 9, 2 * 93)
    assert costs.plain(1) == pytest.approx(2 * 65)
    assert costs.curve(1, 9)[4] == pytest.approx(2 * 85, rel=0.05)
    costs.record(1, 9, 50 * 93)  # one forward that had to wait says nothing
    assert costs.plain(1) == pytest.approx(2 * 65)
    for _ in range(4):
        costs.record(1, 9, 93)
    assert costs.plain(1) == pytest.approx(65)


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


@pytest.mark.parametrize(("seconds", "preferred"), [(0.002, False), (0.02, False), (0.2, True)])
def test_a_free_draft_or_a_dearer_one(seconds, preferred):
    """Where the free one may be right the other is likely to be, so that only its price speaks against it."""
    controller, costs = DepthController(), ForwardCosts()
    for width in (1, 1, 4, 4):
        costs.record(1, width, 0.1)
    free = Draft([1, 2, 3], "suffix", (4, 4, 4))
    plan = controller.plan(1, costs)
    for _ in range(30):
        plan.spent("draft_model", 1, seconds)
        for position in range(4):
            controller.observe(Draft([1] * 4, "draft_model", (6,) * 4, is_free=False), position, True)
    assert plan.prefers(free, "draft_model", 3) is preferred
    assert not plan.prefers(free.cut(0), "draft_model", 3)
    assert not plan.prefers(free.cut(1), "draft_model", 15) or preferred  # the other one could go on
    assert DepthController("constant").plan(1, costs).prefers(free, "draft_model", 3)  # in their order


def test_a_free_draft_that_is_always_right():
    controller, costs = DepthController(), ForwardCosts()
    for width in (1, 1, 8, 8):
        costs.record(1, width, 0.1)
    plan = controller.plan(1, costs)
    free = Draft([1] * 7, "suffix", (24,) * 7)
    plan.spent("draft_model", 1, 0.02)
    assert not plan.prefers(free, "draft_model", 7)  # says its drafter, which isn't known yet
    for _ in range(30):
        for position in range(7):
            controller.observe(free, position, True)
    assert plan.prefers(free, "draft_model", 7)


def test_more_of_a_tree_is_verified_where_little_decides():
    """Tokens that bring 0.12 of a token each, at a price of 0.14: a loss of 0.08 in all is made light of."""
    controller, costs = DepthController(), ForwardCosts()
    for _ in range(12):
        for width in range(1, 10):
            costs.record(1, width, 86 + 14 * width)
    tree = Draft(list(range(8)), "suffix", (0,), parents=[-1] * 8)
    assert controller.rates.reaches(tree)[:2] == pytest.approx([0.124, 0.124], abs=1e-3)
    assert controller.trim([tree], costs) == 4
    assert controller.trim([tree.cut(2)], costs) == 2
    assert controller.trim([Draft([1], "suffix", (0,))], costs) == 0
