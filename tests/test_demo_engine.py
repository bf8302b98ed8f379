"""The demo without a browser: conversations, races and pages, with SmolLM2 and with records made by hand."""

import re
import threading

import pytest
import torch

from demos import engine, view
from demos.engine import Answer, Conversation, DemoError, PlainSpeed, Race, Round, Settings, Token


NAME = "smollm2-135m"
LIST = "Repeat this list: red, green, blue, red, green, blue, red, green, blue"
SHORT = Settings(max_new_tokens=12)


@pytest.fixture(scope="module")
def host():
    host = engine.Host([NAME], "float32")
    host.load(NAME)
    return host


@pytest.fixture
def forwards(host):
    """Grows by one with each forward of the model."""
    counted = []
    hook = host.load(NAME).model.register_forward_hook(lambda *arguments: counted.append(1))
    yield counted
    hook.remove()


def told(conversation, text, settings=SHORT):
    conversation.ask(text)
    *_, answer = conversation.reply(NAME, settings)
    return answer


def plainly(host, messages, tokens=SHORT.max_new_tokens):
    """Ids that plain `generate()` answers with."""
    loaded = host.load(NAME)
    ids = torch.tensor([loaded.prompt_ids(messages)])
    output = host.run(
        lambda: loaded.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=2)
    )
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.weights
def test_later_turns_read_only_what_is_new(host):
    conversation = Conversation(host)
    first = told(conversation, LIST)
    assert first.ids == plainly(host, conversation.messages[:1]) and first.cached_tokens == 0
    second = told(conversation, "Once more.")
    assert second.ids == plainly(host, conversation.messages[:3])
    # All but the last token of the answer, which no forward has read, and what the template puts behind it.
    assert second.cached_tokens >= first.prompt_tokens + len(first.ids) - 1
    assert second.cached_tokens < second.prompt_tokens
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2


@pytest.mark.weights
def test_regenerate_edit_and_undo_go_on_from_what_is_shared(host):
    conversation = Conversation(host)
    first = told(conversation, LIST)
    conversation.ask(LIST, 0)
    *_, again = conversation.reply(NAME, SHORT)
    assert again.ids == first.ids and again.cached_tokens == again.prompt_tokens - 1
    edited = LIST.replace("blue", "pink")
    conversation.ask(edited, 0)
    *_, answer = conversation.reply(NAME, SHORT)
    assert answer.ids == plainly(host, [{"role": "user", "content": edited}]) and 0 < answer.cached_tokens < answer.prompt_tokens - 10
    assert conversation.undo(0) == edited and conversation.messages == []


@pytest.mark.weights
def test_a_stopped_answer_ends_within_one_round(host, forwards):
    conversation = Conversation(host)
    conversation.ask("Tell me a long story.")
    answers = conversation.reply(NAME, Settings(max_new_tokens=200))
    for _ in range(3):
        answer = next(answers)
    before = len(forwards)
    conversation.stop()
    *_, answer = answers
    assert len(forwards) == before and answer.state == "stopped" and 3 <= len(answer.ids) < 200
    assert conversation.messages[-1]["content"] == answer.text
    assert told(conversation, "Go on.", Settings(max_new_tokens=2)).cached_tokens > answer.prompt_tokens


@pytest.mark.weights
@pytest.mark.parametrize("end", ["close", "leave"])
def test_an_abandoned_answer_ends_within_one_round(host, forwards, end):
    visitors = engine.Visitors(host)
    conversation = visitors["someone"]
    conversation.ask("Tell me a long story.")
    answers = conversation.reply(NAME, Settings(max_new_tokens=200))
    next(answers)
    before = len(forwards)
    if end == "leave":
        visitors.leave("someone")
        assert len(visitors) == 0
        for _ in answers:
            pass
    else:
        answers.close()
    assert len(forwards) == before and not conversation.is_busy
    assert (conversation._cache is None) == (end == "leave")  # who has left holds no memory


@pytest.mark.weights
def test_a_second_answer_ends_the_first(host):
    conversation = Conversation(host)
    conversation.ask("Tell me a long story.")
    first = conversation.reply(NAME, Settings(max_new_tokens=200))
    stale = next(first)

    def go_on():
        for _ in first:
            pass

    thread = threading.Thread(target=go_on)
    thread.start()
    answer = told(conversation, LIST)
    thread.join(60)
    assert stale.state == "stopped" and answer.state == "done" and conversation.answer is answer


@pytest.mark.weights
def test_plain_speed_is_measured_after_an_answer_and_gives_way(host, forwards, monkeypatch):
    monkeypatch.setattr(engine, "ENOUGH_STEPS", 100)
    monkeypatch.setattr(host.load(NAME), "_speeds", [])
    conversation = Conversation(host)
    assert not list(conversation.measure())  # there is no answer yet
    assert told(conversation, LIST).plain is None
    before = len(forwards)
    answers = conversation.measure()
    assert next(answers).state == "measuring"
    conversation.stop()
    *_, answer = answers
    assert answer.state == "done" and answer.plain is None and len(forwards) == before
    conversation.clear()
    again = told(conversation, LIST)
    *_, answer = conversation.measure()
    assert answer is again and answer.state == "done" and answer.plain.steps == Conversation.MEASURED_TOKENS - 1
    conversation.clear()
    assert told(conversation, LIST).plain is answer.plain and [each.state for each in conversation.measure()] == ["done"]


@pytest.mark.weights
def test_visitors_who_sample_draw_as_if_they_were_alone(host):
    first, second = (Settings(temperature=1.0, top_p=0.9, seed=seed, max_new_tokens=8) for seed in (1, 2))
    alone = [told(Conversation(host), LIST, settings).ids for settings in (first, second)]
    answers = []
    for settings in (first, second):
        conversation = Conversation(host)
        conversation.ask(LIST)
        answers.append(conversation.reply(NAME, settings))
    together = [None, None]
    while (grown := [next(answer, None) for answer in answers]) != [None, None]:
        together = [new or old for new, old in zip(grown, together, strict=True)]
    assert [answer.ids for answer in together] == alone and alone[0] != alone[1]


@pytest.mark.weights
def test_every_drafter_gives_the_plain_answer_and_says_where_tokens_are_from(host):
    plain = plainly(host, [{"role": "user", "content": LIST}], 16)
    for drafter, depth, draft_model in (
        ("auto", "constant", None), ("suffix", "constant", None), ("ngram", "heuristic", None), ("draft_model", "constant", NAME),
        ("none", "adaptive", None),
    ):  # fmt: skip
        answer = told(Conversation(host), LIST, Settings(drafter=drafter, depth=depth, draft_model=draft_model, max_new_tokens=16))
        assert answer.ids == plain, drafter
        assert "".join(token.text for each in answer.rounds for token in each.tokens if not token.is_special) == answer.text
        sources = {token.source for each in answer.rounds for token in each.tokens}
        assert sources == ({"target"} if drafter == "none" else {"target", {"auto": "suffix"}.get(drafter, drafter)}), drafter
        figures = answer.figures
        assert figures.forwards_saved == figures.accepted and figures.tokens == 16 == figures.forwards + figures.forwards_saved
        if drafter == "none":
            assert figures.plain.own and figures.speedup == pytest.approx(1)


@pytest.mark.weights
def test_what_cannot_be_done_is_said_and_the_conversation_stays_usable(host, monkeypatch):
    conversation = Conversation(host)
    with pytest.raises(DemoError, match="Write a message"):
        conversation.ask("  ")
    conversation.ask(LIST)
    with pytest.raises(DemoError, match="isn't offered"):
        next(conversation.reply("no-such-model", SHORT))
    with pytest.raises(DemoError, match="Choose a draft model"):
        next(conversation.reply(NAME, Settings(drafter="draft_model")))
    conversation.ask("word " * 9000, 0)
    with pytest.raises(DemoError, match="tokens, the model takes"):
        next(conversation.reply(NAME, SHORT))
    conversation.ask(LIST, 0)
    with monkeypatch.context() as patch:
        patch.setattr(engine.Decode, "advance", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError()))
        with pytest.raises(DemoError, match="out of memory"):
            list(conversation.reply(NAME, SHORT))
    assert told(conversation, LIST).state == "done" and not conversation.is_busy


def test_models_that_cannot_be_loaded_say_why(tmp_path):
    with pytest.raises(DemoError, match="could not be loaded"):
        engine.Host([str(tmp_path)], "float32").load(str(tmp_path))


def test_quiet_visitors_give_way():
    visitors = engine.Visitors(engine.Host([]), most=3, caches=2)
    conversations = [visitors[str(i)] for i in range(3)]
    conversations[0]._cache = conversations[2]._cache = "kept"
    visitors["3"]
    assert len(visitors) == 3
    assert conversations[0]._cache is None and conversations[2]._cache == "kept"


@pytest.mark.weights
def test_a_race_compares_ids_and_keeps_the_times(host):
    race = Race("auto")
    engine.run_race(host, NAME, LIST, Settings(max_new_tokens=16), race).result()
    assert race.state == "done" and race.comparison.identical and race.plain.ids == race.fast.ids
    assert race.plain.cached_tokens == race.fast.cached_tokens == 0
    assert len(race.plain.times) == 16 and race.plain.times == sorted(race.plain.times)
    assert race.speedup == pytest.approx(race.plain.times[-1] / race.fast.times[-1])
    page = view.race(race)
    assert "✓ identical output" in page and f"--whole:{race.plain.times[-1]:.3f}s" in page
    race.comparison = type(race.comparison)(False, at=3, gap=0.5)
    assert "✓" not in view.race(race) and "DIFFERENT at token 3" in view.race(race)


@pytest.mark.weights
def test_a_race_can_be_stopped(host, forwards):
    race = Race("auto")
    race.stopped.set()
    engine.run_race(host, NAME, LIST, SHORT, race).result()
    assert race.state == "stopped" and not forwards
    with pytest.raises(DemoError, match="can't race against itself"):
        engine.run_race(host, NAME, LIST, Settings(drafter="none"), race)


def record():
    """A round that read the prompt, one with a draft of four of which two were accepted, one plain step that ends the answer."""
    answer = Answer(10, 4, "auto", PlainSpeed(0.1, 8, 10, 0.0))
    answer.rounds = [
        Round((Token("<b>", "target"),), None, 0, 0, "", 0.5),
        Round((Token("a", "suffix"), Token("b", "suffix"), Token("c", "target")), "suffix", 4, 2, "<i>no", 0.2),
        Round((Token("<|end|>", "target", True),), None, 0, 0, "", 0.1),
    ]
    answer.ids = [1, 2, 3, 4, 5]
    answer.text, answer.state = "<b>abc", "done"
    return answer


def test_figures(monkeypatch):
    assert record().figures.speedup is None  # too few tokens to tell
    monkeypatch.setattr(engine, "ENOUGH_STEPS", 4)
    figures = record().figures
    assert figures.rate == pytest.approx(4 / 0.3) and figures.speedup == pytest.approx(4 / 3)
    assert (figures.drafted, figures.accepted, figures.mean_acceptance_length) == (4, 2, 3.0)
    assert (figures.ttft, figures.itl_p50, figures.itl_p95) == (0.5, 0.05, 0.2)
    assert (figures.forwards, figures.forwards_saved) == (3, 2)
    page = view.figures(record())
    assert "50%" in page and "1.33×" in page and "4 / 10" in page and "50 / 200 ms" in page


def test_tokens_are_coloured_and_escaped():
    for way in ("tokens", "rounds"):
        page = view.tokens(record(), way)
        assert "<b>" not in page.replace("<b></b>", "") and "&lt;b&gt;" in page
        assert "<s>&lt;i&gt;no</s>" in page and "&lt;|end|&gt;" in page
        assert re.findall(r'class="t-suffix">([^<]*)', page)[-2:] == ["a", "b"]
    # A round with a draft can be reached by keyboard, and says what it rejected.
    assert re.search(r'class="round" tabindex="0">.*suffix 2 of 4 drafted tokens accepted; rejected', view.tokens(record(), "tokens"))


def test_the_strip_has_a_bar_for_each_round():
    page = view.strip(record())
    assert page.count('class="drafted"') == page.count('class="f-suffix"') == 1 and page.count('class="plain-step"') == 2
    assert 'height="4"' in page and 'height="2"' in page


def test_the_controller_says_what_it_chose():
    learned = {
        "strategy": "adaptive", "speedup": 1.5, "acceptance": {"suffix": 0.5}, "idle": ["draft_model"], "costs": {1: 1.0, 2: 1.7},
        "faults": {"ngram": "<broken>"},
    }  # fmt: skip
    page = view.controller(record(), learned)
    for words in ("chosen in 1 of 2 rounds", "2 of 4 accepted", "1 of 2 rounds: nothing", "50% of what it drafts", "2 tokens 1.7", "1.50×",
                  "rests:", "&lt;broken&gt;"):  # fmt: skip
        assert words in page
