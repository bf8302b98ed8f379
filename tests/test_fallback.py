"""A drafter's faults never change the output: injected in calls of one row and of several, in a chain, and across calls."""

import threading
import time

import pytest
import torch

import assistgen
from assistgen import Speculator
from assistgen.drafters.base import Draft, Drafter
from assistgen.fallback import Breaker, GuardedDrafter
from assistgen.stats import SpeculationStats

from .tiny import VOCAB, build, pad_left, prompt


pytestmark = pytest.mark.exactness
KW = {"max_new_tokens": 24, "do_sample": False}


class FaultyDrafter(Drafter):
    """Drafts the truth until, in its `after`th round, something goes wrong; `row` has the fault where a fault has a row."""

    name = "faulty"

    def __init__(self, truth, fault, after=2, row=0):
        self.truth, self.fault, self.after, self.row = truth, fault, after, row
        self.rounds = 0

    def begin(self, rows):
        if self.fault == "raises in begin":
            raise RuntimeError("begin")
        self.lengths = [len(row) for row in rows]

    def propose(self, rows, max_tokens, plan):
        self.rounds += 1
        drafts = [
            Draft(self.truth[row][self.lengths[row] :][: min(3, room)], self.name) for row, room in zip(rows, max_tokens, strict=True)
        ]
        if self.rounds < self.after:
            return drafts
        place = rows.index(self.row) if self.row in rows else 0
        draft = drafts[place]
        match self.fault:
            case "raises":
                raise RuntimeError("in the middle of a draft")
            case "out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            case "hangs":
                time.sleep(5)
            case "too few drafts":
                return drafts[1:]
            case "foreign ids":
                draft.tokens = [VOCAB + 5] * 2
            case "negative ids":
                draft.tokens = [-1, 3]
            case "wrong shape":
                draft.probs = torch.full((len(draft.tokens) + 1, VOCAB), 1 / VOCAB)
            case "wrong vocabulary":
                draft.probs = torch.full((len(draft.tokens), VOCAB + 3), 1 / VOCAB)
            case "NaN":
                draft.probs = torch.full((len(draft.tokens), VOCAB), float("nan"))
            case "wrong guesses":
                for each in drafts:
                    each.tokens = [(token + 1) % 70 + 2 for token in each.tokens]
        return drafts

    def commit(self, row, tokens):
        if self.fault == "raises in commit" and self.rounds >= self.after:
            raise KeyError("commit")
        self.lengths[row] += len(tokens)

    def end(self):
        if self.fault == "raises in end":
            raise OSError("end")


REASONS = {
    "raises": "RuntimeError", "raises in begin": "RuntimeError", "raises in commit": "KeyError", "raises in end": "OSError",
    "out of memory": "out of memory", "hangs": "timeout", "too few drafts": "ValueError", "foreign ids": "ValueError",
    "negative ids": "ValueError", "wrong shape": "ValueError", "wrong vocabulary": "ValueError", "NaN": "FloatingPointError",
}  # fmt: skip


def faulty_speculator(model, inputs, fault, row=0, tokens=24, **config):
    """A `Speculator` whose only drafter is a `FaultyDrafter`, guarded as any."""
    truth = model.generate(**inputs, max_new_tokens=tokens, do_sample=False).tolist()
    mask = inputs["attention_mask"].tolist()
    truth = [[token for token, real in zip(ids, real + [1] * tokens, strict=True) if real] for ids, real in zip(truth, mask, strict=True)]
    speculator = Speculator({"method": "ngram", "depth": "constant", **config})
    speculator._make = lambda *args: FaultyDrafter(truth, fault, row=row)
    return speculator


def batch(rows):
    return pad_left([prompt(12 + 3 * row, seed=row) for row in range(rows)])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("fault", REASONS)
def test_faults(fault, rows, caplog):
    model, inputs = build(), batch(rows)
    plain = model.generate(**inputs, **KW)
    config = {"draft_timeout_s": 0.3} if fault == "hangs" else {}
    speculator = faulty_speculator(model, inputs, fault, row=rows - 1, **config)
    output = assistgen.generate(model, **inputs, speculation=speculator, return_dict_in_generate=True, **KW)
    assert torch.equal(output.sequences, plain)
    stats = output.speculation
    assert stats.fallbacks == {f"the drafter 'faulty' failed: {REASONS[fault]}": 1}
    if fault != "raises in begin":
        assert stats.num_accepted_tokens > 0  # it did speculate before
    warnings = [record for record in caplog.records if record.levelname == "WARNING" and "faulty" in record.message]
    assert len(warnings) == 1
    assert warnings[0].exc_info is not None
    assert speculator.breakers["faulty"].state == "open"


def test_breaker_opens_and_closes():
    model, inputs = build(), batch(1)
    speculator = faulty_speculator(model, inputs, "raises")
    now = [0.0]
    breaker = speculator.breakers["faulty"] = Breaker(clock=lambda: now[0])
    call = {"speculation": speculator, "return_dict_in_generate": True, **KW}

    def run():
        return assistgen.generate(model, **inputs, **call).speculation

    assert run().num_accepted_tokens > 0
    assert breaker.state == "open"
    resting = run()
    assert resting.num_drafts == 0
    assert resting.fallbacks == {"the drafter 'faulty' rests after a fault: RuntimeError": 1}
    now[0] += 10.1
    assert breaker.state == "half-open"
    assert run().num_drafts > 0  # tried, and failed again
    assert breaker.state == "open"
    now[0] += 10.1
    assert breaker.state == "open"  # for twice as long
    now[0] += 10.0
    truth = speculator._make().truth
    speculator._make = lambda *args: FaultyDrafter(truth, None)
    good = run()
    assert good.num_drafts > 0
    assert not good.fallbacks
    assert breaker.state == "closed"
    assert breaker.cool_down_s == Breaker.COOL_DOWN_S


def test_half_open_admits_one_call_at_a_time():
    now = [0.0]
    breaker = Breaker(clock=lambda: now[0])
    breaker.report("fault", drafted=True)
    assert not breaker.admits()
    now[0] = 11.0
    assert breaker.admits()
    assert not breaker.admits()
    breaker.report(None, drafted=False)  # the call ended before it drafted: nothing was learned
    assert breaker.state == "half-open"
    assert breaker.admits()
    breaker.report(None, drafted=True)
    assert breaker.admits()
    assert breaker.admits()


def test_calls_that_fail_together_open_the_breaker_once():
    breaker = Breaker(clock=lambda: 0.0)
    assert all(breaker.admits() for _ in range(5))
    for _ in range(5):
        breaker.report("fault", drafted=True)
    assert breaker.cool_down_s == Breaker.COOL_DOWN_S


def test_keyboard_interrupt_passes():
    class Interrupted(FaultyDrafter):
        def propose(self, rows, max_tokens, plan):
            raise KeyboardInterrupt

    model, inputs = build(), batch(1)
    speculator = faulty_speculator(model, inputs, None)
    speculator._make = lambda *args: Interrupted([[]], None)
    with pytest.raises(KeyboardInterrupt):
        assistgen.generate(model, **inputs, speculation=speculator, **KW)


def test_an_abandoned_worker_is_left_alone():
    """What hung may come back at any time; nothing of it reaches the call, and the next drafter is a new one."""
    model, inputs = build(), batch(1)
    speculator = faulty_speculator(model, inputs, "hangs", draft_timeout_s=0.2)
    start = time.monotonic()
    assistgen.generate(model, **inputs, speculation=speculator, **KW)
    assert time.monotonic() - start < 4
    assert any(thread.name == "drafter-faulty" and thread.daemon for thread in threading.enumerate())


@pytest.mark.parametrize("rows", [1, 2])
def test_min_acceptance(rows):
    model, inputs = build(), batch(rows)
    kwargs = KW | {"max_new_tokens": 60}
    plain = model.generate(**inputs, **kwargs)
    speculator = faulty_speculator(model, inputs, "wrong guesses", tokens=60, min_acceptance=0.2)
    output = assistgen.generate(model, **inputs, speculation=speculator, return_dict_in_generate=True, **kwargs)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.fallbacks == {"the drafter 'faulty' accepts less than min_acceptance=0.2": 1}
    assert output.speculation.num_draft_tokens < 64 + 4 * rows


def test_min_acceptance_leaves_a_good_drafter_alone():
    stats = SpeculationStats()
    guard = GuardedDrafter(FaultyDrafter([[]], None), Breaker(), VOCAB, stats, min_acceptance=0.5)
    for _ in range(100):
        guard.observe(Draft([1, 2, 3, 4], "faulty"), 2)
        guard.observe(Draft([1, 2, 3, 4], "another"), 0)
    assert not stats.fallbacks
    for _ in range(40):
        guard.observe(Draft([1, 2, 3, 4], "faulty"), 0)
    assert len(stats.fallbacks) == 1  # it is judged by its latest tokens


def test_one_drafter_of_a_chain():
    """The others go on."""
    model, ids = build(seed=1), prompt(40, period=5)
    plain = model.generate(ids, **KW)
    speculator = Speculator({"drafters": ["suffix", "ngram"], "depth": "constant"})
    make = speculator._make
    speculator._make = lambda config, *args: FaultyDrafter([[]], "raises", after=1) if config.method == "suffix" else make(config, *args)
    output = assistgen.generate(model, ids, speculation=speculator, return_dict_in_generate=True, **KW)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.fallbacks == {"the drafter 'faulty' failed: RuntimeError": 1}
    assert output.speculation.drafters["ngram"].num_drafts > 0
    assert set(speculator.breakers) == {"faulty", "ngram"}


@pytest.mark.parametrize("rows", [1, 2])
def test_draft_model_with_nan_logits(rows):
    model, inputs, draft = build(), batch(rows), build(seed=3)
    with torch.no_grad():
        draft.lm_head.weight[5] = float("nan")
    plain = model.generate(**inputs, **KW)
    speculation = {"method": "draft_model", "model": draft, "depth": "constant"}
    output = assistgen.generate(model, **inputs, speculation=speculation, return_dict_in_generate=True, **KW)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.fallbacks == {"the drafter 'draft_model' failed: FloatingPointError": 1}


def test_a_broken_off_forward_leaves_no_cache_behind():
    """The draft model fails in the middle of a forward; the next call with the same `Speculator` starts afresh."""
    model, inputs, draft = build(), batch(1), build()
    plain = model.generate(**inputs, **KW)
    speculator = Speculator({"method": "draft_model", "model": draft, "depth": "constant"})
    calls = [0]

    def fails(*args):
        calls[0] += 1
        if calls[0] == 9:
            raise RuntimeError("in the second layer")

    handle = draft.model.layers[1].register_forward_pre_hook(fails)
    first = assistgen.generate(model, **inputs, speculation=speculator, return_dict_in_generate=True, **KW)
    handle.remove()
    assert torch.equal(first.sequences, plain)
    assert first.speculation.fallbacks == {"the drafter 'draft_model' failed: RuntimeError": 1}
    speculator.breakers.clear()
    second = assistgen.generate(model, **inputs, speculation=speculator, return_dict_in_generate=True, **KW)
    assert torch.equal(second.sequences, plain)
    assert not second.speculation.fallbacks
    assert second.speculation.num_accepted_tokens == second.speculation.num_draft_tokens > 10
