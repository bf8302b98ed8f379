"""From the engine's records to HTML: pure functions, and the style sheet that belongs to them. Everything that a model said is escaped."""

from __future__ import annotations

from html import escape
from time import monotonic
from typing import Any

from .engine import DRAFTERS, PLAIN, TARGET, Answer, Figures, Race, Round


LABELS = {TARGET: "target model", **{name: label for name, label in DRAFTERS.items() if name != PLAIN}}
SOURCES = (TARGET, "suffix", "ngram", "draft_model")

HEAD = '<style>@property --ag-tenths { syntax: "<integer>"; inherits: false; initial-value: 0; }</style>'
"""What counts up in a clock; Gradio drops such rules from `CSS`."""

CSS = """
.gradio-container { max-width: 1180px !important; margin: 0 auto !important; }
.gradio-container .html-container { padding: 0 !important; }
footer:not(.ag footer) { display: none !important; }
.ag-bottom { align-items: end; }
.ag-presets { gap: 0.4rem !important; }
.ag-presets button { flex: 0 0 auto !important; width: auto; min-width: 0 !important; white-space: nowrap; font-weight: 400; }
.ag {
  --plain: #55606e; --suffix: #0072b2; --ngram: #b35900; --draft_model: #00805c; --bad: #b3261e; --good: #00704a; --tint: 16%;
  --track: #e3e6ea; --faint: #5b6472; --line: var(--border-color-primary); --panel: var(--block-background-fill);
  color: var(--body-text-color); font-size: 0.9rem; line-height: 1.5;
}
.dark .ag {
  --plain: #a4afbd; --suffix: #63b8f2; --ngram: #f0a54a; --draft_model: #45cfa0; --bad: #ff8a80; --good: #5fd9a6; --tint: 24%;
  --track: #3f434b; --faint: #a9b0bb;
}
.ag :focus-visible { outline: 2px solid var(--suffix); outline-offset: 1px; border-radius: 3px; }
.ag .faint { color: var(--faint); }
.ag .caption { color: var(--faint); font-size: 0.8rem; }
.ag h1 { font-size: 1.35rem; margin: 0; line-height: 1.4; }
.ag p { margin: 0; }
.ag h3 { font-size: 0.82rem; font-weight: 600; margin: 0 0 0.35rem; color: var(--body-text-color); }

.ag .status { display: flex; align-items: baseline; gap: 0.5rem; min-height: 1.6rem; font-size: 0.85rem; color: var(--faint); }
.ag .status b { width: 0.6rem; height: 0.6rem; border-radius: 50%; background: var(--good); flex: none; }
.ag .status.loading b { background: var(--ngram); }
.ag .status.failed b { background: var(--bad); }

.ag .tiles { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1px; background: var(--line);
  border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
.ag .tile { background: var(--panel); padding: 0.5rem 0.7rem; min-height: 4.9rem; min-width: 0; }
.ag .tile.wide { grid-column: span 2; min-height: 5.4rem; display: flex; justify-content: space-between; gap: 1rem; }
.ag .tile dt { font-size: 0.76rem; color: var(--faint); margin: 0; white-space: nowrap; }
.ag .tile dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; line-height: 1.4; }
.ag .tile.wide dd { font-size: 1.75rem; line-height: 1.25; }
.ag .tile p { font-size: 0.74rem; color: var(--faint); line-height: 1.3; min-height: 1.3em; white-space: nowrap; }
.ag .note { min-height: 3.9em; margin: 0.4rem 0 0; font-size: 0.76rem; line-height: 1.3; color: var(--faint); }

.ag .strip { display: block; width: 100%; height: 64px; border-bottom: 1px solid var(--line); }
.ag .strip .drafted { fill: var(--track); }
.ag .strip .plain-step { fill: var(--plain); opacity: 0.55; }
.ag .axis { display: flex; justify-content: space-between; gap: 1rem; font-size: 0.74rem; color: var(--faint); margin-top: 0.2rem;
  white-space: nowrap; }
.ag .f-suffix { fill: var(--suffix); } .ag .f-ngram { fill: var(--ngram); } .ag .f-draft_model { fill: var(--draft_model); }

.ag .legend { display: flex; flex-wrap: wrap; gap: 0.2rem 0.9rem; font-size: 0.8rem; margin: 0 0 0.4rem; padding: 0; list-style: none; }
.ag .tokens { position: relative; border: 1px solid var(--line); border-radius: 8px; background: var(--panel); overflow: hidden; }
.ag .scroll { height: 15rem; overflow-y: auto; display: flex; flex-direction: column-reverse; /* stays at its end while it grows */
  padding: 0.6rem 0.8rem; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.75; }
.ag .bar, .ag .detail { min-height: 2.1rem; padding: 0.3rem 0.8rem; font-size: 0.8rem; border-top: 1px solid var(--line); }
.ag .bar { color: var(--faint); }
.ag .detail { display: none; position: absolute; left: 0; right: 0; bottom: 0; background: var(--panel); color: var(--body-text-color);
  white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.5; z-index: 1; max-height: 9rem; overflow: hidden; }
.ag .round:hover > .detail, .ag .round:focus > .detail { display: block; }
.ag .round:hover { background: var(--track); }
.ag .t-suffix, .ag .t-ngram, .ag .t-draft_model, .ag .t-other { --hue: var(--plain);
  background: color-mix(in srgb, var(--hue) var(--tint), transparent); text-decoration: underline; text-decoration-color: var(--hue);
  text-decoration-thickness: 2px; text-underline-offset: 3px; text-decoration-skip-ink: none; }
.ag .t-suffix { --hue: var(--suffix); }
.ag .t-ngram { --hue: var(--ngram); text-decoration-style: dashed; }
.ag .t-draft_model { --hue: var(--draft_model); text-decoration-style: double; }
.ag .t-other { text-decoration-style: wavy; }
.ag .refused { border-bottom: 2px dotted var(--bad); }
.ag s { color: var(--bad); text-decoration-thickness: 2px; }
.ag .special { color: var(--faint); font-size: 0.72em; border: 1px solid var(--line); border-radius: 4px; padding: 0 0.25em;
  white-space: nowrap; }
.ag .scroll > div { flex: 1 0 auto; }
.ag .scroll ol { list-style: none; margin: 0; padding: 0; }
.ag .scroll li { display: grid; grid-template-columns: 8.6rem minmax(0, 1fr); gap: 0.6rem; border-bottom: 1px solid var(--line);
  padding: 0.1rem 0; }
.ag .scroll li > .caption { line-height: 1.75rem; white-space: nowrap; }

.ag table.facts { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; border: 0 !important; margin: 0; }
.ag .facts th { text-align: left; font-weight: 500; color: var(--faint); vertical-align: top; padding: 0.25rem 0.8rem 0.25rem 0;
  width: 9rem; border: 0; }
.ag .facts td { padding: 0.25rem 0; border: 0; overflow-wrap: anywhere; }
.ag .facts tr { border: 0; border-bottom: 1px solid var(--line); }
.ag .facts tr:last-child { border-bottom: 0; }

.ag .verdict { min-height: 3.4rem; display: flex; flex-wrap: wrap; align-items: center; gap: 0.3rem 1.4rem; }
.ag .verdict strong { font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.ag .check { font-weight: 600; color: var(--good); }
.ag .check.differs { color: var(--bad); }
.ag .lanes { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 0.8rem; }
.ag .lane { border: 1px solid var(--line); border-radius: 8px; background: var(--panel); overflow: hidden; min-width: 0; }
.ag .lane header { display: flex; justify-content: space-between; gap: 0.5rem; padding: 0.45rem 0.8rem; font-weight: 600; }
.ag .lane header span { font-variant-numeric: tabular-nums; }
.ag .lane .scroll { height: 19rem; display: block; }
.ag .lane footer { padding: 0.4rem 0.8rem; border-top: 1px solid var(--line); font-size: 0.8rem; min-height: 2.1rem; color: var(--faint); }
.ag .track { height: 4px; background: var(--track); }
.ag .track i { display: block; height: 100%; background: var(--plain); transform-origin: left; transform: scaleX(0); }
.ag .lane.fast .track i { background: var(--suffix); }
.ag .replay .track i { animation: ag-run var(--whole) linear both; }
.ag .replay .at { animation: ag-show 1ms linear var(--at) both; }
.ag .replay .clock::after { animation: ag-clock var(--whole) linear both; }
.ag .replay .clock::after { counter-reset: whole calc((var(--ag-tenths) - 4.5) / 10) tenth calc(mod(var(--ag-tenths), 10));
  content: counter(whole) "." counter(tenth) " s"; }
.ag .clock { --ag-tenths: 0; }
@keyframes ag-show { from { visibility: hidden; } to { visibility: visible; } }
@keyframes ag-run { from { transform: scaleX(0); } to { transform: scaleX(1); } }
@keyframes ag-clock { from { --ag-tenths: 0; } to { --ag-tenths: var(--end); } }
@media (prefers-reduced-motion: reduce) { .ag * { animation-duration: 0s !important; animation-delay: 0s !important; } }
@media (max-width: 640px) {
  .ag .scroll li { grid-template-columns: minmax(0, 1fr); gap: 0; }
  .ag .lane .scroll { height: 11rem; }
  .ag .facts th { width: 6.5rem; }
  .ag .tile dd { font-size: 1.1rem; }
  .ag .tile p { white-space: normal; }
}
"""


def header(text: str, state: str = "ready") -> str:
    """Title and status line; `state`: `"ready"`, `"loading"` or `"failed"`."""
    return (
        '<div class="ag"><h1>assistgen</h1><p>The same model and the same answer in fewer steps: guesses are cheap, and the model '
        f'keeps only what it would have said itself.</p><div class="status {state}" role="status"><b></b>'
        f"<span>{escape(text)}</span></div></div>"
    )


# The tokens of an answer


def legend() -> str:
    entries = [f'<li><span class="{_token_class(source)}">{escape(LABELS[source])}</span></li>' for source in SOURCES]
    entries.append('<li><span class="refused">a draft was rejected here</span></li>')
    return f'<ul class="legend" aria-label="Where a token came from">{"".join(entries)}</ul>'


def tokens(answer: Answer | None, way: str) -> str:
    """
    The answer's tokens by origin.

    Args:
        way (`str`): `"tokens"`, running text with each round's story on hover, focus or tap; or `"rounds"`, a round a line with the
            rejected drafts struck through.
    """
    rounds = answer.rounds if answer else []
    if way == "rounds":
        lines = (
            f'<li><span class="caption">{_headline(i, each)}</span><span>{_with_refused(each)}</span></li>' for i, each in _numbered(rounds)
        )
        inner, hint = f"<ol>{''.join(lines)}</ol>", "One line for each forward of the target model; struck through: drafted and rejected."
    else:
        inner, hint = "".join(_round(i, each) for i, each in _numbered(rounds)), "Point at a token, tap it or tab to it to see its round."
    if not rounds:
        inner = '<span class="faint">The next answer is shown here, token by token.</span>'
    return (
        f'<div class="ag">{legend()}<div class="tokens"><div class="scroll" tabindex="0" aria-label="Tokens by origin">'
        f'<div>{inner}</div></div><div class="bar">{hint}</div></div></div>'
    )


def _numbered(rounds: list[Round]) -> Any:
    return enumerate(rounds, start=1)


def _round(number: int, each: Round) -> str:
    refused = " refused" if each.rejected else ""
    last = len(each.tokens) - 1
    spans = "".join(_token(token, refused if i == last else "") for i, token in _merged(each))
    story = f"Round {_headline(number, each)}"
    if each.drafted:
        story += " drafted tokens accepted"
    if each.rejected:
        story += f"; rejected: <s>{escape(each.rejected)}</s>"
    focus = ' tabindex="0"' if each.drafted else ""
    return f'<span class="round"{focus}>{spans}<span class="detail" role="note">{story}</span></span>'


def _merged(each: Round) -> Any:
    """The round's tokens, each with its index; a token without text stays silent."""
    return ((i, token) for i, token in enumerate(each.tokens) if token.text)


def _token(token: Any, more: str = "") -> str:
    if token.is_special:
        return f'<span class="special">{escape(token.text)}</span>'
    return f'<span class="{_token_class(token.source)}{more}">{escape(token.text)}</span>'


def _with_refused(each: Round) -> str:
    accepted = "".join(_token(token) for i, token in _merged(each) if i < each.accepted)
    target = "".join(_token(token) for i, token in _merged(each) if i >= each.accepted)
    refused = f"<s>{escape(each.rejected)}</s>" if each.rejected else ""
    return accepted + refused + target


def _headline(number: int, each: Round) -> str:
    if not each.drafted:
        return f"{number} · {'prompt read' if number == 1 else 'plain step'}"
    return f"{number} · {escape(LABELS.get(each.drafter or '', each.drafter or ''))} {each.accepted} of {each.drafted}"


def _token_class(source: str) -> str:
    return f"t-{source}" if source in SOURCES else "t-other"


def strip(answer: Answer | None) -> str:
    """Depth and acceptance over the answer: a bar for each round, as high as its draft, coloured as far as it was accepted."""
    rounds = answer.rounds if answer else []
    slots, deepest = max(48, len(rounds)), max([15, *(each.drafted for each in rounds)])
    bars = []
    for i, each in enumerate(rounds):
        if each.drafted:
            known = each.drafter if each.drafter in SOURCES else "suffix"
            bars.append(_bar(i, each.drafted, deepest, "drafted") + _bar(i, each.accepted, deepest, f"f-{known}"))
        else:
            bars.append(_bar(i, 0.5, deepest, "plain-step"))
    drafts = sum(each.drafted > 0 for each in rounds)
    told = f"{len(rounds)} rounds, {drafts} with a draft, {sum(each.accepted for each in rounds)} drafted tokens accepted"
    return (
        f'<div class="ag"><h3>Drafted and accepted, round by round</h3><svg class="strip" viewBox="0 0 {slots} {deepest}" '
        f'preserveAspectRatio="none" role="img" aria-label="{told}">{"".join(bars)}</svg>'
        f'<div class="axis"><span>drafted, up to {deepest}; coloured: accepted</span>'
        f"<span>{len(rounds)} rounds</span></div></div>"
    )


def _bar(slot: int, height: float, deepest: int, style: str) -> str:
    return f'<rect class="{style}" x="{slot + 0.1:g}" y="{deepest - height:g}" width="0.8" height="{height:g}"/>'


# Figures


def figures(answer: Answer | None) -> str:
    told = answer.figures if answer else None
    plain = told.plain if told else None
    drafted = f"{told.accepted} of {told.drafted} drafted" if told else "of drafted tokens"
    forwards = f"{told.tokens} tokens, {told.forwards} forwards" if told else "tokens, forwards"
    return (
        '<div class="ag"><dl class="tiles">'
        '<div class="tile wide"><div>'
        + _entry("tokens per second", _number(told and told.rate, ".1f"), _progress(answer))
        + '</div><div style="text-align:right">'
        + _entry(
            "speed-up over plain", _number(told and told.speedup, ".2f", "×"), f"plain: {1 / plain.seconds:.1f} tokens/s" if plain else ""
        )
        + "</div></div>"
        + _tile("acceptance", _number(told.accepted / told.drafted if told and told.drafted else None, ".0%"), drafted)
        + _tile(
            "acceptance length", _number(told.mean_acceptance_length if told and told.drafted else None, ".1f"), "tokens a drafted round"
        )
        + _tile("first token", _seconds(told and told.ttft), "after the prompt was read")
        + _tile("between tokens", _between(told), "p50 / p95; 0 inside a draft")
        + _tile("target forwards saved", str(told.forwards_saved) if told else "–", forwards)
        + _tile("prompt from the cache", f"{told.cached_tokens} / {told.prompt_tokens}" if told else "–", "tokens, of the last turn")
        + f'</dl><p class="note">{_origin(told)}</p></div>'
    )


def _tile(name: str, value: str, note: str) -> str:
    return f'<div class="tile">{_entry(name, value, note)}</div>'


def _entry(name: str, value: str, note: str) -> str:
    return f"<dt>{name}</dt><dd>{value}</dd><p>{escape(note)}</p>"


def _progress(answer: Answer | None) -> str:
    if answer is None:
        return "after the first token"
    doing = {"running": "so far", "measuring": "measuring plain", "stopped": "stopped", "done": "done"}[answer.state]
    return f"{len(answer.ids)} tokens, {doing}"


def _origin(told: Figures | None) -> str:
    """Where the speed-up comes from, in words."""
    if told is None or told.plain is None:
        return "The speed-up is measured: plain decoding runs on this machine at a similar context."
    waited = f" {told.waited:.1f} s of waiting for other visitors are not counted." if told.waited >= 0.5 else ""
    if told.plain.own:
        return f"Plain: the mean of the {told.plain.steps} rounds of this answer that verified no draft.{waited}"
    ago = monotonic() - told.plain.at
    when = "just now" if ago < 5 else f"{ago:.0f} s ago"
    return f"Plain: {told.plain.steps} steps of plain decoding, measured {when} at {told.plain.context} tokens of context.{waited}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _between(told: Figures | None) -> str:
    if told is None or told.itl_p50 is None:
        return "–"
    return f"{1000 * told.itl_p50:.0f} / {1000 * told.itl_p95:.0f} ms"


# What the controller chose


def controller(answer: Answer | None, learned: dict[str, Any] | None) -> str:
    """What was chosen in this answer, and what the choice went by (`engine.what_was_learned`; `None` for plain decoding)."""
    if answer is None:
        return '<div class="ag"><p class="faint">After the first answer: which drafters were chosen, how deep, and why.</p></div>'
    rounds = answer.rounds[1:]  # the first reads the prompt
    rows = []
    for source in dict.fromkeys(each.drafter for each in rounds if each.drafter):
        drafts = [each for each in rounds if each.drafter == source]
        drafted, accepted = sum(each.drafted for each in drafts), sum(each.accepted for each in drafts)
        deep = drafted / len(drafts)
        rows.append(
            (
                f"{LABELS.get(source, source)}",
                f"chosen in {_of(len(drafts), len(rounds))}, {deep:.1f} tokens deep on average; {accepted} of {drafted} accepted",
            )
        )
    plain = sum(not each.drafted for each in rounds)
    if answer.drafter == PLAIN:
        rows.append(("plain steps", "all: no drafter is chosen"))
    elif plain:
        rows.append(("plain steps", f"{_of(plain, len(rounds))}: nothing to draft there, or its chance was not worth a wider forward"))
    for reason, count in (answer.stats.fallbacks if answer.stats else {}).items():
        rows.append(("fallback", f"{reason} ({count}×)"))
    if learned is not None:
        rows += _learned(learned)
    body = "".join(f"<tr><th scope='row'>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f'<div class="ag"><table class="facts"><tbody>{body}</tbody></table></div>'


def _learned(learned: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for source, chance in learned["acceptance"].items():
        rows.append((f"{LABELS.get(source, source)}, learned", f"{chance:.0%} of what it drafts, competing tokens too, is right, of late"))
    wider = {width: cost for width, cost in learned["costs"].items() if width > 1}
    if wider:
        told = ", ".join(f"{width} tokens {cost:.1f}" for width, cost in wider.items())
        rows.append(("cost of a forward", f"in plain steps, measured: {told}"))
    if learned["strategy"] == "adaptive":
        rows.append(
            (
                "pace of late",
                f"{learned['speedup']:.2f}× plain by the controller's own count; a draft is verified where it is expected to bring more",
            )
        )
    rows += [
        (LABELS.get(source, source), "rests: its rounds brought less than plain steps would have; tried again now and then")
        for source in learned["idle"]
    ]
    rows += [(LABELS.get(source, source), f"kept away after a fault: {reason}") for source, reason in learned["faults"].items()]
    return rows


def _of(count: int, whole: int) -> str:
    return f"{count} of {whole} rounds"


# A race


def race(each: Race | None) -> str:
    """Both sides: counts while they run, and at the end a replay at true speed that the browser animates by itself."""
    if each is None:
        verdict = '<span class="faint">Run a race to see plain and speculative decoding side by side.</span>'
        return _lanes(verdict, _lane("plain", "plain"), _lane("with speculation", "fast"))
    fast = f"with speculation ({LABELS[each.drafter]})"
    if each.state == "done" and each.plain is not None and each.fast is not None:
        verdict = f"<strong>{each.speedup:.2f}× as fast</strong>{_check(each)}"
        return _lanes(verdict, _replay("plain", "plain", each.plain), _replay(fast, "fast", each.fast))
    doing = {"waiting": "Waiting for the model …", "warming up": "Warming up …", "stopped": "Stopped."}.get(each.state)
    doing = doing or "Measuring one after the other, since two at once would share the processor. The replay follows."
    counts = [f"{len(side.ids)} tokens" if side else "" for side in (each.plain, each.fast)]
    return _lanes(f'<span class="faint">{doing}</span>', _lane("plain", "plain", counts[0]), _lane(fast, "fast", counts[1]))


def _check(each: Race) -> str:
    comparison = each.comparison
    if comparison.identical:
        return f'<span class="check">✓ identical output</span><span class="faint">all {len(each.fast.ids)} token ids are equal</span>'
    return f'<span class="check{"" if comparison.proven_tie else " differs"}">output {escape(str(comparison))}</span>'


def _lanes(verdict: str, first: str, second: str) -> str:
    return f'<div class="ag race"><div class="verdict" role="status">{verdict}</div><div class="lanes">{first}{second}</div></div>'


def _lane(name: str, side: str, clock: str = "", text: str = "", note: str = "", style: str = "") -> str:
    return (
        f'<section class="lane {side}{" replay" if style else ""}" style="{style}" aria-label="{escape(name)}">'
        f'<header><span>{escape(name)}</span><span class="clock">{clock}</span></header><div class="track"><i></i></div>'
        f'<div class="scroll" tabindex="0">{text}</div><footer>{note}</footer></section>'
    )


def _replay(name: str, side: str, answer: Answer) -> str:
    """Each token appears after as many seconds as it took."""
    whole, now, shown = answer.times[-1], 0.0, []
    for each in answer.rounds:
        now += each.seconds
        shown.append(f'<span class="at" style="--at:{now:.3f}s">{"".join(_token(token) for _, token in _merged(each))}</span>')
    told = answer.figures
    note = f"{told.tokens} tokens in {whole:.2f} s · {told.forwards} forwards of the target · first token after {told.ttft:.2f} s"
    note = f'<span class="at" style="--at:{whole:.3f}s">{note}</span>'
    return _lane(name, side, "", "".join(shown), note, f"--whole:{whole:.3f}s;--end:{round(10 * whole)}")
