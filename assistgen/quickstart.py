"""A real answer from a real model, plainly and with speculation: `python -m assistgen.quickstart`."""

from __future__ import annotations

import argparse
import platform
import statistics
from time import perf_counter
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import identity, weights
from .generation import stream
from .streaming import IncrementalText


COPY = """Proofread the following text. If there are no mistakes, repeat it word for word.

The old lighthouse stood on a rocky cliff above the sea. Every evening, the keeper climbed ninety-nine steps to light the lamp. \
Ships far away could see the beam and steer clear of the rocks. One stormy night, the lamp went out, and the keeper had to carry \
a lantern up the stairs. He stood there until morning, waving the light back and forth, and not a single ship was lost."""

OPEN = "Write a short story about a lighthouse keeper who finds a message in a bottle."

ACCEPTED = "bold green"
ROUNDS = 3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m assistgen.quickstart", description=__doc__)
    parser.add_argument("--model", default=weights.DEFAULT, help="short name, folder or hub id (default: %(default)s)")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: bfloat16 where the CPU has it")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--speculation", default="auto", help="method (default: %(default)s)")
    arguments = parser.parse_args(argv)

    console = Console(highlight=False)
    dtype = dtype_named(arguments.dtype)
    model, tokenizer = weights.load(arguments.model, dtype)
    if torch.cuda.is_available():
        model.to("cuda")
    console.print(
        f"[bold]{arguments.model}[/bold], {str(dtype).removeprefix('torch.')}, {_machine(model)}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    columns, same = [], True
    for name, prompt in (("copy-heavy", COPY), ("open-ended", OPEN)):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        run = Run(model, tokenizer, dict(inputs), arguments.max_new_tokens, console)
        run.plain(tokens=4)  # warm-up
        run.speculative(arguments.speculation, tokens=24)
        console.print(f"\n[bold]{name}:[/bold] {prompt.splitlines()[0]}\n\n[dim]plain:[/dim] ", end="")
        plain, plain_s = run.plain(show=True)
        hint = f", accepted draft tokens in [{ACCEPTED}]this colour[/{ACCEPTED}]" if console.is_terminal else ""
        console.print(f"\n[dim]{arguments.speculation}{hint}:[/dim] ", end="")
        fast, fast_s = run.speculative(arguments.speculation, show=True)
        plain_times, fast_times = [plain_s], [fast_s]
        with console.status("measuring"):
            for _ in range(ROUNDS - 1):
                plain_times.append(run.plain()[1])
                fast_times.append(run.speculative(arguments.speculation)[1])
        comparison = identity.compare(model, plain[0], fast.sequences[0])
        same = same and (comparison.identical or comparison.proven_tie)
        stats, plain_tokens = fast.speculation, plain.shape[1] - inputs["input_ids"].shape[1]
        plain_rate = plain_tokens / statistics.median(plain_times)
        fast_rate = stats.num_tokens / statistics.median(fast_times)
        columns.append(
            {
                "prompt": f"[bold]{name}[/bold]",
                "tokens": str(stats.num_tokens),
                "plain": f"{plain_rate:.1f} tokens/s",
                arguments.speculation: f"{fast_rate:.1f} tokens/s",
                "speed-up": f"[bold]{fast_rate / plain_rate:.2f}×[/bold]",
                "drafts accepted": f"{stats.num_accepted_tokens} of {stats.num_draft_tokens}",
                "target forwards": f"{stats.target_forwards} (plain {plain_tokens})",
                "output": str(comparison),
            }
        )
    table = Table(title="\nGreedy decoding, median of alternating runs", show_header=False)
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    console.print(table)
    return 0 if same else 1


class Run:
    """One prompt, decoded in different ways. Each way returns its output and the seconds it took; `show` prints the text as it comes."""

    def __init__(self, model: Any, tokenizer: Any, inputs: dict[str, Any], max_new_tokens: int, console: Console):
        self.model, self.tokenizer, self.inputs, self.max_new_tokens = model, tokenizer, inputs, max_new_tokens
        self.console = console

    def plain(self, show: bool = False, tokens: int | None = None) -> tuple[torch.Tensor, float]:
        """Transformers' own `generate()`."""
        start = perf_counter()
        streamer = transformers.TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if show else None
        output = type(self.model).generate(
            self.model, **self.inputs, do_sample=False, max_new_tokens=tokens or self.max_new_tokens, streamer=streamer
        )
        return output, perf_counter() - start

    def speculative(self, speculation: str, show: bool = False, tokens: int | None = None) -> tuple[Any, float]:
        start = perf_counter()
        chunks = stream(
            self.model,
            self.tokenizer,
            **self.inputs,
            speculation=speculation,
            do_sample=False,
            max_new_tokens=tokens or self.max_new_tokens,
        )
        text = IncrementalText(self.tokenizer, skip_special_tokens=True)
        for chunk in chunks:
            if show:
                for token, source in zip(chunk.token_ids, chunk.sources, strict=True):
                    self.console.print(Text(text.push([token]), style="" if source == "target" else ACCEPTED), end="")
        seconds = perf_counter() - start
        if show:
            self.console.print(text.end())
        return chunks.output, seconds


def dtype_named(name: str) -> torch.dtype:
    """A dtype by its name; `"auto"`: bfloat16 where the machine is fast at it, otherwise float32."""
    if name == "auto":
        fast = torch.cuda.is_available() or (hasattr(torch.cpu, "_is_avx512_bf16_supported") and torch.cpu._is_avx512_bf16_supported())
        return torch.bfloat16 if fast else torch.float32
    return getattr(torch, name)


def _machine(model: Any) -> str:
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    raise SystemExit(main())
