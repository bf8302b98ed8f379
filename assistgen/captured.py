"""
Forwards in fixed shapes, captured once: `compile=True`.

On a GPU a step of a small model is bound by Python and the launches of its kernels. A CUDA graph launches all of them at once, but only
in the very shapes and on the very memory that it was captured with. So keys and values lie in buffers that stay, a forward's width is
padded to one of a few, all rows of the batch run in every round, and slots, positions and masks are made on the device of where each row
stands. What was captured outlives the call: the next one of the same size finds it and captures nothing.

On other devices the same forwards run uncaptured, which is how they are tested. No CUDA device was at hand yet: the capture itself is
experimental, and nothing of this is used unless it is asked for.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from . import compat
from .cache import RowCache
from .control import ForwardCosts
from .target import RowsApart


logger = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8, 16, 32)
"""What a forward's width is padded to."""
CHAINS = (8, 4, 2, 1)
"""Tokens that are decoded one after the other in one capture; 15 take four of them."""
MIN_CELLS = 256
KEPT = 2
"""Sets of buffers that a model keeps between calls."""

_lock = threading.Lock()
_capturing = threading.Lock()
"""Held while something is captured: of that a process can do one at a time."""
_kept: weakref.WeakKeyDictionary[Any, list[FixedMemory]] = weakref.WeakKeyDictionary()
_costs: weakref.WeakKeyDictionary[Any, dict[int, ForwardCosts]] = weakref.WeakKeyDictionary()
"""By number of rows."""


def cuda_graph(step: Callable[[], Any], memory: FixedMemory) -> Callable[[], Any]:
    """`step` as a CUDA graph: a function that does the same on the same memory, and returns the same tensors each time."""
    device = memory.ids.device
    with _capturing, torch.cuda.device(device):
        if memory.stream is None:
            memory.stream, memory.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream()
        memory.stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(memory.stream):
                for _ in range(2):  # libraries set themselves up, which can't be captured
                    step()
            with torch.cuda.graph(graph, pool=memory.pool, stream=memory.stream, capture_error_mode="thread_local"):
                outputs = step()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own
            current.wait_stream(memory.stream)

    def replay() -> Any:
        with torch.cuda.device(device):
            graph.replay()
        return outputs

    return replay


CAPTURES: dict[str, Callable[[Callable[[], Any], FixedMemory], Callable[[], Any]]] = {"cuda": cuda_graph}
"""By type of device, how a step is captured there: it may be run a few times for that."""


class Outputs(NamedTuple):
    """Of a forward over `(rows, width)` ids; `choices` are the likeliest tokens."""

    logits: torch.Tensor
    choices: torch.Tensor
    hidden_states: Any
    attentions: Any


class FixedMemory:
    """
    What forwards of fixed shapes read and write beside the model's weights, in its place, and their captures.

    Args:
        key: what the captures depend on: sizes, flags and where the model's weights are.
        cache (`RowCache`): with a capacity.
        rows (`int`), cells (`int`): of the cache.
        device (`torch.device`): of the model.
        constants (`dict`): the forward's further arguments.
        masks_by_kind (`bool`), additive (`torch.dtype`, *optional*): how the model takes masks, see `RowCache.masks`.

    Attributes:
        ids (`torch.LongTensor` of shape `(rows, max(WIDTHS))`): the next forward's input, from the left.
        places (`torch.LongTensor` of shape `(3, rows)`): `starts`, the first one's slot, `counts`, how many mean something, and `offsets`,
            from slots to positions.
        visible (`torch.BoolTensor` of shape `(rows, cells)`): the slots that aren't padding.
    """

    def __init__(
        self,
        key: Any,
        cache: RowCache,
        rows: int,
        cells: int,
        device: torch.device,
        constants: dict[str, Any],
        masks_by_kind: bool,
        additive: torch.dtype | None,
    ):
        self.key, self.cache, self.cells = key, cache, cells
        self.ids = torch.zeros(rows, WIDTHS[-1], dtype=torch.long, device=device)
        self.places = torch.zeros(3, rows, dtype=torch.long, device=device)
        self.starts, self.counts, self.offsets = self.places
        self.visible = torch.ones(rows, cells, dtype=torch.bool, device=device)
        self.why_not_captured: str | None = None
        self._constants, self._masks_by_kind, self._additive = constants, masks_by_kind, additive
        self.stream: Any = None
        self.pool: Any = None
        """What the captures share."""
        self._captured: dict[tuple[Any, ...], Callable[[], Any] | None] = {}

    def knows(self, method: Any, *shape: int) -> bool:
        """Whether `run` of these is ready."""
        return (method.__name__, *shape) in self._captured

    def capture(self, method: Any, model: Any, *shape: int) -> None:
        """Makes it ready: may run it a few times, where `places` points to."""
        name = (method.__name__, *shape)
        self._captured[name] = None
        capture = CAPTURES.get(self.ids.device.type)
        if capture is not None and self.why_not_captured is None:
            try:
                self._captured[name] = capture(partial(method, model, *shape), self)
            except Exception as error:
                self.why_not_captured = f"not compiled: capturing the forward raised {type(error).__name__}"
                logger.warning("Forwards run uncaptured (`compile=True`).", exc_info=True)

    def run(self, method: Any, model: Any, *shape: int) -> Any:
        """`method(model, *shape)`, replayed if it is captured."""
        captured = self._captured[(method.__name__, *shape)]
        return captured() if captured is not None else method(model, *shape)

    def forward(self, model: Any, width: int) -> Outputs:
        """One forward over `ids[:, :width]`."""
        steps = torch.arange(width, device=self.ids.device)
        slots = self.starts[:, None] + steps
        self.cache.prepare(slots, self.cells)
        own_steps = torch.minimum(steps, self.counts[:, None] - 1)
        inputs = model.prepare_inputs_for_generation(
            self.ids[:, :width].contiguous(),
            **{
                **self._constants,
                compat.CACHE: self.cache,
                "position_ids": self.starts[:, None] + own_steps + self.offsets[:, None],
                "attention_mask": self.cache.masks(slots, self.visible, self._masks_by_kind, self._additive),
            },
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        outputs = model(**inputs, return_dict=True)
        return Outputs(
            outputs.logits, outputs.logits.float().argmax(-1), getattr(outputs, "hidden_states", None), getattr(outputs, "attentions", None)
        )

    def chain(self, model: Any, length: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """So many tokens on from `ids[:, 0]`, which the last of them takes the place of: tokens and probabilities, `(rows, length)`."""
        tokens, confidences = [], []
        for _ in range(length):
            token, confidence = likeliest(self.forward(model, 1).logits[:, -1, :num_columns])
            tokens.append(token)
            confidences.append(confidence)
            self.ids[:, 0] = token
            self.starts += 1
        return torch.stack(tokens, dim=1), torch.stack(confidences, dim=1)


class FixedRows(RowsApart):
    """
    Rows that advance on their own, in fixed shapes. Rows that are done run on, over nothing that is anybody's.
    """

    max_width = WIDTHS[-1]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.costs = _costs.setdefault(self.model, {}).setdefault(len(self._rows), ForwardCosts(WIDTHS, len(self._rows)))
        self._memory: FixedMemory | None = None

    @staticmethod
    def why_not(model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> str | None:
        """Why this model's forward can't be of fixed shapes (known before the first forward), or `None` if it can."""
        reason = RowsApart.why_not(model, generation_config, model_kwargs)
        if reason is not None:
            return reason
        others = [name for name, value in _constants(model_kwargs).items() if not isinstance(value, (bool, int, float, str, type(None)))]
        if others:
            return f"{', '.join(others)} may change from forward to forward"
        if compat.is_sharded(model) or len({parameter.device for parameter in model.parameters()}) > 1:
            return f"{type(model).__name__} lies on several devices"
        if torch.is_autocast_enabled(model.device.type):
            return "under autocast, weights are cast anew in each forward"
        if model.device.type in CAPTURES:
            return _why_no_capture(model)
        return None

    def _make_cache(self, window: int | None) -> RowCache:
        rows = len(self.tokens.lengths)
        slots = self.generation_config.max_length + self._slot_offset
        cells = slots + self.max_width
        steps = max(MIN_CELLS, 1 << (cells.bit_length() - 2))  # at most a quarter more than needed, so that few sizes are captured
        cells = -(-cells // steps) * steps
        constants = _constants(self.model_kwargs)
        layers = tuple(type(layer) for layer in self.cache.layers)
        key = (
            rows,
            cells,
            window,
            layers,
            self.model.dtype,
            self._additive,
            tuple(sorted(constants.items())),
            _places_of_weights(self.model),
        )
        with _lock:
            kept = _kept.get(self.model, [])
            memory = next((memory for memory in kept if memory.key == key), None)
            if memory is not None:
                kept.remove(memory)
            else:
                del kept[: len(kept) - KEPT + 1]
        if memory is None:
            with torch.inference_mode(False), torch.no_grad():  # another call may be under another mode
                cache = RowCache(self.cache, self._kinds, window, self.max_width, slots, cells)
                memory = FixedMemory(key, cache, rows, cells, self.model.device, constants, self._masks_by_kind, self._additive)
        else:
            memory.cache.refill(self.cache)
        memory.visible.fill_(True)
        if self._prompt_mask is not None:
            memory.visible[:, : self._prompt_mask.shape[1]] = self._prompt_mask
        self._memory = memory
        self._offsets = self._position_offsets.tolist()
        self._ends = list(self.tokens.lengths)
        """Of each row's ids, those before are in the cache."""
        return memory.cache

    def get_ready(self, tokens: int) -> None:
        super().get_ready(tokens)
        for width in reversed(WIDTHS):  # the widest first: the others find its memory
            self._capture("forward", width)

    def get_ready_to_chain(self, num_columns: int) -> None:
        """To be called before `chain`."""
        for length in CHAINS:
            self._capture("chain", length, num_columns)

    def _capture(self, method: str, *shape: int) -> None:
        memory = self._memory
        assert memory is not None
        if not memory.knows(getattr(memory, method), *shape):
            self._aim([], [], [], WIDTHS[-1])
            memory.capture(getattr(memory, method), self.model, *shape)
            self.num_captures += 1
        self.why_not_captured = memory.why_not_captured

    def _aim(self, rows: list[int], starts: list[int], counts: list[int], width: int) -> None:
        """
        Where the next forwards go, `width` slots from each start. Rows that aren't in them get nothing but filling, behind all that they
        hold, at positions that every model has.
        """
        memory = self._memory
        assert memory is not None
        slots = [end + self._slot_offset for end in self._ends]
        meant, offsets = [1] * len(slots), [-slot for slot in slots]
        for row, start, count in zip(rows, starts, counts, strict=True):
            slots[row], meant[row], offsets[row] = start + self._slot_offset, count, self._offsets[row]
        if max(slots) + width > memory.cells:  # on a GPU, writing there would be the end of the process
            raise IndexError(f"{max(slots) + width} slots don't fit into {memory.cells} cells")
        # From pinned memory, which torch keeps from being used again until it has been read: nothing waits.
        memory.places.copy_(torch.tensor([slots, meant, offsets], pin_memory=memory.ids.is_cuda), non_blocking=True)

    def forward(self, rows: list[int], starts: list[int], counts: list[int], width: int, logits_to_keep: int) -> Any:
        memory = self._memory
        assert memory is not None
        size = next(size for size in WIDTHS if size >= width)
        self._capture("forward", size)
        self._aim(rows, starts, counts, size)
        self.tokens.reserve(max(*self._ends, *starts) + size)
        at = memory.starts[:, None] + (torch.arange(size, device=memory.ids.device) - self._slot_offset)
        memory.ids[:, :size] = self.tokens.ids.gather(1, at)
        for row, start, count in zip(rows, starts, counts, strict=True):
            self._ends[row] = start + count
        self.forwards += 1
        with self._quickly(len(self._ends) * size):
            outputs = memory.run(memory.forward, self.model, size)
        self.places, self.leads, self.fed = rows, [0] * len(rows), size
        index, kept = self._index(rows), slice(width - logits_to_keep, width)
        self.choices = outputs.choices[index, kept]
        return outputs._replace(logits=outputs.logits[index, kept])

    def verify(self, rows: list[int], drafted: list[int], width: int) -> Any:
        outputs = super().verify(rows, drafted, width)
        if self.choices is not None and self.choices.is_cuda:  # with the host once the forward has been waited for
            host = torch.empty(self.choices.shape, dtype=self.choices.dtype, pin_memory=True)
            self.choices = host.copy_(self.choices, non_blocking=True)
        return outputs

    def chain(
        self, rows: list[int], starts: list[int], tokens: torch.Tensor, length: int, num_columns: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The likeliest continuations, token by token, without the host's looking at them.

        Args:
            rows (`list[int]`), starts (`list[int]`): as of `forward`.
            tokens (`torch.LongTensor` of shape `(len(rows),)`): what stands at each start.
            length (`int`): how many tokens are to follow each, at least 1.
            num_columns (`int`): of the logits, those that count.

        Returns:
            `torch.LongTensor` and `torch.Tensor` of shape `(len(rows), length)`: the tokens, all but the last fed, and the probability
            of each.
        """
        memory = self._memory
        assert memory is not None
        self._aim(rows, starts, [1] * len(rows), length)
        index = self._index(rows)
        memory.ids[index, 0] = tokens
        for row, start in zip(rows, starts, strict=True):
            self._ends[row] = start + length
        self.forwards += length
        parts = []
        for size in CHAINS:
            for _ in range(length // size):
                with self._quickly(len(self._ends)):
                    parts.append([values[index] for values in memory.run(memory.chain, self.model, size, num_columns)])
            length %= size
        drafted, confidences = (torch.cat(values, dim=1) for values in zip(*parts, strict=True))
        return drafted, confidences

    def _index(self, rows: list[int]) -> Any:
        """Of `rows` among all rows."""
        assert self._memory is not None
        return slice(None) if len(rows) == len(self._ends) else torch.tensor(rows, device=self._memory.ids.device)

    def roll_back(self, lengths: dict[int, int]) -> None:
        for row, length in lengths.items():
            self._ends[row] = length

    def close(self, completed: bool = True) -> Any:
        cache, memory = super().close(completed), self._memory
        self._memory = None
        if memory is not None and completed:
            memory.cache.source = None
            with _lock:
                kept = _kept.setdefault(self.model, [])
                kept.append(memory)
                del kept[:-KEPT]
        return cache


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits `(…, vocab)` the likeliest tokens and their probabilities, `(…)` each."""
    logits = logits.float()
    top, token = logits.max(dim=-1)
    return token, torch.exp(top - torch.logsumexp(logits, dim=-1))


def _constants(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward that don't change from one to the next."""
    return {name: value for name, value in model_kwargs.items() if name not in ("attention_mask", "position_ids", compat.CACHE)}


def _why_no_capture(model: Any) -> str | None:
    """What of a model is done by Python in each forward, and wouldn't be done in a replay."""
    for module in model.modules():
        if compat.has_hooks(module):  # what transformers' own pick out is in the capture
            return f"{type(model).__name__} has hooks, which a captured forward wouldn't run"
        if hasattr(module, "get_base_layer"):
            return f"{type(model).__name__} has adapters, whose change a captured forward wouldn't see"
    if compat.where_rotary_changes(model) is not None:
        return f"{type(model).__name__} changes its rotary embedding with the length"
    return None


def _places_of_weights(model: Any) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
