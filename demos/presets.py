"""Prompts that show what speculation brings, and what it doesn't."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """
    Attributes:
        label (`str`): on the button.
        expects (`str`): what is to be seen: `"a win"`, `"an even match"` or `"a loss avoided"`.
        prompt (`str`): what is asked.
        temperature (`float`): of sampling; 0 is greedy.
    """

    label: str
    expects: str
    prompt: str
    temperature: float = 0.0


_CODE = """Rename the variable `items` to `prices` in this code. Write out the whole code.

```python
def total(items, tax):
    result = 0
    for item in items:
        if item.is_discounted:
            result += item.price * 0.9
        else:
            result += item.price
    return result * (1 + tax)


def cheapest(items):
    return min(items, key=lambda item: item.price)
```"""

_DOCUMENT = """The old lighthouse stood on a rocky cliff above the sea. Every evening, the keeper climbed ninety-nine steps to light the \
lamp. Ships far away could see the beam and steer clear of the rocks. One stormy night, the lamp went out, and the keeper had to carry a \
lantern up the stairs. He stood there until morning, waving the light back and forth, and not a single ship was lost.

What happened on the stormy night? Quote the sentences of the text that say it."""

_JSON = """Check this JSON. If there are no mistakes, repeat it unchanged.

{
  "people": [
    {
      "name": "Ada",
      "born": 1815,
      "city": "London",
      "profession": "engineer"
    },
    {
      "name": "Blaise",
      "born": 1623,
      "city": "Paris",
      "profession": "engineer"
    },
    {
      "name": "Carl",
      "born": 1777,
      "city": "Berlin",
      "profession": "teacher"
    }
  ]
}"""

PRESETS = [
    Preset("Edit code", "a win", _CODE),
    Preset("Quote a document", "a win", _DOCUMENT),
    Preset("Check JSON", "a win", _JSON),
    Preset("Chat", "an even match", "Write a short story about a lighthouse keeper who finds a message in a bottle."),
    Preset("Random text", "a loss avoided", "Write nonsense: words that don't belong together, none of them twice.", temperature=1.4),
]
