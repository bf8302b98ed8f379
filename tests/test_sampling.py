"""Sampling with deterministic drafts: with the same seed the text is plain `generate()`'s, whatever the drafts were."""

import pytest
import torch

import assistgen

from .oracles import OracleGenerator
from .tiny import build, prompt


pytestmark = pytest.mark.exactness

WARPERS = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1},
}
DRAFTERS = {"right": lambda position: True, "wrong": lambda position: False, "mixed": lambda position: position % 3 != 1}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("warper", WARPERS)
def test_same_seed_same_text(warper, drafter):
    model, ids = build("llama", seed=1), prompt(10)
    accepted = 0
    for seed in range(200 // len(WARPERS) + 1):
        kwargs = {"do_sample": True, "max_new_tokens": 14, **WARPERS[warper]}
        torch.manual_seed(seed)
        plain = model.generate(ids, **kwargs)
        torch.manual_seed(seed)
        generator = OracleGenerator(plain, depth=5, right=DRAFTERS[drafter])
        fast = assistgen.generate(model, ids, **kwargs, speculation=generator, return_dict_in_generate=True)
        assert torch.equal(plain, fast.sequences)
        accepted += fast.speculation.num_accepted_tokens
        if drafter == "right":
            assert fast.speculation.num_accepted_tokens == fast.speculation.num_draft_tokens
    assert (accepted == 0) if drafter == "wrong" else (accepted > 0)


def test_ngram_drafts_survive_top_p():
    """Transformers' prompt lookup tests its drafts with made-up logits, so that under `top_p` none is left."""
    model, ids = build("llama", seed=1), prompt(40, period=5)
    drafted = 0
    for seed in range(20):
        kwargs = {"do_sample": True, "top_p": 0.5, "max_new_tokens": 40}
        torch.manual_seed(seed)
        plain = model.generate(ids, **kwargs)
        torch.manual_seed(seed)
        fast = assistgen.generate(model, ids, **kwargs, speculation={"method": "ngram", "depth": "constant"}, return_dict_in_generate=True)
        assert torch.equal(plain, fast.sequences)
        drafted += fast.speculation.num_draft_tokens
    assert drafted > 0
