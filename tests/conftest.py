import os

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
