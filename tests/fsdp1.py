"""What the tests of FSDP share: a Llama-like model that is not of transformers, and torch's own FSDP1 on a CPU."""

from __future__ import annotations

import functools
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

VOCABULARY, WIDTH, BLOCKS, TOKENS = 50, 24, 3, 7


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, positions):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        turn = positions[:tokens].to(x.dtype)
        y = nn.functional.scaled_dot_product_attention(q * turn, k * turn, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x, positions):
        x = x + self.attention(self.norm1(x), positions)
        return x + self.down(nn.functional.silu(self.up(self.norm2(x))))


class Tiny(nn.Module):
    """Llama's shape: embedding, blocks, norm, head, a persistent and a lost buffer; widths that no rank divides."""

    def __init__(self, *, tied: bool = False, blocks: int = BLOCKS):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.norm = Norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.register_buffer("positions", torch.linspace(1, 2, 16)[:, None], persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def reset_parameters(self):
        self.scale.fill_(0.5)
        self.positions.copy_(torch.linspace(1, 2, 16)[:, None])

    def forward(self, ids):
        x = self.embed(ids) * self.scale.to(self.embed.weight.dtype)
        for layer in self.layers:
            x = layer(x, self.positions)
        return self.head(self.norm(x))


by_block = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


def build(cls=Tiny, *, seed: int = 1, **kwargs):
    torch.manual_seed(seed)
    return cls(**kwargs)


def batch(step: int, rank: int, micro: int = 0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)


def loss_of(model, ids):
    logits = model(ids)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def plain_gradients(ranks: int = 2, *, double: bool = True, **kwargs) -> dict[str, torch.Tensor]:
    """Of the mean of the ranks' losses, in one process."""
    model = build(**kwargs)
    model = model.double() if double else model
    sum(loss_of(model, batch(0, rank)) for rank in range(ranks)).div(ranks).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradients(model) -> dict[str, torch.Tensor]:
    """Whole, of a sharded model."""
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def torch_fsdp(model, use_orig_params=True, **kwargs):
    """torch's own FSDP1, which takes a CPU only as ``device_id``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TorchFSDP(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params, **kwargs)


def whole(model) -> dict[str, torch.Tensor]:
    """Every parameter, whole, by its plain name."""
    if isinstance(model, TorchFSDP):
        with TorchFSDP.summon_full_params(model):
            return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()}
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference, in units of the largest value."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max(((a[n].double() - b[n].double()).abs().max() / b[n].double().abs().max()).item() for n in a)


def mean(value: torch.Tensor) -> float:
    """Over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()
