"""The token ids of a batch, in one buffer that grows rarely."""

from __future__ import annotations

import torch


class TokenBuffer:
    """
    The rows' ids: the padded prompt, what was committed, and behind that the drafts under verification.

    Args:
        input_ids (`torch.LongTensor` of shape `(rows, prompt length)`): as `generate()` prepared them.
        pad_token_id (`int`): what stands behind a row that is over.

    Attributes:
        ids (`torch.LongTensor` of shape `(rows, capacity)`): past a running row's length and draft there are valid, meaningless ids.
        lengths (`list[int]`): committed tokens of each row, the padded prompt included.
    """

    GROWTH = 512

    def __init__(self, input_ids: torch.Tensor, pad_token_id: int = 0):
        rows, self.prompt_length = input_ids.shape
        self.pad_token_id = pad_token_id
        self.lengths = [self.prompt_length] * rows
        self.ids = torch.nn.functional.pad(input_ids, (0, self.GROWTH), value=pad_token_id)

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens a row."""
        if length > self.ids.shape[1]:
            more = length - self.ids.shape[1] + self.ids.shape[1] // 2 + self.GROWTH
            self.ids = torch.nn.functional.pad(self.ids, (0, more), value=self.pad_token_id)

    def prefix(self, row: int) -> torch.Tensor:
        """The committed ids of a row, `(1, length)`: a view."""
        return self.ids[row : row + 1, : self.lengths[row]]

    def write_draft(self, row: int, draft: list[int]) -> None:
        """Puts a draft behind the committed tokens."""
        start = self.lengths[row]
        if draft:
            self.reserve(start + len(draft))
            self.ids[row, start : start + len(draft)] = torch.tensor(draft, dtype=self.ids.dtype)

    def append(self, row: int, token: int, in_place: bool) -> None:
        """Commits one token; `in_place` if the draft already put it there."""
        position = self.lengths[row]
        if not in_place:
            self.reserve(position + 1)
            self.ids[row, position] = token
        self.lengths[row] = position + 1

    def end(self, row: int) -> None:
        """The row is over: padding from here on."""
        self.ids[row, self.lengths[row] :] = self.pad_token_id

    def sequences(self) -> torch.Tensor:
        """`(rows, longest)`, a tensor of its own."""
        return self.ids[:, : max(self.lengths)].clone()
