"""The record of a model's family: its keys, as Hugging Face's `config.json` spells them, its facts and its files.

Every family is one class. Other modules ask it for a fact, never for its name, so that a family which differs from
another by facts alone needs no change elsewhere. `config/model.py` lists the classes.

This module does not import `annotations` from `__future__`: pydantic would evaluate each annotation, then a string,
again for every class that inherits it.
"""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, PrivateAttr, model_validator

from shardwise.base.errors import listing
from shardwise.config.base_section import MOST_LAYERS, Origin, Section, divisors, nearest_numbers, reject
from shardwise.config.hugging_face_names import ConfigFile, ExpertNames, WeightNames
from shardwise.config.rope_scaling import rope_scaling_problems, scaling_with_one_type
from shardwise.config.routing import Routing

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu"]
Objective: TypeAlias = Literal["lm", "mlm", "nsp"]
NormKind: TypeAlias = Literal["layer_norm", "rms_norm"]
NormPlace: TypeAlias = Literal["input", "sum", "output", "both"]
NormedWidth: TypeAlias = Literal["head", "all_heads"]
GELUName: TypeAlias = Literal["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "relu": "relu", "gelu": "gelu",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
_GELUS = "gelu (erf), gelu_new, gelu_fast and gelu_pytorch_tanh (tanh), or relu"

# Keys that several families have, with their rules and descriptions.
AttentionBias: TypeAlias = Annotated[bool, Field(description="biases on the Q, K, V and output projections")]
Longest: TypeAlias = Annotated[int, Field(gt=0, description="longest sequence the model is made for")]
ProbabilityDropout: TypeAlias = Annotated[
    float, Field(ge=0, lt=1, description="dropout of the attention probabilities")
]
RopeScaling: TypeAlias = Annotated[
    dict[str, Any] | None, Field(description="Hugging Face's rope_scaling: rope_type and its fields; null = none")
]
RotaryBase: TypeAlias = Annotated[float, Field(gt=0, description="base of the rotary frequencies")]
Tied: TypeAlias = Annotated[bool, Field(description="one weight for the embedding and the output head")]
_FeedForwardDropout: TypeAlias = Annotated[
    float, Field(ge=0, lt=1, description="dropout after the activation of the feed-forward layer, as in NeMo's GPT")
]
_LearnedPositions: TypeAlias = Annotated[int, Field(gt=0, description="learned positions: the longest sequence")]
_NormEpsilon: TypeAlias = Annotated[float, Field(gt=0, description="added to the variance in LayerNorm")]


def default_sizes(
    vocabulary: int, width: int, inner_width: int, layers: int, heads: int, **others: Any
) -> dict[str, Any]:
    """Return Hugging Face's defaults of the sizes that every family has, and of other keys."""
    return {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner_width, "num_hidden_layers": layers,
        "num_attention_heads": heads, **others,
    }  # fmt: skip


class FamilyConfig(Section):
    """The keys that all families share, and the facts of their architecture that models and formulas read.

    A family states the facts in which it differs from the defaults here.
    """

    is_own: ClassVar[Literal[False]] = False
    """True for a class of the user's own, of which nobody knows the shapes before it is built (`UserModelConfig`)."""
    config_file: ClassVar[ConfigFile]
    """The way in which its `config.json` is written."""
    weight_names: ClassVar[WeightNames]
    """Names of weights in published checkpoints."""

    aliases: ClassVar[dict[str, str]] = {}
    """Other spellings of the family's keys."""
    derived: ClassVar[tuple[str, ...]] = ()
    """Keys for which null means the default, as in Hugging Face's files."""
    keys: ClassVar[dict[str, str]] = {}
    """Role → the family's key for it. Roles are `activation`, `norm_eps` and the kinds of dropout that it has."""

    norm_kind: ClassVar[NormKind] = "layer_norm"
    norm_place: ClassVar[NormPlace] = "input"
    """`input`: x + f(norm(x)) for each of attention and MLP. `sum`: norm(x + f(x)). `output`: x + norm(f(x)). `both`:
    x + norm(f(norm(x)))."""
    norm_has_unit_offset: ClassVar[bool] = False
    """True if a norm multiplies by 1 + its weight."""
    query_key_norm: ClassVar[NormedWidth | None] = None
    """Width of the RMSNorm of q and k before they are rotated: each head, or all heads at once. None: no norm."""
    attention_output_bias: ClassVar[bool] = True
    """True if the output projection has a bias where Q, K and V have one."""
    gated: ClassVar[bool] = False
    """True if the MLP is `down(act(gate(x)) · up(x))`, false if it is `down(act(up(x)))`."""
    learned_positions: ClassVar[bool] = False
    """True if positions are a table of embeddings, added to those of the tokens."""
    fused_query_key_value: ClassVar[bool] = False
    """True if Q, K and V are one canonical tensor."""
    interleaved_heads: ClassVar[bool] = False
    """True if that tensor is ordered by head: Q, K and V of the first head, then those of the second, and so forth."""
    causal: ClassVar[bool] = True
    """True if a token attends only to itself and those before it."""
    embedding_norm: ClassVar[bool] = False
    """True if the sum of the embeddings is normalised before the first block."""
    head_transform: ClassVar[bool] = False
    """True if the head computes `norm(act(dense(x)))` before the product with the vocabulary's matrix."""
    expert_names: ClassVar[ExpertNames] = ExpertNames()
    """Names of weights in blocks with experts."""
    objectives: ClassVar[tuple[Objective, ...]] = ("lm",)
    """The losses, each a mean over its own count: next token (`lm`), masked tokens (`mlm`), next sentence (`nsp`)."""

    # Each is a key in some families and a fact in others. A real property here would be shadowed by a family's key,
    # which pydantic does not allow.
    if TYPE_CHECKING:

        @property
        def num_key_value_heads(self) -> int: ...

        @property
        def head_dim(self) -> int: ...

        @property
        def attention_bias(self) -> bool: ...

        @property
        def mlp_bias(self) -> bool: ...

    _origin: Origin = PrivateAttr(default=Origin())

    family: str = Field(description="the architecture")
    vocab_size: int = Field(gt=0, description="rows of the embedding and of the output head")
    hidden_size: int = Field(gt=0, description="width of the residual stream")
    intermediate_size: int = Field(gt=0, description="width of the feed-forward layer")
    num_hidden_layers: int = Field(gt=0, le=MOST_LAYERS, description="number of transformer blocks")
    num_attention_heads: int = Field(gt=0, description="query heads")
    max_position_embeddings: Longest
    initializer_range: float = Field(default=0.02, gt=0, description="standard deviation of initial weights")
    tie_word_embeddings: Tied
    ignore: tuple[str, ...] = Field(
        default=(),
        strict=False,
        examples=[["training_notes"]],
        description="fields of a Hugging Face config.json to leave out, because they do not change what the "
        "model computes; fields that are known to change it are refused",
    )

    @property
    def origin(self) -> Origin:
        """The sources of the keys."""
        return self._origin

    def came_from(self, origin: Origin) -> None:
        """Note, once, the sources of the keys. They are no part of the configuration and are not recorded with it."""
        self._origin = origin

    # Before pydantic looks at the keys, which would refuse a second spelling as unknown.
    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, data: Any) -> Any:
        """Give each key its own name, leave out null where it means the default, and rename an old `type` of RoPE."""
        if not isinstance(data, dict):
            return data
        reject(
            [
                f"model.{alias} ({data[alias]!r}) and model.{key} ({data[key]!r}) are one quantity: give one of them"
                for alias, key in cls.aliases.items()
                if alias in data and key in data and data[alias] != data[key]
            ]
        )
        named = {cls.aliases.get(key, key): value for key, value in data.items()}
        given = {key: value for key, value in named.items() if key not in cls.derived or value is not None}
        scaling = given.get("rope_scaling")
        if isinstance(scaling, dict):
            given["rope_scaling"] = scaling_with_one_type(scaling)
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        reject(self._problems())
        return self

    def _problems(self) -> list[str]:
        scaling = getattr(self, "rope_scaling", None)
        return [] if scaling is None else rope_scaling_problems(scaling, self.rotary_dim)

    @property
    def norms_input(self) -> bool:
        """True if attention and MLP have a norm before them."""
        return self.norm_place in ("input", "both")

    @property
    def norms_output(self) -> bool:
        """True if the outputs of attention and MLP are normalised before they are added to x."""
        return self.norm_place in ("output", "both")

    @property
    def embedding_scale(self) -> float:
        """Factor on the embedding of a token."""
        return 1.0

    @property
    def attention_scale(self) -> float | None:
        """Factor on the scores of attention; None: 1 / √head_dim."""
        return None

    @property
    def window_rope_theta(self) -> float | None:
        """Base of the rotary frequencies of blocks with a window, which are not scaled; None: that of all blocks."""
        return None

    @property
    def predicts_masked_tokens(self) -> bool:
        """True if masked tokens are predicted, in place of the next token at every position."""
        return "mlm" in self.objectives

    @property
    def predicts_sentences(self) -> bool:
        """True if samples are pairs of sentences, and the model says whether the second follows the first."""
        return "nsp" in self.objectives

    @property
    def parallel_residual(self) -> bool:
        """True if attention and MLP read the same x."""
        return False

    @property
    def token_types(self) -> int:
        """Rows of the embedding of token types; 0 where tokens have no types."""
        return 0

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions of each head that rotary embeddings turn; 0 where positions are learned."""
        return 0

    def rotates(self, layer: int) -> bool:
        """Return whether rotary embeddings turn the heads of this block."""
        return self.rotary_dim > 0

    def window(self, layer: int) -> int | None:
        """Return the number of keys that a query of this block sees, its own included; None: all."""
        return None

    def kind_of_block(self, layer: int) -> Hashable:
        """Return the facts in which blocks of a model differ: those with equal ones compute alike."""
        return self.rotates(layer), self.window(layer), self.routing(layer)

    def routing(self, layer: int) -> Routing | None:
        """Return the rule of this block's router, the same in all sparse blocks of a model; None: it is dense."""
        return None

    @property
    def routings(self) -> dict[int, Routing]:
        """The rules of the blocks with experts, by their numbers."""
        rules = enumerate(map(self.routing, range(self.num_hidden_layers)))
        return {layer: rule for layer, rule in rules if rule is not None}

    @property
    def any_routing(self) -> Routing | None:
        """The rule of the blocks with experts; None: there are none."""
        if type(self).routing is FamilyConfig.routing:
            return None
        return next(filter(None, map(self.routing, range(self.num_hidden_layers))), None)

    @property
    def is_sparse(self) -> bool:
        """True if some blocks multiply a token with a part of their weights alone."""
        return self.any_routing is not None

    @property
    def expert_width(self) -> int:
        """Width of an expert, in blocks with experts."""
        return self.intermediate_size

    @property
    def shared_expert_width(self) -> int:
        """Width of the expert that all tokens use, in blocks with experts; 0: there is none."""
        return 0

    def in_miniature(self, width: int, alike: Callable[[int, int], int]) -> dict[str, int]:
        """Return the sizes of keys that few families have, in a small model whose MLPs have this width.

        alike: takes a size and the least one, and returns a size that the same degrees divide.
        """
        return {}

    @property
    def extends_positions(self) -> bool:
        """True if `rope_scaling` stretches the rotary embedding beyond `max_position_embeddings`."""
        scaling = getattr(self, "rope_scaling", None)
        return scaling is not None and scaling["rope_type"] != "default"

    @property
    def activation(self) -> Activation:
        """The function between the matrices of the MLP."""
        return _ACTIVATIONS[getattr(self, self.keys["activation"])]

    @property
    def norm_eps(self) -> float:
        """Number that a norm adds to the variance (LayerNorm) or to the mean square (RMSNorm)."""
        return float(getattr(self, self.keys["norm_eps"]))

    @property
    def embedding_dropout_p(self) -> float:
        """Dropout of the first block's input."""
        return self._dropout("embedding_dropout")

    @property
    def hidden_dropout_p(self) -> float:
        """Dropout of the outputs of attention and MLP, before they are added to the residual stream."""
        return self._dropout("hidden_dropout")

    @property
    def attention_dropout_p(self) -> float:
        """Dropout of the attention probabilities."""
        return self._dropout("attention_dropout")

    @property
    def ffn_dropout_p(self) -> float:
        """Dropout between the activation of the MLP and its second matrix."""
        return self._dropout("ffn_dropout")

    def _dropout(self, kind: str) -> float:
        if kind not in self.keys:
            return 0.0
        return float(getattr(self, self.keys[kind]))

    @property
    def has_dropout(self) -> bool:
        """True if training drops anything."""
        return any(self._dropout(kind) for kind in self.keys if kind.endswith("_dropout"))


class _MultiHeadConfig(FamilyConfig):
    """Families whose heads divide the hidden size and have a key and a value each, with biases in every layer."""

    mlp_bias: ClassVar[bool] = True

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def _problems(self) -> list[str]:
        hidden = self.hidden_size
        heads = self.num_attention_heads
        if hidden % heads == 0:
            return super()._problems()
        near = nearest_numbers(heads, divisors(hidden))
        return [
            f"model.hidden_size ({hidden}) must be a multiple of model.num_attention_heads ({heads}): "
            f"nearest {listing(near, 'or')} heads"
        ]


_SIZES_OF_BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_SPELLINGS_OF_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


class GPTConfig(_MultiHeadConfig):
    """GPT-2 and GPT-3: learned positions, LayerNorm before each layer, biases, a tied or untied output head.

    GPT-2's own spellings are read too: n_embd, n_inner, n_layer, n_head, n_positions, layer_norm_eps, hidden_act.
    """

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "gpt2",
        "GPT2LMHeadModel",
        defaults=_SIZES_OF_BERT | {"vocab_size": 50257},
        names=_SPELLINGS_OF_GPT2 | {"intermediate_size": "n_inner"},
        spellings=_SPELLINGS_OF_GPT2 | {"n_ctx": "n_positions"},
        only={"reorder_and_upcast_attn": False, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
        null_if_derived=("intermediate_size",),
        twice={"n_positions": "n_ctx"},  # llama.cpp's converter reads no other name
    )
    # OpenAI's weights on the hub have no prefix, and each layer's causal mask.
    weight_names: ClassVar[WeightNames] = WeightNames(
        base="transformer.",
        heads=("lm_head.",),
        buffers=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
        tied={"lm_head.weight": "transformer.wte.weight"},
    )

    learned_positions: ClassVar[bool] = True
    fused_query_key_value: ClassVar[bool] = True
    attention_bias: ClassVar[bool] = True

    aliases: ClassVar[dict[str, str]] = {
        **{spelling: key for key, spelling in _SPELLINGS_OF_GPT2.items()},
        "n_inner": "intermediate_size",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    }
    derived: ClassVar[tuple[str, ...]] = ("intermediate_size",)
    keys: ClassVar[dict[str, str]] = {
        "activation": "activation_function", "norm_eps": "layer_norm_epsilon", "embedding_dropout": "embd_pdrop",
        "hidden_dropout": "resid_pdrop", "attention_dropout": "attn_pdrop", "ffn_dropout": "ffn_dropout",
    }  # fmt: skip

    family: Literal["gpt"] = Field(description="the architecture")
    # Before version 2.13, pydantic calls a factory even where hidden_size was refused: it must not fail then.
    intermediate_size: int = Field(
        default_factory=lambda data: 4 * data.get("hidden_size", 1),
        gt=0,
        description="width of the feed-forward layer; default: 4 × hidden_size",
    )
    max_position_embeddings: _LearnedPositions = 1024
    tie_word_embeddings: Tied = True
    activation_function: GELUName = Field(
        default="gelu_new", description=f"activation of the feed-forward layer: {_GELUS}"
    )
    layer_norm_epsilon: _NormEpsilon = 1e-5
    embd_pdrop: float = Field(default=0.1, ge=0, lt=1, description="dropout of the embeddings")
    resid_pdrop: float = Field(default=0.1, ge=0, lt=1, description="dropout of the outputs of attention and MLP")
    attn_pdrop: ProbabilityDropout = 0.1
    ffn_dropout: _FeedForwardDropout = 0.0


class GPTNeoXConfig(_MultiHeadConfig):
    """GPT-NeoX and Pythia: partly rotary heads, attention and feed-forward layer in parallel, biases.

    Older Hugging Face files call rope_theta rotary_emb_base; this name is read too.
    """

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        defaults=default_sizes(50432, width=6144, inner_width=24576, layers=44, heads=64),
        # GPT-NeoX 20B's file has BERT's names of the dropouts too, which Hugging Face does not read.
        only={"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
        rotary_fields=("rotary_emb_base", "rotary_pct"),
    )
    # transformers 5 names the head lm_head in memory, and embed_out in files as version 4 does.
    weight_names: ClassVar[WeightNames] = WeightNames(
        base="gpt_neox.",
        heads=("embed_out.", "lm_head."),
        renamed=((r"^lm_head\.", "embed_out."),),
        buffers=r"gpt_neox\.(layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|rotary_emb\.inv_freq)",
        tied={"embed_out.weight": "gpt_neox.embed_in.weight"},
    )

    fused_query_key_value: ClassVar[bool] = True
    interleaved_heads: ClassVar[bool] = True

    aliases: ClassVar[dict[str, str]] = {"rotary_emb_base": "rope_theta"}
    keys: ClassVar[dict[str, str]] = {
        "activation": "hidden_act",
        "norm_eps": "layer_norm_eps",
        # One key of Hugging Face's for both places.
        "embedding_dropout": "hidden_dropout",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "ffn_dropout": "ffn_dropout",
    }

    family: Literal["gpt_neox"] = Field(description="the architecture")
    max_position_embeddings: Longest = 2048
    tie_word_embeddings: Tied = False
    hidden_act: GELUName = Field(default="gelu", description=f"activation of the feed-forward layer: {_GELUS}")
    layer_norm_eps: _NormEpsilon = 1e-5
    rotary_pct: float = Field(
        default=0.25, gt=0, le=1, description="fraction of each head's dimensions, the first ones, that are rotary"
    )
    rope_theta: RotaryBase = 10000.0
    rope_scaling: RopeScaling = None
    use_parallel_residual: bool = Field(
        default=True,
        description="attention and MLP read the same input, and both outputs are added to it; false = MLP reads the "
        "result of attention",
    )
    attention_bias: AttentionBias = True
    hidden_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="dropout of the embeddings and of the outputs of attention and MLP"
    )
    attention_dropout: ProbabilityDropout = 0.0
    ffn_dropout: _FeedForwardDropout = 0.0

    def _problems(self) -> list[str]:
        # Heads that do not divide the hidden size have no width, so that nothing can be said of the rotary part.
        if self.hidden_size % self.num_attention_heads or (self.rotary_dim and self.rotary_dim % 2 == 0):
            return super()._problems()
        return [
            f"model.rotary_pct ({self.rotary_pct}) × head width ({self.head_dim}) = {self.rotary_dim} must be "
            "even and at least 2: rotary embeddings turn pairs"
        ]

    @property
    def parallel_residual(self) -> bool:
        return self.use_parallel_residual

    @property
    def rotary_dim(self) -> int:
        # Rounded down, as in transformers.
        return int(self.head_dim * self.rotary_pct)


class BertConfig(_MultiHeadConfig):
    """BERT: LayerNorm after each layer, token types, padding mask, masked-token and next-sentence heads."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "bert",
        "BertForPreTraining",
        defaults=_SIZES_OF_BERT | {"vocab_size": 30522, "intermediate_size": 3072},
        only={"is_decoder": False, "position_embedding_type": "absolute", "tie_word_embeddings": True},
        # Google's multilingual and Chinese files have these; Hugging Face's pooler has none of them.
        inert=frozenset(
            {"directionality", "pooler_type"}
            | {f"pooler_{size}" for size in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head")}
        ),
    )
    # Google's weights were TensorFlow's: gamma and beta. The decoder is the word embedding, and its bias the head's.
    weight_names: ClassVar[WeightNames] = WeightNames(
        base="bert.",
        heads=("cls.",),
        renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
        buffers=r"bert\.embeddings\.(position_ids|token_type_ids)",
        tied={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
    )

    norm_place: ClassVar[NormPlace] = "sum"
    learned_positions: ClassVar[bool] = True
    attention_bias: ClassVar[bool] = True
    causal: ClassVar[bool] = False
    embedding_norm: ClassVar[bool] = True
    head_transform: ClassVar[bool] = True
    objectives: ClassVar[tuple[Objective, ...]] = ("mlm", "nsp")

    keys: ClassVar[dict[str, str]] = {
        "activation": "hidden_act", "norm_eps": "layer_norm_eps", "embedding_dropout": "hidden_dropout_prob",
        "hidden_dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob",
    }  # fmt: skip

    family: Literal["bert"] = Field(description="the architecture")
    max_position_embeddings: _LearnedPositions = 512
    tie_word_embeddings: Literal[True] = Field(default=True, description="the masked-token head shares the embedding")
    type_vocab_size: int = Field(default=2, gt=0, description="token types: first and second sentence")
    pad_token_id: int = Field(
        default=0,
        ge=0,
        description="id of the padding token, whose embedding gets gradients only through the output head",
    )
    hidden_act: GELUName = Field(
        default="gelu", description=f"activation of the feed-forward layer and of the head: {_GELUS}"
    )
    layer_norm_eps: _NormEpsilon = 1e-12
    hidden_dropout_prob: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="dropout of the embeddings and of the outputs of attention and feed-forward layer",
    )
    attention_probs_dropout_prob: ProbabilityDropout = 0.1

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.pad_token_id >= self.vocab_size:
            problems.append(
                f"model.pad_token_id ({self.pad_token_id}) must be less than model.vocab_size ({self.vocab_size})"
            )
        if self.type_vocab_size < 2:
            problems.append(f"model.type_vocab_size ({self.type_vocab_size}) must be at least 2: samples are pairs")
        return problems

    @property
    def token_types(self) -> int:
        return self.type_vocab_size
