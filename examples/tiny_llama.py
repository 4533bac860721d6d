"""A Llama-like model in plain torch, not from transformers, for the examples that bring a model of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``(batch, heads, length, head size)``."""
    length, size = x.shape[-2:]
    speed = 10_000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angle = torch.arange(length, device=x.device)[:, None] * speed
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width {width} is not allowed with {heads} heads: give a multiple of {2 * heads}")
        self.head_size = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # -1: with tensor parallelism a rank has its share of the heads only.
        shape = (*x.shape[:2], -1, self.head_size)
        q, k, v = (proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        x = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(x.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, 3 * width, bias=False)
        self.up_proj = nn.Linear(width, 3 * width, bias=False)
        self.down_proj = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width, heads, kv_heads)
        self.mlp_norm, self.mlp = nn.RMSNorm(width), MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TinyLlama(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, kv_heads: int = 2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits ``(batch, length, vocabulary)`` of token ids ``(batch, length)``."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of predicting each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
