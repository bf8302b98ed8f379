"""Peak memory at a long context against plain `generate()`, each side in a process of its own: `python -m benchmarks.memory`."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

import torch
import transformers

import assistgen
from assistgen import weights

from .common import finish, machine


def peak(model_name: str, rows: int, length: int, side: str) -> None:
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    model, tokenizer = weights.load(model_name, torch.bfloat16)
    text = tokenizer(" ".join(f"Line {n} of the log says {n * 7 % 101}." for n in range(length)))["input_ids"]
    ids = torch.tensor([text[row : row + length] for row in range(rows)])
    speculation = None if side == "plain" else side
    assistgen.generate(model, ids, speculation=speculation, max_new_tokens=48, do_sample=False)
    print(json.dumps({"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=weights.DEFAULT)
    parser.add_argument("--length", type=int, default=8000, help="tokens of context (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        peak(arguments.model, arguments.rows[0], arguments.length, arguments.side)
        return
    print(machine())
    results = {}
    for rows in arguments.rows:
        peaks = {}
        for side in ("plain", "ngram"):
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory", "--model", arguments.model, "--length",
                       str(arguments.length), "--rows", str(rows), "--side", side]  # fmt: skip
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            peaks[side] = json.loads(output.splitlines()[-1])["peak_mb"]
        results[rows] = peaks
        print(f"{rows} rows of {arguments.length}: plain {peaks['plain']:.0f} MB, ngram {peaks['ngram']:.0f} MB, "
              f"ratio {peaks['ngram'] / peaks['plain']:.3f}", flush=True)  # fmt: skip
    finish({"peak_mb": results})


if __name__ == "__main__":
    main()
