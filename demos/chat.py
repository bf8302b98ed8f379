"""The demo's page: `python -m demos.chat`, or `make demo`."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from time import monotonic
from typing import Any

import gradio as gr
import transformers

from assistgen import weights

from . import engine, view
from .presets import PRESETS


logger = logging.getLogger(__name__)

EVERY_S = 0.15
"""Seconds between two pictures of a growing answer: more would take from the processor that decodes it."""
RACE_EVERY_S = 0.5
NO_DRAFT_MODEL = ""
SYSTEM_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Liberation Sans", "sans-serif"]
SYSTEM_MONO = ["ui-monospace", "Menlo", "Consolas", "Liberation Mono", "monospace"]
RESTART = "() => { for (const a of document.querySelector('.race').getAnimations({subtree: true})) { a.currentTime = 0; a.play(); } }"

QUIET = {"show_progress": "hidden", "api_visibility": "private"}


class Page:
    """
    The page for one host.

    Args:
        host (`Host`): the models.
        max_new_tokens (`int`): the longest answer, until a visitor chooses.

    Attributes:
        blocks (`gr.Blocks`): to be launched.
        visitors (`Visitors`): who is there.
    """

    def __init__(self, host: engine.Host, max_new_tokens: int = 256):
        self.host = host
        self._max_new_tokens = max_new_tokens
        self.visitors = engine.Visitors(host)
        with gr.Blocks(title="assistgen", analytics_enabled=False) as self.blocks:
            self._header()
            self._controls()
            with gr.Tabs():
                with gr.Tab("Chat", id="chat"):
                    self._chat()
                with gr.Tab("Race", id="race"):
                    self._race()
            self._wire()
        self.blocks.queue(default_concurrency_limit=32, max_size=128)

    def launch(self, **kwargs: Any) -> Any:
        """As `Blocks.launch`, with this page's looks."""
        theme = gr.themes.Default(primary_hue="blue", font=SYSTEM_FONTS, font_mono=SYSTEM_MONO)
        return self.blocks.launch(theme=theme, css=view.CSS, head=view.HEAD, footer_links=[], ssr_mode=False, **kwargs)

    # What is on the page

    def _header(self) -> None:
        self.header = gr.HTML(view.header(f"Loading {self.host.names[0]} …", "loading"), elem_id="header")

    def _controls(self) -> None:
        with gr.Row(equal_height=True):
            self.drafter = gr.Dropdown(
                [(label, name) for name, label in engine.DRAFTERS.items()], value="auto", label="Drafter", min_width=140
            )
            self.depth = gr.Dropdown(list(engine.DEPTHS), value="adaptive", label="Depth", min_width=140)
            self.draft_model = gr.Dropdown([("none", NO_DRAFT_MODEL)], value=NO_DRAFT_MODEL, label="Draft model", min_width=180)
            self.model = gr.Dropdown(self.host.names, value=self.host.names[0], label="Model", min_width=180)
        with gr.Accordion("System prompt and sampling", open=False):
            self.system = gr.Textbox(label="System prompt", lines=2, placeholder="The model's own, if empty")
            with gr.Row():
                self.temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature", info="0: greedy", min_width=200)
                self.top_p = gr.Slider(0.05, 1, 1, step=0.05, label="Top-p", info="1: all tokens", min_width=200)
                self.top_k = gr.Slider(0, 100, 0, step=1, label="Top-k", info="0: all tokens", min_width=200)
            with gr.Row():
                self.length = gr.Slider(
                    8, 1024, self._max_new_tokens, step=8, label="Longest answer", info="tokens", min_width=200, scale=2
                )
                self.seed = gr.Number(0, precision=0, minimum=0, label="Seed", info="of sampling", min_width=200)
        self.settings = [self.model, self.drafter, self.depth, self.draft_model, self.system, self.temperature, self.top_p, self.top_k,
                         self.length, self.seed]  # fmt: skip

    def _chat(self) -> None:
        with gr.Row():
            with gr.Column(scale=3, min_width=300):
                self.chatbot = gr.Chatbot(
                    height=430, editable="user", buttons=["copy"], show_label=False, allow_tags=False, elem_id="chat",
                    placeholder="Ask something, or take one of the prompts below.",
                )  # fmt: skip
                self.box = gr.Textbox(
                    show_label=False,
                    label="Message",
                    placeholder="Message",
                    submit_btn=True,
                    max_lines=5,
                    autofocus=True,
                    elem_id="message",
                )
                self.presets = self._presets()
            with gr.Column(scale=2, min_width=300):
                self.figures = gr.HTML(view.figures(None), elem_id="figures")
                self.strip = gr.HTML(view.strip(None), elem_id="strip")
        self.way = gr.Radio(
            [("off", "off"), ("as text", "tokens"), ("round by round", "rounds")], value="tokens", label="See the tokens", elem_id="way"
        )
        self.tokens = gr.HTML(view.tokens(None, "tokens"), elem_id="tokens")
        with gr.Accordion("What the controller chose, and why", open=True):
            self.controller = gr.HTML(view.controller(None, None), elem_id="controller")
        self.shown = [self.chatbot, self.box, self.figures, self.strip, self.tokens, self.controller]

    def _race(self) -> None:
        self.prompt = gr.Textbox(PRESETS[1].prompt, label="Prompt", lines=3, max_lines=6, elem_id="prompt")
        self.race_presets = self._presets()
        with gr.Row(elem_classes="ag-bottom"):
            self.race_length = gr.Slider(
                8, 256, min(96, self._max_new_tokens), step=8, label="Longest answer", info="tokens", min_width=260, scale=4
            )
            self.run = gr.Button("Run", variant="primary", min_width=80, elem_id="run")
            self.stop_race = gr.Button("Stop", min_width=80, elem_id="stop-race")
            self.again = gr.Button("Replay", min_width=80, elem_id="again")
        self.lanes = gr.HTML(view.race(None), elem_id="lanes")

    @staticmethod
    def _presets() -> list[gr.Button]:
        with gr.Row(elem_classes="ag-presets"):
            return [gr.Button(f"{preset.label}: {preset.expects}", size="sm", min_width=120, scale=0) for preset in PRESETS]

    # What happens

    def _wire(self) -> None:
        loading = {"inputs": self.model, "outputs": [self.header, self.draft_model], **QUIET}
        self.blocks.load(self._load, **loading)
        self.model.change(self._load, **loading)
        self.blocks.unload(self._leave)

        asking = {"outputs": self.shown, "show_progress": "hidden"}
        for asked in (
            self.box.submit(self._send, [self.box, *self.settings], api_name="chat", **asking),
            self.chatbot.retry(self._retry, self.settings, api_visibility="private", **asking),
            self.chatbot.edit(self._edit, self.settings, api_visibility="private", **asking),
        ):
            # A page drops what is sent before an event has ended, so the button is back, and plain speed measured, only then.
            asked.then(self._ended, None, self.shown, trigger_mode="multiple", **QUIET)
        self.chatbot.undo(self._undo, None, self.shown, **QUIET)
        self.chatbot.clear(self._clear, None, self.shown, **QUIET)
        self.box.stop(self._stop, queue=False, **QUIET)
        self.way.change(self._look, self.way, self.tokens, **QUIET)
        for buttons, box in ((self.presets, self.box), (self.race_presets, self.prompt)):
            for preset, button in zip(PRESETS, buttons, strict=True):
                button.click(lambda preset=preset: (preset.prompt, preset.temperature), None, [box, self.temperature], **QUIET)

        self.run.click(self._run_race, [self.prompt, *self.settings[:-2], self.race_length, self.seed], self.lanes, **QUIET)
        self.stop_race.click(self._stop_race, queue=False, **QUIET)
        self.again.click(None, js=RESTART)

    def _load(self, name: str) -> Iterator[tuple[Any, Any]]:
        if not self.host.is_ready(name):
            yield view.header(f"Loading {name}: the first time on a machine this can take minutes …", "loading"), gr.skip()
        try:
            loaded = self.host.load(name)
            drafts = self.host.draft_models(name)
        except engine.DemoError as error:
            yield view.header(str(error), "failed"), gr.skip()
            return
        choices = [("none", NO_DRAFT_MODEL), *((draft + (" (itself: no gain)" if draft == name else ""), draft) for draft in drafts)]
        yield view.header(f"Ready: {loaded.description}"), gr.update(choices=choices, value=NO_DRAFT_MODEL)

    def _leave(self, request: gr.Request) -> None:
        self.visitors.leave(request.session_hash)

    def _send(self, request: gr.Request, text: str, *settings: Any) -> Iterator[Any]:
        conversation = self.visitors[request.session_hash]
        yield from self._answer(conversation, lambda: conversation.ask(text), settings)

    def _retry(self, data: gr.RetryData, request: gr.Request, *settings: Any) -> Iterator[Any]:
        conversation, at = self.visitors[request.session_hash], _index(data)
        yield from self._answer(conversation, lambda: conversation.ask(conversation.messages[at]["content"], at), settings)

    def _edit(self, data: gr.EditData, request: gr.Request, *settings: Any) -> Iterator[Any]:
        conversation, at = self.visitors[request.session_hash], _index(data)
        yield from self._answer(conversation, lambda: conversation.ask(data.value, at), settings)

    def _undo(self, data: gr.UndoData, request: gr.Request) -> Any:
        conversation = self.visitors[request.session_hash]
        conversation.stop()
        text = conversation.undo(_index(data))
        return self._picture(conversation, gr.update(value=text))

    def _clear(self, request: gr.Request) -> Any:
        conversation = self.visitors[request.session_hash]
        conversation.clear()
        return self._picture(conversation, gr.update())

    def _stop(self, request: gr.Request) -> None:
        self.visitors[request.session_hash].stop()

    def _look(self, way: str, request: gr.Request) -> Any:
        conversation = self.visitors[request.session_hash]
        conversation.way = way
        return gr.update(value=view.tokens(conversation.answer, way), visible=way != "off")

    def _answer(self, conversation: engine.Conversation, begin: Callable[[], None], settings: tuple[Any, ...]) -> Iterator[Any]:
        """Begins an answer and shows how it grows; whatever happens, the page stays usable."""
        name, chosen = _settings(settings)
        waiting = gr.update(value="", submit_btn=False, stop_btn=True)
        with _saying("The answer failed. The conversation is still there: try again, or choose another drafter."):
            begin()
            yield self._picture(conversation, waiting, begins=True)
            shown_at = shown_state = None
            for answer in conversation.reply(name, chosen):
                if shown_at is None or answer.state != shown_state or monotonic() - shown_at >= EVERY_S:
                    yield self._picture(conversation, gr.skip())
                    shown_at, shown_state = monotonic(), answer.state
        yield self._picture(conversation, gr.skip())

    def _ended(self, request: gr.Request) -> Iterator[Any]:
        conversation = self.visitors[request.session_hash]
        # Another answer may have begun meanwhile: then the button is its business.
        yield self._picture(conversation, gr.skip() if conversation.is_busy else gr.update(submit_btn=True, stop_btn=False))
        with _saying("Plain decoding could not be measured."):
            for _ in conversation.measure():
                yield self._picture(conversation, gr.skip())

    def _picture(self, conversation: engine.Conversation, box: Any, begins: bool = False) -> list[Any]:
        """The values of `shown`; `begins`: there is no answer yet to the last message."""
        answer, speculator = None if begins else conversation.answer, conversation.speculator
        learned = engine.what_was_learned(speculator, conversation.loaded) if answer and speculator else None
        return [
            conversation.messages,
            box,
            view.figures(answer),
            view.strip(answer),
            view.tokens(answer, conversation.way) if conversation.way != "off" else gr.skip(),
            view.controller(answer, learned),
        ]

    def _run_race(self, request: gr.Request, prompt: str, *settings: Any) -> Iterator[str]:
        conversation = self.visitors[request.session_hash]
        name, chosen = _settings(settings)
        race = engine.Race(chosen.drafter)
        with _saying("The race failed. Try again, or choose another drafter."):
            with conversation.racing(race):
                future = engine.run_race(self.host, name, prompt, chosen, race)
                while wait([future], RACE_EVERY_S).not_done:
                    yield view.race(race)
                future.result()
            yield view.race(race)

    def _stop_race(self, request: gr.Request) -> None:
        self.visitors[request.session_hash].stop_race()


@contextmanager
def _saying(failure: str) -> Iterator[None]:
    """What goes wrong is told to the visitor: a `DemoError` in its own words, anything else as `failure`."""
    try:
        yield
    except engine.DemoError as error:
        gr.Warning(str(error), title="That didn't work")
    except Exception:
        logger.exception(failure)
        gr.Warning(failure, title="That didn't work")


def _index(data: Any) -> int:
    return data.index[0] if isinstance(data.index, (list, tuple)) else data.index


def _settings(values: tuple[Any, ...]) -> tuple[str, engine.Settings]:
    """The model's name, and the settings, from the values of `Page.settings`."""
    name, drafter, depth, draft_model, system, temperature, top_p, top_k, length, seed = values
    return name, engine.Settings(
        drafter=drafter,
        depth=depth,
        draft_model=draft_model or None,
        system=system or "",
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=int(top_k),
        max_new_tokens=int(length),
        seed=int(seed or 0),
    )


def _load_first(host: engine.Host, name: str) -> None:
    try:
        host.load(name)
    except engine.DemoError as error:
        logger.error("%s", error)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m demos.chat", description=__doc__)
    parser.add_argument("--model", nargs="+", default=[weights.DEFAULT], help="short names, folders or hub ids (default: %(default)s)")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: bfloat16 where it is fast")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=7860, help="default: %(default)s")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, help="the longest answer, until a visitor chooses (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    transformers.logging.disable_progress_bar()
    page = Page(engine.Host(engine.local_models(arguments.model), arguments.dtype), arguments.max_new_tokens)
    # The page is there at once and says that the weights are loading.
    threading.Thread(target=_load_first, args=[page.host, arguments.model[0]], daemon=True).start()
    page.launch(server_name=arguments.host, server_port=arguments.port)


if __name__ == "__main__":
    main()
