"""A model as its own draft: early exit and a twin in four bits."""

import pytest
import torch

import assistgen
from assistgen import Speculator
from assistgen.drafters.itself import first_layers

from .test_families import state_of
from .tiny import build, pad_left, prompt


def exits(layers=2, **keys):
    return {"method": "early_exit", "assistant_early_exit": layers, "depth": "constant", "num_speculative_tokens": 4, **keys}


def inputs_of(rows):
    return {"input_ids": prompt(20, 1, period=5)} if rows == 1 else pad_left([prompt(20, 1, period=5), prompt(9, 2, period=4)])


def late(family, **overrides):
    """Its last layer hardly changes anything, so that the ones before it guess well."""
    layers = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    if family == "gemma3":
        layers["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    model = build(family, **layers, **overrides)
    stack = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)
    for parameter in stack[2].parameters():
        if parameter.dim() > 1:
            parameter.mul_(0.1)
    return model


@pytest.mark.exactness
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma3", "gpt2"])
def test_early_exit(family, rows):
    model, inputs = late(family), inputs_of(rows)
    before = state_of(model)
    for more in ({"do_sample": False}, {"do_sample": True, "temperature": 0.5}):
        torch.manual_seed(3)
        plain = model.generate(**inputs, **more, max_new_tokens=30, return_dict_in_generate=True)
        torch.manual_seed(3)
        output = assistgen.generate(model, **inputs, **more, max_new_tokens=30, return_dict_in_generate=True, speculation=exits())
        if rows == 1 or not more["do_sample"]:
            assert torch.equal(plain.sequences, output.sequences)
        assert output.speculation.num_accepted_tokens > 0 and not output.speculation.fallbacks
        assert set(output.speculation.drafters) == {"early_exit"}
    assert state_of(model) == before


def test_the_first_layers_are_what_they_say():
    """Their logits are those of a model that is made of them, and the draft starts on their part of the target's cache."""
    model = late("llama")
    short = build("llama")
    short.load_state_dict({name: weight for name, weight in model.state_dict().items() if ".layers.2." not in name})
    ids = prompt(20, 1)
    assert torch.equal(first_layers(model, 2)(ids).logits, short(ids).logits)
    widths = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, arguments: widths.append(arguments[0].shape[1]))
    assistgen.generate(model, ids, max_new_tokens=12, do_sample=False, speculation=exits(1))
    assert sorted(widths)[-1] == 20 and sorted(widths)[-2] <= 6  # one prefill


@pytest.mark.exactness
def test_transformers_own_argument():
    model, ids = late("llama"), prompt(20, 1, period=5)
    plain = model.generate(ids, max_new_tokens=60, do_sample=False)
    output = assistgen.generate(model, ids, max_new_tokens=60, do_sample=False, assistant_early_exit=2, return_dict_in_generate=True)
    assert torch.equal(plain, output.sequences) and output.speculation.draft_forwards > 0
    chain = Speculator({"drafters": ["suffix", exits()], "depth": "constant"})
    assert torch.equal(plain, assistgen.generate(model, ids, max_new_tokens=60, do_sample=False, speculation=chain))
    assert chain.stats.drafters["early_exit"].num_accepted_tokens > 0 and chain.stats.drafters["suffix"].num_accepted_tokens > 0


def test_an_error_leaves_the_model_whole():
    model = late("llama")
    before = state_of(model)

    class Stumble(list):
        def __call__(self, ids, scores):
            if ids.shape[1] > 24:
                raise RuntimeError("stumbled")
            return scores

    with pytest.raises(RuntimeError, match="stumbled"):
        assistgen.generate(model, prompt(20), max_new_tokens=20, speculation=exits(), logits_processor=[Stumble()])
    assert state_of(model) == before
    assert model.config.num_hidden_layers == 3 == len(model.model.layers)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_twin_in_four_bits(rows):
    pytest.importorskip("bitsandbytes")
    model, inputs = build("llama", dtype=torch.float32, hidden_size=64, intermediate_size=128), inputs_of(rows)
    before = state_of(model)
    twin = assistgen.nf4_twin(model)
    assert state_of(model) == before
    assert type(twin.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit" and twin.lm_head is model.lm_head
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    output = assistgen.generate(
        model, **inputs, max_new_tokens=24, do_sample=False, return_dict_in_generate=True,
        speculation={"method": "draft_model", "model": twin, "depth": "constant", "num_speculative_tokens": 4},
    )  # fmt: skip
    assert torch.equal(plain, output.sequences)
    assert output.speculation.num_accepted_tokens > 0 and not output.speculation.fallbacks


def test_what_cannot_be_copied_is_refused():
    model = late("llama")
    model.forward = model.forward  # as a compiled one has it: bound to the whole model
    short = first_layers(model, 1)
    assert not torch.equal(short(prompt(8)).logits, model(prompt(8)).logits)
    model.model.layers[0]._hf_hook = object()
    with pytest.raises(ValueError, match="`assistant_early_exit` doesn't go with a model that accelerate has spread"):
        assistgen.generate(model, prompt(8), speculation=exits(1), max_new_tokens=4)
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match="no linear layers"):
        assistgen.nf4_twin(build("gpt2", dtype=torch.float32, tie_word_embeddings=True))
