"""The decoder of the page: ALiBi attention, a squared-ReLU MLP, RMSNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention whose scores fall with distance (arXiv:2108.12409)."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
    ) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size)
        slopes = 2.0 ** (-8.0 / num_heads * torch.arange(1, num_heads + 1))
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        position = torch.arange(q.shape[2], device=x.device)
        distance = position.unsqueeze(1) - position
        bias = -distance * self.slopes.view(-1, 1, 1)
        bias = bias.masked_fill(distance < 0, float("-inf")).to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """`down(relu(up(x))²)` (arXiv:2109.08668)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.attention = Attention(hidden_size, num_heads)
        self.mlp_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.mlp = MLP(hidden_size, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """The causal language model."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
    ) -> None:
        super().__init__()
        sizes = (hidden_size, num_attention_heads, intermediate_size)
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(
            Block(*sizes) for _ in range(num_hidden_layers)
        )
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(ids).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten())
