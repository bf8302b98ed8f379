"""What caches need to go back: a layout whose rows advance on their own, which lets a batch speculate, and copies of recurrent states.

Every row has the same slots (column of the padded sequence), and a row's tokens are written at that row's own next slots. Rolling a
row back is therefore only a smaller length; the rejected tokens are overwritten by the next round. Since slots of a row are
contiguous, distances between slots are distances between positions, and sliding windows stay windows of positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from . import compat


FULL, SLIDING = "full_attention", "sliding_attention"
GROWTH = 256
"""Slots by which a full-attention buffer grows."""


class RecurrentStates:
    """The states of a cache's recurrent layers, put aside before a forward that may have to be taken back."""

    def __init__(self, cache: Any):
        layers = compat.self_attention_layers(cache) if isinstance(cache, Cache) else []
        self._layers = [layer for layer in layers if compat.is_recurrent(layer)]
        self._saved: list[torch.Tensor] = []
        self._length = -1

    def __bool__(self) -> bool:
        return bool(self._layers)

    def _states(self) -> list[torch.Tensor]:
        kept: list[torch.Tensor | None] = []
        for layer in self._layers:
            kept += [*layer.conv_states.values(), *layer.recurrent_states.values(), compat.linear_count(layer)]
        return [state for state in kept if state is not None]

    def put_aside(self, length: int) -> None:
        """The states are those after `length` ids."""
        if self._layers and length != self._length:
            self._saved, self._length = [state.clone() for state in self._states()], length

    def put_back(self) -> int:
        """As they were when they were put aside; returns after how many ids that was."""
        for state, saved in zip(self._states(), self._saved, strict=True):
            state.copy_(saved)
        return self._length


class RowLayer(CacheLayerMixin):
    """
    Keys and values of one attention layer, `(rows, heads, cells, head_dim)`. Slot s of a row lies in cell s, or in cell s modulo the
    ring size if the layer has a window: a ring of `window - 1` cells and one round's width never overwrites what is still visible.

    Args:
        ring (`int`, *optional*): number of cells of a layer with a window; `None` for a layer that keeps everything.
        capacity (`int`, *optional*): number of cells of a layer that keeps everything, if it isn't to grow.
    """

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, first_slot: int, ring: int | None, capacity: int | None = None):
        super().__init__()
        self.ring = ring
        self._capacity = capacity
        self.is_initialized = True
        self.slots: torch.Tensor | None = None  # (rows, width): where the next update writes; set for all layers at once
        self.extent = 0
        cells = ring or capacity or first_slot + keys.shape[2] + GROWTH
        self.keys, self.values = (states.new_empty((*states.shape[:2], cells, states.shape[3])) for states in (keys, values))
        self.refill(keys, values, first_slot)

    def refill(self, keys: torch.Tensor, values: torch.Tensor, first_slot: int) -> None:
        """Forgets everything but the states of the slots from `first_slot` on, which there is room for."""
        cells = self._cells(torch.arange(first_slot, first_slot + keys.shape[2], device=keys.device))
        for buffer, states in ((self.keys, keys), (self.values, values)):
            buffer.zero_()
            buffer[:, :, cells] = states

    def _cells(self, slots: torch.Tensor) -> torch.Tensor:
        return slots % self.ring if self.ring else slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise RuntimeError("A RowLayer is made from a filled layer.")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Writes `(rows, heads, width, head_dim)` states at each row's own slots; returns all cells that any row uses."""
        if not self.ring and not self._capacity and self.extent > self.keys.shape[2]:
            grow = (0, 0, 0, self.extent + GROWTH - self.keys.shape[2])
            self.keys = torch.nn.functional.pad(self.keys, grow)
            self.values = torch.nn.functional.pad(self.values, grow)
        assert self.slots is not None
        cells = self._cells(self.slots)
        rows = torch.arange(len(cells), device=cells.device)[:, None]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            # Not scatter_: with its index expanded over heads and features it takes ten times as long.
            buffer.transpose(1, 2).index_put_((rows, cells), states.transpose(1, 2))
        if self.ring:
            return self.keys, self.values
        return self.keys[:, :, : self.extent], self.values[:, :, : self.extent]

    def window(self, first_slot: int, end_slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots `first_slot` … `end_slot - 1` of every row, in order."""
        cells = self._cells(torch.arange(first_slot, end_slot, device=self.keys.device))
        return self.keys[:, :, cells], self.values[:, :, cells]

    def select(self, rows: torch.Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2] if self.ring else self.extent, 0

    def get_seq_length(self) -> int:
        return self.extent

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """
    Takes over a transformers cache after the prefill (`adopt`) and gives it back, continued, at the end (`release`).

    Args:
        source (`Cache`): dynamic or static, with full-attention and sliding-window layers.
        layer_types (`list[str]`): of each layer, as the model's masks see it.
        window (`int`, *optional*): the model's sliding window, in positions.
        max_width (`int`): the widest forward that will come.
        max_slots (`int`): the most slots that a row will have.
        capacity (`int`, *optional*): at least `max_slots + max_width` cells from the start, so that its memory stays in its place.
    """

    is_compileable = False

    def __init__(
        self, source: Cache, layer_types: list[str], window: int | None, max_width: int, max_slots: int, capacity: int | None = None
    ):
        self.source = source
        self.layer_types = layer_types
        self.window = window
        self.rings: dict[str, int | None] = {}
        self._parked: list[tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]] = []
        layers = list(source.layers)
        for i, layer, states in self._taken_from(source):
            ring = None
            if isinstance(layer, DynamicSlidingWindowLayer):
                ring = min(layer.sliding_window - 1, capacity or max_slots) + max_width
            self.rings[layer_types[i]] = ring
            layers[i] = RowLayer(*states, ring, capacity)
        super().__init__(layers=layers)
        self.row_layers: list[RowLayer] = [layer for layer in layers if isinstance(layer, RowLayer)]

    @staticmethod
    def _taken_from(source: Cache) -> Iterator[tuple[int, Any, tuple[torch.Tensor, torch.Tensor, int]]]:
        """
        The layers that hold something, with their numbers and the keys, values and first slot of it; a dynamic one loses them, so that they
        aren't held twice.
        """
        slots = compat.length_of(source)
        for i, layer in enumerate(source.layers):
            if isinstance(layer, compat.NOTHING_KEPT):
                continue
            keys, values = layer.keys, layer.values
            if isinstance(layer, StaticLayer):
                keys, values = keys[:, :, :slots], values[:, :, :slots]
            yield i, layer, (keys, values, slots - keys.shape[2])
            if isinstance(layer, DynamicLayer):
                layer.keys = layer.values = None

    def refill(self, source: Cache) -> None:
        """Takes over another cache of the same kinds of layers, in the memory that there is."""
        self.source = source
        for i, _, states in self._taken_from(source):
            self.layers[i].refill(*states)

    @staticmethod
    def why_not(cache: Any, layer_types: list[str]) -> str | None:
        """Why rows can't advance on their own in this cache (known before the first forward), or `None` if they can."""
        reason = compat.why_no_roll_back(cache)
        if reason is not None:
            return reason
        if set(layer_types) - {FULL, SLIDING}:
            return f"rows can't be rolled back one by one in layers of type {', '.join(sorted(set(layer_types) - {FULL, SLIDING}))}"
        by_kind: dict[str, set[type]] = {}
        for layer, kind in zip(cache.layers, layer_types, strict=False):
            if not isinstance(layer, compat.NOTHING_KEPT):
                by_kind.setdefault(kind, set()).add(type(layer))
        if any(len(types) > 1 for types in by_kind.values()):
            return "layers of one attention type are cached in different ways"
        return None

    def prepare(self, slots: torch.Tensor, extent: int) -> None:
        """The next forward writes at `slots` `(rows, width)`; `extent` is the highest of them plus one."""
        for layer in self.row_layers:
            layer.slots, layer.extent = slots, extent

    def masks(self, slots: torch.Tensor, prompt_mask: torch.Tensor | None, by_kind: bool, additive: torch.dtype | None) -> Any:
        """
        The attention mask of a forward, as its model takes it: one (`mask`), or with `by_kind` one for each kind of layers; with
        `additive` in numbers of that type in place of booleans.
        """
        masks = {kind: self.mask(kind, slots, prompt_mask) for kind in set(self.layer_types)}
        if additive is not None:
            masks = {kind: additive_mask(mask, additive) for kind, mask in masks.items()}
        return masks if by_kind else next(iter(masks.values()))

    def mask(self, kind: str, slots: torch.Tensor, prompt_mask: torch.Tensor | None) -> torch.Tensor:
        """
        Which cells each query sees.

        Args:
            kind (`str`): of the layers.
            slots (`torch.Tensor` of shape `(rows, width)`): of the queries.
            prompt_mask (`torch.BoolTensor` of shape `(rows, prompt slots)`, *optional*): the prompt's slots that aren't padding.

        Returns:
            `torch.BoolTensor` of shape `(rows, 1, width, cells)`
        """
        ring, device = self.rings[kind], slots.device
        if ring:
            newest = slots[:, -1:]  # a cell holds the newest of its slots that was written
            cells = newest - (newest - torch.arange(ring, device=device)) % ring
        else:
            cells = torch.arange(self.row_layers[0].extent, device=device)[None, :]
        used = cells >= 0
        if prompt_mask is not None:
            prompt_slots = prompt_mask.shape[1]
            in_prompt = cells.clamp(0, prompt_slots - 1).expand(len(slots), -1)
            used = used & ((cells >= prompt_slots) | prompt_mask.gather(1, in_prompt))
        distance = slots[:, :, None] - cells[:, None, :]
        visible = (distance >= 0) & used[:, None, :]
        if kind == SLIDING and self.window is not None:
            visible &= distance < self.window
        return visible[:, None]

    def keep(self, kept: list[int], rows: list[int], park: bool) -> None:
        """
        Only the rows `kept` (indices into the present rows) go on. With `park`, the others are put aside for `release`; `rows` are
        the present rows' numbers in the batch.
        """
        if park:
            gone = torch.tensor([i for i in range(len(rows)) if i not in kept], dtype=torch.long)
            numbers = [rows[i] for i in gone.tolist()]
            self._parked.append((numbers, [(layer.keys[gone], layer.values[gone]) for layer in self.row_layers]))
        index = torch.tensor(kept, dtype=torch.long, device=self.row_layers[0].keys.device)
        for layer in self.row_layers:
            layer.select(index)

    def rejoin(self, rows: list[int]) -> None:
        """Brings the parked rows back: afterwards the cache holds all rows of the batch, in order. `rows`: numbers of the present ones."""
        if not self._parked:
            return
        numbers = [*rows, *(number for parked, _ in self._parked for number in parked)]
        order = torch.tensor(sorted(range(len(numbers)), key=numbers.__getitem__))
        for i, layer in enumerate(self.row_layers):
            cells = layer.keys.shape[2]
            parts = [(layer.keys, layer.values), *(states[i] for _, states in self._parked)]
            keys, values = (
                torch.cat([torch.nn.functional.pad(part[side], (0, 0, 0, cells - part[side].shape[2])) for part in parts])
                for side in (0, 1)
            )
            layer.keys, layer.values = keys[order], values[order]
        self._parked.clear()

    def release(self, length: int) -> Cache:
        """The source cache again, holding `length` slots of every row."""
        for layer, mine in zip(self.source.layers, self.layers, strict=True):
            if not isinstance(mine, RowLayer):
                continue
            first = max(0, length - layer.sliding_window + 1) if isinstance(layer, DynamicSlidingWindowLayer) else 0
            keys, values = mine.window(first, length)
            compat.load_window(layer, keys, values, length)
        return self.source


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask in numbers to be added to attention weights."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)
