"""Tiny random checkpoints for tests that are about the engine, never about quality."""

from __future__ import annotations

from pathlib import Path

import torch


def tiny_llama(path: Path, seed: int = 0, **overrides: object) -> Path:
    """A Llama of two layers, two KV heads of 32 channels, random weights, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        **overrides,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16).save_pretrained(path)
    return path


def tiny_gemma3(path: Path, seed: int = 0) -> Path:
    """A Gemma-3 with sliding-window layers beside full ones: several cache groups that share
    tensors."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=160,
        layer_types=["sliding_attention"] * 2
        + ["full_attention"]
        + ["sliding_attention"] * 3
        + ["full_attention"],
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def tiny_deepseek(path: Path, seed: int = 0) -> Path:
    """A DeepSeek-V2 of dense layers: multi-head latent attention."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=3,
        n_routed_experts=2,
        max_position_embeddings=2048,
    )
    torch.manual_seed(seed)
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def tiny_hybrid(path: Path, kind: str, seed: int = 0) -> Path:
    """A hybrid of attention and layers that keep a state: ``qwen3_next``, ``granitemoehybrid`` or
    ``lfm2``."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    state = {"qwen3_next": "linear_attention", "granitemoehybrid": "mamba", "lfm2": "conv"}[kind]
    attention = "attention" if kind == "granitemoehybrid" else "full_attention"
    special = {
        "qwen3_next": {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "head_dim": 32,
        },
        "granitemoehybrid": {
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
        },
        "lfm2": {"block_auto_adjust_ff_dim": False, "conv_dim": 128},
    }[kind]
    config = CONFIG_MAPPING[kind](
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=[state, attention, state, state, attention],
        max_position_embeddings=2048,
        **special,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    return path


def add_byte_tokenizer(path: Path) -> Path:
    """A tokenizer of one token a byte, beside a checkpoint of at least 257 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"</s>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    return path
