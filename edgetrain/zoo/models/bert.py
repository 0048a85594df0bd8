"""BERT-base (Devlin et al. 2019) and BERT-small (Turc et al. 2019) with a head that classifies sequences.

In: WordPiece numbers, int64 [B, T], 0 for padding. Out: class scores [B, classes], read off the first token.

    bert_small     4 layers of 512,  8 attention heads, 2048 inner units
    bert_base     12 layers of 768, 12 attention heads, 3072 inner units

Both have 30,522 word pieces (the uncased ones), 512 positions and 2 segments (only the first is used). Padding
is masked out of the attention, from the zeros in the input itself. A tenth is dropped out of the embeddings,
the attention, the output of each block and the pooled vector. Parameter names are those of Hugging Face's
BertForSequenceClassification: its weights load as they are. A file of the pre-trained BERT alone is not one:
it has the heads of pre-training instead of a classifier.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width, scaled

VOCABULARY = 30522
POSITIONS = 512
SEGMENTS = 2
HEAD_SIZE = 64
PADDING = 0
DROPOUT = 0.1
EPSILON = 1e-12


class Embeddings(nn.Module):
    """Word, position and segment embeddings, summed and normalised."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, hidden)
        self.position_embeddings = nn.Embedding(POSITIONS, hidden)
        self.token_type_embeddings = nn.Embedding(SEGMENTS, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=EPSILON)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # Positions are 0, 1, 2, … and the segment is always 0: rows of the tables, no lookup needed.
        places = self.position_embeddings.weight[: tokens.shape[1]] + self.token_type_embeddings.weight[0]
        out: torch.Tensor = self.dropout(self.LayerNorm(self.word_embeddings(tokens) + places))
        return out


class SelfAttention(nn.Module):
    """Scaled dot-product attention in heads of 64."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        query, key, value = (_split_heads(layer(x)) for layer in (self.query, self.key, self.value))
        dropout = DROPOUT if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout)
        return out.transpose(1, 2).flatten(2)


def _split_heads(x: torch.Tensor) -> torch.Tensor:
    """[B, T, heads × 64] → [B, heads, T, 64]."""
    return x.reshape(*x.shape[:2], -1, HEAD_SIZE).transpose(1, 2)


class Projection(nn.Module):
    """A dense layer whose output is added to the input of its block, then normalised."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=EPSILON)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.LayerNorm(self.dropout(self.dense(x)) + residual)
        return out


class Attention(nn.Module):
    """Self-attention and its projection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.self = SelfAttention(hidden)
        self.output = Projection(hidden, hidden)

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.output(self.self(x, visible), x)
        return out


class Intermediate(nn.Module):
    """The widening half of the feed-forward block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.dense(x))


class Layer(nn.Module):
    """Attention, then the feed-forward block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(hidden)
        self.intermediate = Intermediate(hidden)
        self.output = Projection(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        attended = self.attention(x, visible)
        out: torch.Tensor = self.output(self.intermediate(attended), attended)
        return out


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Layer(hidden) for _ in range(layers)])

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x, visible)
        return x


class Pooler(nn.Module):
    """A dense layer and tanh on the first token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(x[:, 0]))


class Bert(nn.Module):
    """Tokens to one vector a sequence: embeddings, encoder, pooler."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(hidden)
        self.encoder = Encoder(layers, hidden)
        self.pooler = Pooler(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        visible = (tokens != PADDING)[:, None, None, :]
        out: torch.Tensor = self.pooler(self.encoder(self.embeddings(tokens), visible))
        return out


class BertClassifier(nn.Module):
    """`bert`, dropout and one dense layer."""

    def __init__(self, *, classes: int, layers: int, hidden: int) -> None:
        super().__init__()
        self.bert = Bert(layers, hidden)
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(hidden, classes)
        self.apply(_initialise)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.dropout(self.bert(tokens)))
        return scores


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, 0.0, 0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _build(name: str, layers: int, heads: int, *, classes: int, input_size: int, width: float) -> nn.Module:
    check_classes(name, classes)
    check_size(name, input_size, smallest=1, largest=POSITIONS)
    check_width(name, width)
    return BertClassifier(classes=classes, layers=layers, hidden=HEAD_SIZE * scaled(heads, width))


def bert_small(*, classes: int = 2, input_size: int = 128, width: float = 1.0) -> nn.Module:
    """BERT-small for sequences of up to 512 tokens; `width` scales the number of heads, each of 64.

    `input_size` is the length of the sequences. It changes the work of a step, not the network.
    """
    return _build("bert_small", 4, 8, classes=classes, input_size=input_size, width=width)


def bert_base(*, classes: int = 2, input_size: int = 128, width: float = 1.0) -> nn.Module:
    """BERT-base for sequences of up to 512 tokens; `input_size` and `width` as in `bert_small`."""
    return _build("bert_base", 12, 12, classes=classes, input_size=input_size, width=width)
