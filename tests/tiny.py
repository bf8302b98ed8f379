"""Tiny random models, made in memory: a vocabulary of 80, two layers, weights large enough that the text isn't constant."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)


VOCAB = 80
WINDOW = 8
FAMILIES = ("llama", "qwen2", "mistral", "gemma3", "gpt2")


def build(family="llama", seed=0, dtype=torch.float64, **overrides):
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape | overrides))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape | overrides))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**shape | {"sliding_window": WINDOW} | overrides))
    elif family == "gemma3":
        mixed = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape | mixed | overrides))
    elif family == "gpt2":
        gpt2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.3}
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
        model = GPT2LMHeadModel(GPT2Config(**gpt2 | ids | overrides))
    elif family == "mamba":
        mamba = {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "initializer_range": 0.3}
        model = MambaForCausalLM(MambaConfig(**mamba | {"pad_token_id": 0, "eos_token_id": None} | overrides))
    else:
        raise KeyError(family)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def changing(kind, **kwargs):
    """A model whose rotary embedding has other frequencies past 40 tokens: once, or with each token."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2,
    }  # fmt: skip
    rope = {"rope_type": kind, "rope_theta": 1e4}
    torch.manual_seed(0)
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        config = Phi3Config(**sizes, max_position_embeddings=512, original_max_position_embeddings=40, rope_parameters=rope, **kwargs)
        return Phi3ForCausalLM(config).to(torch.float64).eval()
    config = LlamaConfig(**sizes, max_position_embeddings=40, rope_parameters=rope | {"factor": 4.0})
    return LlamaForCausalLM(config).to(torch.float64).eval()


def prompt(length=20, seed=0, period=0):
    """`(1, length)` ids without the special ones; with a period the n-gram drafter finds something at once."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (1, length), generator=generator)
    return ids[:, :period].repeat(1, length // period + 1)[:, :length] if period else ids


def pad_left(prompts):
    """One batch of `(1, length)` prompts: ids and attention mask."""
    width = max(p.shape[1] for p in prompts)
    pad = torch.nn.functional.pad
    ids = torch.cat([pad(p, (width - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}
