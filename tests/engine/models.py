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
