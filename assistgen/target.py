"""The target model as the loop sees it: prefill, verify a block of tokens, roll back. Rows in step, or rows that advance on their own."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from transformers.cache_utils import StaticCache

from . import compat
from .cache import FULL, SLIDING, RecurrentStates, RowCache, additive_mask
from .control import ForwardCosts
from .linear import QuickProducts, over_prompt, quick_products
from .tokens import TokenBuffer


_costs: weakref.WeakKeyDictionary[Any, ForwardCosts] = weakref.WeakKeyDictionary()


def costs_of(model: Any) -> ForwardCosts:
    """The measured forward costs of a model: facts about this process and machine, so all calls share them."""
    return _costs.setdefault(model, ForwardCosts())


class Target(ABC):
    """
    A model, its cache, and the inputs of its next forward.

    Args:
        model (`PreTrainedModel`): the target.
        tokens (`TokenBuffer`): the batch.
        generation_config (`GenerationConfig`): as `generate()` prepared it.
        model_kwargs (`dict`): as `generate()` prepared them.
        returns_cache (`bool`): the cache is the user's, before or after the call.
        rows_come_back (`bool`): a row that is over may have to go on.
    """

    max_width: int = 1 << 30
    """The most tokens that a row may take in at once, or write ahead of what it will be rolled back to."""

    is_in_step: bool = False
    """A forward feeds all rows up to the same place."""

    can_fill: bool = True
    """A forward may be wider than its drafts at no other cost than its own."""

    def __init__(
        self,
        model: Any,
        tokens: TokenBuffer,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        returns_cache: bool,
        rows_come_back: bool,
    ):
        self.model = model
        self.tokens = tokens
        self.generation_config = generation_config
        self.model_kwargs = model_kwargs
        self.returns_cache = returns_cache
        self.rows_come_back = rows_come_back
        self.cached = 0
        """Cached tokens right after the prefill: more than the prompt's ids if it came as embeddings, for example."""
        self.forwards = 0
        self.costs = costs_of(model)
        self._products: QuickProducts | None = None

    def get_ready(self, tokens: int) -> None:
        """What takes time and can wait until the first token is out; about so many more are to come."""
        self._products = quick_products(self.model, tokens)

    def prefill(self) -> Any:
        """The forward over the prompt, in chunks if asked for, continuing a cache that was handed in. Returns the model's output."""
        chunk = self.generation_config.prefill_chunk_size
        prompt = self.tokens.ids[:, : self.tokens.prompt_length]
        held = compat.length_of(self.cache) if self.cache is not None else 0
        with over_prompt(self.model, len(prompt) * (prompt.shape[1] - held)):
            outputs = self.model._prefill(prompt, self.generation_config, self.model_kwargs)
        if compat.CACHE in outputs:
            self.model_kwargs[compat.CACHE] = outputs[compat.CACHE]
        self.cached = compat.length_of(self.cache, default=self.tokens.prompt_length)
        self.forwards += 1 if chunk is None else -(-self.tokens.prompt_length // chunk)
        return outputs

    def _forward(self, inputs: dict[str, Any], tokens: int, logits_to_keep: int) -> Any:
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = logits_to_keep
        self.forwards += 1
        with self._quickly(tokens):
            return self.model(**inputs, return_dict=True)

    def _quickly(self, tokens: int) -> AbstractContextManager[Any]:
        """For a forward over so many tokens."""
        return self._products.over(tokens) if self._products is not None else nullcontext()

    @property
    def cache(self) -> Any:
        return self.model_kwargs.get(compat.CACHE)

    def verify(self, rows: list[int], drafted: list[int], width: int) -> Any:
        """
        One forward over each row's last committed token and the draft behind it.

        Args:
            rows (`list[int]`): the running rows.
            drafted (`list[int]`): length of each one's draft in the `TokenBuffer`.
            width (`int`): tokens a row, more than `max(drafted)`; what is behind a draft is filling.

        Returns:
            the model's output; `logits` of shape `(len(rows), width, vocab)`.
        """
        starts = [self.tokens.lengths[row] - 1 for row in rows]
        self.tokens.reserve(max(starts) + width)
        return self.forward(rows, starts, [count + 1 for count in drafted], width, logits_to_keep=width)

    def takes_trees(self) -> bool:
        """Whether `verify_tree` and `gather` can be called. Reliable after the prefill."""
        return False

    def verify_tree(self, parents: list[int], width: int) -> Any:
        """
        `verify` for a tree behind the only row's last committed token, that each of its tokens sees those that it follows and no others.

        Args:
            parents (`list[int]`): as in `Draft`.
            width (`int`): more than `len(parents)`; what is behind the tree is filling.
        """
        raise NotImplementedError

    def gather(self, nodes: list[int]) -> None:
        """Of the tree just verified the accepted `nodes`, in order, are to lie one after another in the cache. Before `roll_back`."""
        raise NotImplementedError

    @abstractmethod
    def forward(self, rows: list[int], starts: list[int], counts: list[int], width: int, logits_to_keep: int) -> Any:
        """
        One forward over the ids `starts[i]` … `starts[i] + width - 1` of the buffer's row `rows[i]`, of which the first `counts[i]`
        mean something. All ids before `starts[i]` have been fed, and none after. `logits` of the output are the last `logits_to_keep`
        positions of each row's `width`; `places`, `leads` and `fed` tell where they are among its other states.
        """

    places: list[int]
    """Where the rows of the last forward are among its states."""
    leads: list[int]
    """How many of their tokens were fed before their start."""
    fed: int
    """Width of the last forward."""
    choices: torch.Tensor | None = None
    """The likeliest tokens of the last forward's rows and positions, if that is known already."""
    num_captures: int = 0
    """Shapes of the forward that had to be captured (`captured.py`)."""
    why_not_captured: str | None = None
    """Why they weren't, where they should have been."""

    def ahead(self, row: int) -> int:
        """How many committed tokens of a row the next forward feeds again, because the cache doesn't hold them."""
        return 0

    @abstractmethod
    def roll_back(self, lengths: dict[int, int]) -> None:
        """Of row `row` the first `lengths[row]` ids stay fed. Rows that aren't named are over."""

    @abstractmethod
    def close(self, completed: bool = True) -> Any:
        """Puts back what was switched on and returns the cache (or `None`); `completed`: no error cut the call short."""


class RowsInStep(Target):
    """
    One row, or rows that share the cache's length, in whatever cache transformers made for them.

    The cache holds as much as the row that is furthest behind has. A row that is ahead has its further tokens fed again in the next
    forward, so nothing is asked of the model but a cache that goes back (`crop`). One row is never ahead, unless it is in layers with
    a recurrent state: they go back to the state before the last forward, and what was accepted in it is fed again.
    """

    # Inputs with one entry a token, which grow with the sequence.
    GROWING = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
    GROWING_DECODER = ("decoder_attention_mask", "decoder_position_ids")

    def prefill(self) -> Any:
        outputs = super().prefill()
        self._take_over()
        return outputs

    def adopt(self) -> None:
        """In place of the prefill: the cache holds the prompt already."""
        self.cached = compat.length_of(self.cache)
        self._take_over()

    def _take_over(self) -> None:
        names = self.GROWING_DECODER if self.model.config.is_encoder_decoder else self.GROWING
        self._growing = {name: self.model_kwargs[name] for name in names if self.model_kwargs.get(name) is not None}
        self._grown: dict[str, torch.Tensor] | None = None
        self._reserve = 0
        self._held = self.tokens.prompt_length  # ids of every row in the cache
        self._ends = dict.fromkeys(range(len(self.tokens.lengths)), self._held)
        self.is_in_step = len(self.tokens.lengths) > 1
        self._crops = compat.why_no_roll_back(self.cache, self.model) is None
        self._states = RecurrentStates(self.cache)
        self.can_fill = not self._states
        self._recording = ExitStack()
        self._record()  # only now: during the prefill it would keep the whole prompt in sliding layers

    def _record(self) -> None:
        if self._crops:
            self._recording.enter_context(compat.recording_past(self.cache))

    def forward(self, rows: list[int], starts: list[int], counts: list[int], width: int, logits_to_keep: int) -> Any:
        if min(starts) < self._held:
            self._go_back(min(starts))
        end = max(starts) + width
        self.fed = end - self._held
        self.places, self.leads = rows, [start - self._held for start in starts]
        if self.fed > 1:
            self._states.put_aside(self._held)
        inputs = self._inputs(end)
        first = width - logits_to_keep + min(self.leads)
        outputs = self._forward(inputs, len(self.tokens.lengths) * self.fed, self.fed - first)
        if (cache := outputs.get(compat.CACHE)) is not None and cache is not self.cache:
            self._change_cache(cache)
        self._held = end
        logits = outputs.logits
        if len(self.tokens.lengths) == 1:
            outputs.logits = logits[:, -logits_to_keep:]
        else:
            at = torch.tensor(self.leads)[:, None] + torch.arange(width - logits_to_keep, width) - (self.fed - logits.shape[1])
            outputs.logits = logits[torch.tensor(rows)[:, None], at]
        return outputs

    def _change_cache(self, cache: Any) -> None:
        """The model began a new one, as Phi-3 does where its rotary embedding changes."""
        self._recording.close()
        self.model_kwargs[compat.CACHE] = cache
        self._record()

    def _inputs(self, end: int) -> dict[str, Any]:
        """Of a forward that feeds all ids before `end` that the cache doesn't hold, and if there is none (RWKV) all of them."""
        # What Mamba keeps was called otherwise before 5.24.
        keeps = any(self.model_kwargs.get(name) is not None for name in (compat.CACHE, "cache_params"))
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            self.tokens.ids[:, :end],
            next_sequence_length=end - self._held if keeps else None,
            **self._kwargs(end - self.tokens.prompt_length),
        )
        return inputs

    def takes_trees(self) -> bool:
        return (
            len(self.tokens.lengths) == 1
            and why_no_free_masks(self.model, self.model_kwargs) is None
            and compat.keeps_everything(self.cache)
            and set(layer_types(self.model.config.get_text_config(decoder=True))) == {FULL}
        )

    def verify_tree(self, parents: list[int], width: int) -> Any:
        start = self.tokens.lengths[0] - 1
        self.tokens.reserve(start + width)
        assert start == self._held
        inputs = self._inputs(start + width)
        device = self.tokens.ids.device
        # Query 0 is the last committed token, query i + 1 the tree's token i. Filling is nobody's, and sees what it likes.
        depths, visible = [0] * width, [[True] + [False] * (width - 1) for _ in range(width)]
        for query, parent in enumerate(parents, start=1):
            depths[query] = depths[parent + 1] + 1
            visible[query] = visible[parent + 1].copy()
            visible[query][query] = True
        past = torch.ones(width, compat.length_of(self.cache), dtype=torch.bool, device=device)
        if (prompt_mask := self.model_kwargs.get("attention_mask")) is not None:
            past[:, : prompt_mask.shape[1]] = prompt_mask.bool()
        mask = torch.cat([past, torch.tensor(visible, device=device)], dim=1)[None, None]
        config = self.model.config.get_text_config(decoder=True)
        if config._attn_implementation == "eager":
            mask = additive_mask(mask, self.model.dtype)
        inputs["attention_mask"] = {FULL: mask} if hasattr(config, "layer_types") else mask
        inputs["position_ids"] = inputs["position_ids"][..., :1] + torch.tensor(depths, device=device)
        self.fed, self.places, self.leads = width, [0], [0]
        outputs = self._forward(inputs, width, width)
        self._held = start + width
        outputs.logits = outputs.logits[:, -width:]
        return outputs

    def gather(self, nodes: list[int]) -> None:
        if nodes == list(range(len(nodes))):
            return
        index = torch.tensor(nodes, device=self.cache.layers[0].keys.device)
        for layer in self.cache.layers:
            for states in (layer.keys, layer.values):
                block = states[:, :, states.shape[2] - self.fed + 1 :]
                block[:, :, : len(nodes)] = block[:, :, index.to(states.device)]

    def ahead(self, row: int) -> int:
        return max(0, self.tokens.lengths[row] - 1 - self._held)

    def _kwargs(self, added: int) -> dict[str, Any]:
        """The model kwargs as they are `added` tokens after the prompt: views of tensors that are extended rarely."""
        if self._grown is None or added > self._reserve:
            self._reserve = 2 * max(added, 0) + 256
            grown = dict(self.model_kwargs)
            # The model itself says how its inputs grow.
            grown = self.model._update_model_kwargs_for_generation(
                {}, grown, self.model.config.is_encoder_decoder, num_new_tokens=self._reserve
            )
            if (types := self.model_kwargs.get("token_type_ids")) is not None:
                grown["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, self._reserve)], dim=-1)
            self._grown = {name: grown[name] for name in self._growing}
        views = {name: self._grown[name][..., : start.shape[-1] + added] for name, start in self._growing.items()}
        return {**self.model_kwargs, **views}

    def roll_back(self, lengths: dict[int, int]) -> None:
        self._ends = self._ends | lengths if self.rows_come_back else lengths
        if self._crops:
            self._go_back(min(self._ends.values()))

    def _go_back(self, length: int) -> None:
        if length < self._held and self._states:
            length = self._states.put_back()
        compat.crop(self.cache, self._held - length)
        self._held = length

    def close(self, completed: bool = True) -> Any:
        if hasattr(self, "_recording"):  # closed before the prefill otherwise
            if completed and self._crops and self.returns_cache:
                self._catch_up()
            self._recording.close()
        return self.cache

    def _catch_up(self) -> None:
        """Plain `generate()` has fed all but the last token of the longest row, and padding to the others."""
        longest = max(self.tokens.lengths)
        if self._held < longest - 1:
            self.forward(list(range(len(self.tokens.lengths))), [self._held] * len(self.tokens.lengths), [1], longest - 1 - self._held, 1)
            compat.crop(self.cache, 0)


class RowsApart(Target):
    """
    Rows that advance on their own in a `RowCache`. A row that is done leaves the batch and costs nothing.
    """

    max_width = 32

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._rows: list[int] = list(range(len(self.tokens.lengths)))
        self._row_cache: RowCache | None = None

    @staticmethod
    def why_not(model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> str | None:
        """Why this model's rows can't advance on their own (known before the first forward), or `None` if they can."""
        reason = why_no_free_masks(model, model_kwargs)
        if reason is not None:
            return reason
        config = model.config.get_text_config(decoder=True)
        if config.model_type in compat.PASSES_OVER_LAYERS:
            return f"{type(model).__name__} passes over its layers several times"
        cache = model_kwargs.get(compat.CACHE)
        if generation_config.output_attentions and (isinstance(cache, StaticCache) or SLIDING in layer_types(config)):
            return "attention weights of single rows can't be told from a static or sliding-window cache"
        return RowCache.why_not(cache, layer_types(config))

    def prefill(self) -> Any:
        outputs = super().prefill()
        config = self.model.config.get_text_config(decoder=True)
        self._kinds = layer_types(config)
        self._masks_by_kind = hasattr(config, "layer_types")
        self._additive = self.model.dtype if config._attn_implementation == "eager" else None
        # Slots are columns of the padded batch (shifted where the cache holds more than the ids say); a row's positions keep a
        # constant distance from its slots.
        self._slot_offset = self.cached - self.tokens.prompt_length
        self._position_offsets = (self.model_kwargs["position_ids"][:, -1] - (self.cached - 1)).expand(len(self._rows))
        mask = self.model_kwargs.get("attention_mask")
        self._prompt_mask = mask.bool() if mask is not None and not bool(mask.all()) else None
        self._row_cache = self._make_cache(getattr(config, "sliding_window", None))
        return outputs

    def _make_cache(self, window: int | None) -> RowCache:
        return RowCache(self.cache, self._kinds, window, self.max_width, self.generation_config.max_length)

    def forward(self, rows: list[int], starts: list[int], counts: list[int], width: int, logits_to_keep: int) -> Any:
        tokens, cache, device = self.tokens, self._row_cache, self.tokens.ids.device
        assert cache is not None
        if rows != self._rows:
            if not set(rows) <= set(self._rows):
                self._rejoin()
            cache.keep([self._rows.index(row) for row in rows], self._rows, park=self.returns_cache or self.rows_come_back)
            self._rows = list(rows)
        end = max(starts) + width
        tokens.reserve(end)
        index = torch.tensor(rows, device=device)
        first = torch.tensor(starts, device=device)[:, None]
        steps = torch.arange(width, device=device)
        slots = first + steps + self._slot_offset
        cache.prepare(slots, end + self._slot_offset)
        self.places, self.leads, self.fed = list(range(len(rows))), [0] * len(rows), width
        # Past a row's own ids there is only filling, which is nobody's; its positions stay in the model's range.
        own_steps = torch.minimum(steps, torch.tensor(counts, device=device)[:, None] - 1)
        prompt_mask = self._prompt_mask[index] if self._prompt_mask is not None else None
        inputs = self.model.prepare_inputs_for_generation(
            tokens.ids[index[:, None], first + steps],
            **{
                **self.model_kwargs,
                compat.CACHE: cache,
                "position_ids": first + own_steps + self._slot_offset + self._position_offsets[index][:, None],
                "attention_mask": cache.masks(slots, prompt_mask, self._masks_by_kind, self._additive),
            },
        )
        outputs = self._forward(inputs, len(rows) * width, logits_to_keep)
        outputs.logits = outputs.logits[:, -logits_to_keep:]
        return outputs

    def _rejoin(self) -> None:
        assert self._row_cache is not None
        self._row_cache.rejoin(self._rows)
        self._rows = list(range(len(self.tokens.lengths)))

    def roll_back(self, lengths: dict[int, int]) -> None:
        """Nothing to do: the next forward says where each row goes on."""

    def close(self, completed: bool = True) -> Any:
        cache, tokens = self._row_cache, self.tokens
        if cache is None or not self.returns_cache:
            return None if cache is not None else self.cache
        self._rejoin()
        # generate() feeds padding to rows that have ended, so the cache that it returns holds it: written here, in a few forwards.
        longest = max(tokens.lengths) if completed else min(tokens.lengths)
        while (behind := longest - min(tokens.lengths)) > 0:
            fed = [min(longest - length, self.max_width - 1) for length in tokens.lengths]
            self.verify(self._rows, fed, max(fed) + 1)
            tokens.lengths = [length + more for length, more in zip(tokens.lengths, fed, strict=True)]
            assert longest - min(tokens.lengths) < behind
        self._row_cache = None
        return cache.release(longest - 1 + self._slot_offset)


def why_no_free_masks(model: Any, model_kwargs: dict[str, Any]) -> str | None:
    """Why this model can't be told each token's position and what it sees (known before the first forward), or `None` if it can."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return f"{type(model).__name__} is an encoder-decoder model"
    # What a static cache with a compiled forward needs is what this needs: masks of any shape and positions told from outside.
    positions = model_kwargs.get("position_ids")
    takes_positions = positions is not None and positions.dim() == 2 and "position_ids" in inspect.signature(model.forward).parameters
    if not takes_positions or not getattr(model, "_can_compile_fullgraph", False) or getattr(config, "alibi", False):
        return f"{type(model).__name__} doesn't take positions and masks for each row"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"attention implementation {config._attn_implementation} takes no mask for each row"
    if any(model_kwargs.get(name) is not None for name in ("token_type_ids", "mm_token_type_ids", "inputs_embeds")):
        return "the prompt has embeddings or token types"
    return None


def layer_types(config: Any) -> list[str]:
    """The kind of attention of each layer, as the masks of the model's forward tell them apart."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return list(types)
    return [SLIDING if getattr(config, "sliding_window", None) is not None else FULL] * config.num_hidden_layers
