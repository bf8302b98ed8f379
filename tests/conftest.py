import os
import threading

import pytest
import torch
import transformers


os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_grad_enabled(False)


@pytest.fixture(scope="session")
def smollm():
    """SmolLM2-135M in float32 and its tokenizer."""
    from assistgen import weights

    return weights.load("smollm2-135m", torch.float32)


@pytest.fixture
def other_threads(monkeypatch):
    """torch's threads are not GNU's here."""
    from assistgen import openmp

    def missing():
        raise AttributeError("GOMP_parallel")

    monkeypatch.setattr(openmp, "_ruled_out", threading.Event())
    monkeypatch.setattr(openmp, "_library", missing)


@pytest.fixture(autouse=True)
def threads(request):
    """Tiny tensors are slower with several threads, by far on some machines; real weights are faster."""
    before = torch.get_num_threads()
    if not any(request.node.get_closest_marker(name) for name in ("weights", "slow")):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def moved(monkeypatch):
    """How many tokens were accepted that didn't stand where they were accepted."""
    from assistgen.target import RowsInStep

    counted = []
    gather = RowsInStep.gather

    def counting(self, nodes):
        counted.extend(node for place, node in enumerate(nodes) if node != place)
        gather(self, nodes)

    monkeypatch.setattr(RowsInStep, "gather", counting)
    return counted
