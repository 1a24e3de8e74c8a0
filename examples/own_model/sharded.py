"""The decoder of the page: ALiBi attention, a squared-ReLU MLP, RMSNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw


class Attention(nn.Module):
    """Causal attention whose scores fall with distance (arXiv:2108.12409)."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        cut: dict,
    ) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.qkv = sw.GQAQKVColumnParallelLinear(
            hidden_size,
            (hidden_size, hidden_size),
            bias=False,
            gather_output=False,
            head_dim=self.head_dim,
            **cut,
        )
        self.out = sw.RowParallelLinear(
            hidden_size, hidden_size, input_is_parallel=True, **cut
        )
        slopes = 2.0 ** (-8.0 / num_heads * torch.arange(1, num_heads + 1))
        group = sw.Group.of(cut["group"])
        slopes = slopes.chunk(group.size)[group.rank]
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)
            for part in self.qkv(x)
        )
        position = torch.arange(q.shape[2], device=x.device)
        distance = position.unsqueeze(1) - position
        bias = -distance * self.slopes.view(-1, 1, 1)
        bias = bias.masked_fill(distance < 0, float("-inf")).to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(out.permute(2, 0, 1, 3).flatten(2))


class MLP(nn.Module):
    """`down(relu(up(x))²)` (arXiv:2109.08668)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        cut: dict,
    ) -> None:
        super().__init__()
        self.up = sw.ColumnParallelLinear(
            hidden_size, intermediate_size, gather_output=False, **cut
        )
        self.down = sw.RowParallelLinear(
            intermediate_size, hidden_size, input_is_parallel=True, **cut
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        cut: dict,
    ) -> None:
        super().__init__()
        self.attention_norm = sw.RMSNorm(hidden_size, eps=1e-6, **cut)
        self.attention = Attention(hidden_size, num_heads, cut)
        self.mlp_norm = sw.RMSNorm(hidden_size, eps=1e-6, **cut)
        self.mlp = MLP(hidden_size, intermediate_size, cut)

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
        group: sw.Group | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        cut = {"group": group, "sequence_parallel_enabled": sequence_parallel}
        sizes = (hidden_size, num_attention_heads, intermediate_size)
        self.embedding = sw.ParallelEmbedding(vocab_size, hidden_size, **cut)
        self.blocks = nn.ModuleList(
            Block(*sizes, cut) for _ in range(num_hidden_layers)
        )
        self.norm = sw.RMSNorm(hidden_size, eps=1e-6, **cut)
        self.head = sw.ParallelLMHead(hidden_size, vocab_size, **cut)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.head.loss(self.hidden(ids), targets)
