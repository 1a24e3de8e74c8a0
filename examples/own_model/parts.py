"""Other parts of a model of your own, as docs/own-model-options.md tells."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw


class Attention(sw.PlacedModule):
    """x `[S, B, H]`, or `[S/TP, B, H]` with sequence parallelism → the same."""

    def __init__(
        self, path: str, hidden_size: int, heads: int, kv_heads: int, cut: dict
    ) -> None:
        super().__init__()
        group = sw.Group.of(cut["group"])
        self.head_dim = head_dim = hidden_size // heads
        sizes = (heads * head_dim, kv_heads * head_dim)
        self.qkv = sw.GQAQKVColumnParallelLinear(
            hidden_size,
            sizes,
            bias=False,
            gather_output=False,
            head_dim=head_dim,
            names=[f"{path}.{name}" for name in ("q", "k", "v")],
            **cut,
        )
        self.norm = sw.QueryKeyNorm(
            sizes,
            1e-6,
            head_dim=head_dim,
            over="head",
            names=(f"{path}.q_norm", f"{path}.k_norm"),
            group=group,
        )
        ones = sw.Init.constant(1.0)
        piece = sw.Piece.rows(f"{path}.temperature", (heads,), group, ones)
        shape = (heads // group.size,)  # this rank's heads
        self.temperature = sw.make_parameter(shape, (piece,), group)
        self.out = sw.RowParallelLinear(
            hidden_size, hidden_size, bias=False, input_is_parallel=True, **cut
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (  # [S, B, heads of this rank, D]
            part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x)
        )
        q, k = self.norm(q, k)
        q = q * self.temperature.unsqueeze(-1)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return self.out(out.permute(2, 0, 1, 3).flatten(2))


class GatedMLP(nn.Module):
    """x `[S, B, H]`, or `[S/TP, B, H]` with sequence parallelism → the same."""

    def __init__(
        self, path: str, hidden_size: int, inner_size: int, cut: dict
    ) -> None:
        super().__init__()
        self.gate_up = sw.MergedColumnParallelLinear(
            hidden_size,
            [inner_size, inner_size],
            bias=False,
            gather_output=False,
            names=[f"{path}.gate", f"{path}.up"],
            **cut,
        )
        self.down = sw.RowParallelLinear(
            inner_size, hidden_size, bias=False, input_is_parallel=True, **cut
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)  # [S, B, inner_size/TP] each
        return self.down(F.silu(gate) * up)


class Embeddings(nn.Module):
    """ids `[S, B]` → `[S, B, H]`, or `[S/TP, B, H]`."""

    def __init__(
        self, vocab_size: int, length: int, hidden_size: int, cut: dict
    ) -> None:
        super().__init__()
        self.tokens = sw.ParallelEmbedding(vocab_size, hidden_size, **cut)
        self.positions = sw.ReplicatedEmbedding(length, hidden_size, **cut)
        self.norm = sw.LayerNorm(hidden_size, **cut)

    def forward(self, ids: Tensor) -> Tensor:
        indices_S1 = torch.arange(len(ids), device=ids.device)[:, None]
        return self.norm(self.tokens(ids) + self.positions(indices_S1))


class Scale(sw.PlacedModule):
    """`x · weight`, x `[S, B, H]`, or `[S/TP, B, H]`."""

    def __init__(
        self,
        hidden_size: int,
        group: sw.Group | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        group = sw.Group.of(group)
        shape = (hidden_size,)
        ones = sw.Init.constant(1.0)
        piece = sw.Piece.replicated(
            ".weight", shape, group, ones, partial=sequence_parallel
        )
        self.weight = sw.make_parameter(shape, (piece,), group)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight
