"""One tiny random model of each family, with the arguments that a call of it takes."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf

from assistgen import compat

from .tiny import VOCAB, WINDOW, pad_left, prompt
from .tiny import build as build_decoder


IMAGE_TOKEN = 70
OLD = compat.CACHE == "past_key_values"
"""The Mambas of these versions keep their state in a cache of their own kind."""

SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": None}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}


def _text(rows):
    return (
        {"input_ids": prompt(20, 1, period=5)} if rows == 1 else pad_left([prompt(20, 1, period=5), prompt(9, 2, period=4), prompt(14, 3)])
    )


def _source(rows):
    """Padded on the right, as encoders have it."""
    if rows == 1:
        return {"input_ids": prompt(16, 1)}
    parts = [prompt(16, 1), prompt(9, 2), prompt(12, 3)]
    width = max(part.shape[1] for part in parts)
    pad = torch.nn.functional.pad
    return {
        "input_ids": torch.cat([pad(part, (0, width - part.shape[1])) for part in parts]),
        "attention_mask": torch.cat([pad(torch.ones_like(part), (0, width - part.shape[1])) for part in parts]),
    }


def _sound(rows):
    generator = torch.Generator().manual_seed(1)
    return {"input_features": torch.randn(rows if rows == 1 else 3, 8, 32, generator=generator, dtype=torch.float64)}


def _with_image(rows, tokens, **extra):
    """The image comes first; rows are padded on the left."""
    texts = [prompt(12, 1, period=4)] if rows == 1 else [prompt(12, 1, period=4), prompt(7, 2), prompt(9, 3, period=3)]
    image = torch.full((1, tokens), IMAGE_TOKEN)
    return pad_left([torch.cat([image, text.clamp(max=IMAGE_TOKEN - 1)], dim=1) for text in texts]) | extra


def _llava(rows):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(1 if rows == 1 else 3, 3, 8, 8, generator=generator, dtype=torch.float64)
    return _with_image(rows, 4, pixel_values=pixels)


def _gemma3_images(rows):
    inputs = _llava(rows)
    return inputs | {"token_type_ids": (inputs["input_ids"] == IMAGE_TOKEN).long()}


def _qwen_images(rows):
    generator = torch.Generator().manual_seed(1)
    count = 1 if rows == 1 else 3
    inputs = _with_image(rows, 4, image_grid_thw=torch.tensor([[1, 4, 4]] * count))
    inputs["pixel_values"] = torch.randn(16 * count, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)
    return inputs | {"mm_token_type_ids": (inputs["input_ids"] == IMAGE_TOKEN).long()}


def _t5():
    return tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, initializer_factor=3.0, dropout_rate=0.0,
                    decoder_start_token_id=0, pad_token_id=0, eos_token_id=None)
    )  # fmt: skip


def _bart():
    return tf.BartForConditionalGeneration(
        tf.BartConfig(vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                      decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=256, init_std=0.3,
                      dropout=0.0, decoder_start_token_id=2, pad_token_id=0, bos_token_id=1, eos_token_id=None, forced_eos_token_id=None)
    )  # fmt: skip


def _whisper_config(**extra):
    return tf.WhisperConfig(vocab_size=VOCAB, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
                            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=16,
                            max_target_positions=96, init_std=0.3, dropout=0.0, decoder_start_token_id=2, pad_token_id=0,
                            bos_token_id=1, eos_token_id=None, suppress_tokens=None, begin_suppress_tokens=None, **extra)  # fmt: skip


LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
          "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}


def _qwen3_next():
    return tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**SMALL | LINEAR | {"head_dim": 8, "num_experts": 0}))


def _granite_hybrid():
    return tf.GraniteMoeHybridForCausalLM(
        tf.GraniteMoeHybridConfig(**SMALL | MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 0,
                                                     "shared_intermediate_size": 48, "position_embedding_type": "rope"})
    )  # fmt: skip


def _nemotron_h():
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8}
    return tf.NemotronHForCausalLM(tf.NemotronHConfig(**SMALL | mamba | {"layers_block_type": ["mamba", "attention"]}))


def _qwen2_5_vl():
    text = SMALL | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
              "temporal_patch_size": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0], "window_size": 16}  # fmt: skip
    config = tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN, video_token_id=71,
                                 vision_start_token_id=72, vision_end_token_id=73)  # fmt: skip
    return tf.Qwen2_5_VLForConditionalGeneration(config)


def _gemma3_vl():
    text = SMALL | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    config = tf.Gemma3Config(text_config=text, vision_config=VISION | {"vision_use_head": False}, image_token_index=IMAGE_TOKEN,
                             mm_tokens_per_image=4, boi_token_index=72, eoi_token_index=73)  # fmt: skip
    return tf.Gemma3ForConditionalGeneration(config)


def _llava_model():
    vision = tf.CLIPVisionConfig(**VISION)
    config = tf.LlavaConfig(text_config=tf.LlamaConfig(**SMALL), vision_config=vision, image_token_index=IMAGE_TOKEN)
    return tf.LlavaForConditionalGeneration(config)


def _lora():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_decoder("llama"), LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"]))
    return model


def _restless(model):
    """Its norms are noisy, so that the text isn't constant."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(torch.randn_like(parameter))
    return model


# The last layers share the keys and values of earlier ones.
SHARING = {
    "num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": WINDOW,
    "head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip


def _gemma3n():
    shape = {"intermediate_size": [48] * 6, "activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 4}
    return _restless(tf.Gemma3nForCausalLM(tf.Gemma3nTextConfig(**SMALL | SHARING | shape)))


def _dory():
    layers = {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "n_recurrent_loops": 3}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW, "head_dim": 8}
    return tf.DoryForCausalLM(tf.DoryConfig(**SMALL | layers | kinds))


LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
          "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]}  # fmt: skip
SHARED_EXPERT = {"num_experts": 4, "shared_expert_intermediate_size": 16, "head_dim": 8}
HYBRIDS_WITH_EXPERTS = {
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", LINEAR | SHARED_EXPERT),
    "lara_mini": ("LaraMiniForCausalLM", "LaraMiniConfig", LINEAR | SHARED_EXPERT),
    "kimi_linear": (
        "KimiLinearForCausalLM", "KimiLinearConfig", LATENT | {"num_local_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4}
    ),
    "bailing_hybrid": (
        "BailingHybridForCausalLM", "BailingHybridConfig", LATENT | {"num_local_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 8}
    ),
    "zaya": ("ZayaForCausalLM", "ZayaConfig", {"num_experts": 4, "num_experts_per_tok": 1, "head_dim": 8, "router_hidden_size": 16}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM", "Lfm2MoeConfig", {"num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}
    ),
}  # fmt: skip


def _with_experts(causal_lm, config, settings):
    shape = SMALL | {"moe_intermediate_size": 16, "num_experts_per_tok": 2} | settings
    return _restless(getattr(tf, causal_lm)(getattr(tf, config)(**shape)))


def _lfm3():
    kinds = {"layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 8}
    return tf.Lfm3ForCausalLM(tf.Lfm3Config(**SMALL | kinds | {"num_hidden_layers": 3}))


@dataclass(frozen=True)
class Family:
    """
    A row of the table.

    Attributes:
        make: makes the model.
        inputs: from the number of rows, 1 or 3, what a call is given.
        plain (str): why it is decoded plainly; empty if it speculates.
        without (tuple): columns that plain `generate()` doesn't have.
        dtype: of the weights.
    """

    make: Any
    inputs: Any = _text
    plain: str = ""
    without: tuple = ()
    dtype: Any = torch.float64

    def build(self, seed=0):
        torch.manual_seed(seed)
        model = self.make()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model.to(self.dtype).eval()


FAMILIES = {
    **{name: Family(lambda name=name: build_decoder(name)) for name in ("llama", "qwen2", "mistral", "gemma3", "gpt2")},
    "qwen3": Family(lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL | {"head_dim": 8}))),
    "gpt_neox": Family(lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SMALL))),
    "opt": Family(
        lambda: tf.OPTForCausalLM(tf.OPTConfig(**SMALL | {"ffn_dim": 48, "init_std": 0.3, "word_embed_proj_dim": 32, "dropout": 0.0}))
    ),
    "phi": Family(lambda: tf.PhiForCausalLM(tf.PhiConfig(**SMALL))),
    "bloom": Family(
        lambda: tf.BloomForCausalLM(
            tf.BloomConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                n_layer=2,
                n_head=4,
                initializer_range=0.3,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=None,
            )
        ),
        without=("batch",),
    ),  # padded rows are NaN there
    "mixtral": Family(
        lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2})), dtype=torch.float32
    ),
    "gemma3n": Family(_gemma3n),
    "gemma4": Family(lambda: _restless(tf.Gemma4ForCausalLM(tf.Gemma4TextConfig(**SMALL | SHARING | {"global_head_dim": 8})))),
    **({"dory": Family(_dory)} if hasattr(tf, "DoryConfig") else {}),
    "lora": Family(_lora),
    "t5": Family(_t5, _source),
    "bart": Family(_bart, _source),
    "whisper": Family(lambda: tf.WhisperForConditionalGeneration(_whisper_config()), _sound),
    "qwen2_5_vl": Family(_qwen2_5_vl, _qwen_images),
    "gemma3_vl": Family(_gemma3_vl, _gemma3_images),
    "llava": Family(_llava_model, _llava),
    "qwen3_next": Family(_qwen3_next),
    "qwen3_5": Family(lambda: tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**SMALL | LINEAR | {"head_dim": 8}))),
    "olmo_hybrid": Family(lambda: tf.OlmoHybridForCausalLM(tf.OlmoHybridConfig(**SMALL | LINEAR))),
    "bamba": Family(lambda: tf.BambaForCausalLM(tf.BambaConfig(**SMALL | MAMBA | {"attn_layer_indices": [1]}))),
    "granite_hybrid": Family(_granite_hybrid),
    "nemotron_h": Family(_nemotron_h),
    "lfm2": Family(lambda: tf.Lfm2ForCausalLM(tf.Lfm2Config(**SMALL | {"layer_types": ["conv", "full_attention"]}))),
    **({"lfm3": Family(_lfm3)} if hasattr(tf, "Lfm3Config") else {}),
    "falcon_h1": Family(lambda: tf.FalconH1ForCausalLM(tf.FalconH1Config(**SMALL | MAMBA | {"mamba_d_ssm": 64}))),
    **{
        name: Family(lambda parts=parts: _with_experts(*parts), dtype=torch.float32)  # torch has no grouped product in float64
        for name, parts in HYBRIDS_WITH_EXPERTS.items()
        if hasattr(tf, parts[0])
    },
    "zamba2": Family(
        lambda: tf.Zamba2ForCausalLM(
            tf.Zamba2Config(
                **SMALL
                | {"num_key_value_heads": 4, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]}
                | {"mamba_d_state": 8, "n_mamba_heads": 8, "chunk_size": 8}
            )
        ),
        plain="doesn't go on from a recurrent state",
    ),
    "mamba": Family(
        lambda: build_decoder("mamba"),
        plain="keeps no cache" if OLD else "doesn't go on from a recurrent state",
        without=("second turn",) if OLD else (),
    ),
    **{
        name: Family(make, plain="takes one token at a time", without=("second turn",))
        for name, make in {
            "xlm": lambda: tf.XLMWithLMHeadModel(tf.XLMConfig(vocab_size=VOCAB, emb_dim=32, n_layers=2, n_heads=4, dropout=0.0)),
            "cpmant": lambda: tf.CpmAntForCausalLM(
                tf.CpmAntConfig(vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48, num_hidden_layers=2)
            ),
            "moshi": lambda: tf.MoshiForCausalLM(tf.MoshiConfig(**SMALL | {"ffn_dim": 48, "head_dim": 8, "sliding_window": WINDOW})),
        }.items()
    },
    "rwkv": Family(
        lambda: tf.RwkvForCausalLM(
            tf.RwkvConfig(
                vocab_size=VOCAB, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, eos_token_id=None, bos_token_id=1
            )
        ),
        plain="keeps no cache",
        without=("second turn",),
    ),
    "mamba2": Family(
        lambda: tf.Mamba2ForCausalLM(
            tf.Mamba2Config(
                vocab_size=VOCAB,
                hidden_size=32,
                state_size=8,
                num_hidden_layers=2,
                num_heads=8,
                head_dim=8,
                n_groups=2,
                chunk_size=8,
                initializer_range=0.3,
                pad_token_id=0,
                eos_token_id=None,
                bos_token_id=1,
            )
        ),
        plain="keeps no cache" if OLD else "",
        without=("second turn",) if OLD else (),
    ),
}
