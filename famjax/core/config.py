"""The one schema of an experiment: frozen nested dataclasses, a comment for every field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ArchConfig:
    """What pretrained families do each in their own way; the defaults are famjax's."""

    # added to the mean square under a norm's root
    norm_eps: float = 1e-6
    # an RMSNorm multiplies by 1 + its scale (Gemma)
    norm_plus_one: bool = False
    # what attention and feed-forward give is normed before it is added (Gemma 2, 3)
    post_norm: bool = False
    # each head's query and key are normed before they are rotated (Qwen 3, Gemma 3)
    qk_norm: bool = False
    # scores are divided by the root of it; 0 = head_dim
    query_scale: float = 0.0
    # scores s become cap * tanh(s / cap); 0 leaves them (Gemma 2)
    attention_cap: float = 0.0
    # the same for logits
    logit_cap: float = 0.0
    # attention and feed-forward both read the layer's input (GPT-NeoX)
    parallel: bool = False
    # a learned vector for each of `model.capacity` positions of a document is added to its token,
    # beyond them from the first again (GPT-2)
    learned_positions: bool = False
    # rows of the embedding are multiplied by it; 0 = the root of width
    embed_scale: float = 0.0
    # biases of queries, keys and values (Qwen 2)
    qkv_bias: bool = False
    # a bias behind the attention's output projection
    out_bias: bool = False
    # biases of the feed-forward
    mlp_bias: bool = False
    # share of each head's elements that is rotated, the first (GPT-NeoX); 0 rotates none (GPT-2)
    rotary_fraction: float = 1.0
    # rope_base of swa layers, where it differs; frequencies not stretched there; 0 = the same for
    # all layers (Gemma 3)
    local_rope_base: float = 0.0
    # how frequencies were stretched for longer texts: all by a factor, or the low ones (Llama 3)
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    # by how much
    rope_factor: float = 1.0
    # llama3: wavelengths over rope_length / this are stretched whole
    rope_low: float = 1.0
    # ... those under rope_length / this not at all
    rope_high: float = 4.0
    # ... tokens of the texts before stretching
    rope_length: int = 8192


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters beside frozen weights; the FAM prompt is trained with them."""

    # r; 0 has no adapters and trains everything
    rank: int = 0
    # what the adapters give is multiplied by alpha / rank; 0 = rank
    alpha: float = 0.0
    # ... by alpha / sqrt(rank) (rsLoRA)
    rs: bool = False
    # share of what the adapters read that is dropped in training
    dropout: float = 0.0
    # which maps have them: patterns of attention.q, .k, .v, .out, mlp.gate, .up, .down
    on: str = "attention.*,mlp.*"
    # type in which the frozen weights are kept
    base: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class AdaptiveConfig:
    """Adaptive input and softmax, for vocabularies of words sorted by falling frequency.

    `model.tied` then shares the tables, and the projections of all clusters but the first.
    """

    # first words of the rarer clusters, "20000,60000"; none: one embedding and one softmax
    cutoffs: str = ""
    # cluster i has vectors of width / factor^i
    factor: int = 4


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only language model. Letters: see `famjax.core.types`."""

    # 0 takes the tokenizer's size; any other number must be at least that
    vocab_size: int = 0
    layers: int = 4
    # d, the width of the residual stream
    width: int = 256
    heads: int = 4
    # g: equal to heads is multi-head, 1 is multi-query (A.1), between is grouped-query; 0 = heads
    kv_heads: int = 0
    # e; 0 = width / heads
    head_dim: int = 0
    # hidden width of the feed-forward; 0 = 4 * width
    mlp_width: int = 0
    # gelu and geglu take the tanh approximation, gelu_exact the error function
    mlp: Literal["gelu", "gelu_exact", "swiglu", "geglu"] = "swiglu"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    # the head shares the embedding table
    tied: bool = True
    rope_base: float = 10_000.0
    # a mixer's name, or a comma-separated pattern repeated up the stack ("bswa,bswa,fam")
    mixer: str = "fam"
    # w, tokens in a block (2.1)
    block_len: int = 128
    # m, memory segments of bswa, bswa_sg and fam (2.1)
    memory_segments: int = 1
    # tokens a query of swa sees, itself included
    window: int = 128
    # tokens the cache of full attention holds
    capacity: int = 4096
    # f, FAM length (3.4.1)
    fam_len: int = 16
    # p, previous FAMs a block attends to (3.4.2)
    fam_previous: int = 1
    # one compiled layer for all repeats of the pattern; the same numbers either way
    scan_layers: bool = True
    # what backward recomputes: what is cheap, each layer, or each block's attention within each
    remat: Literal["none", "layer", "block"] = "none"
    # compute type; parameters and optimizer are float32
    dtype: Literal["float32", "bfloat16"] = "float32"
    arch: ArchConfig = field(default_factory=ArchConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)


@dataclass(frozen=True)
class PasskeyConfig:
    """Passkey retrieval (TransformerFAM 3.2, D.1): needle, filler, question, answer."""

    digits: int = 5
    # documents have min_length tokens to today's longest, uniform, needle and question included
    min_length: int = 96
    # ... rounded up to a multiple of this; with model.block_len every document ends with a block,
    # so that no question is cut in two by a block's end
    multiple: int = 1
    # the longest is this at first; it doubles, up to max_length, each time the answers' token
    # accuracy over a logging interval reaches `threshold`
    start_length: int = 96
    max_length: int = 4096
    threshold: float = 0.97
    # the question is asked each time so many tokens have been read: what follows begins with the
    # memory that stood before the block of the question. 0 asks at the end only
    ask_every: int = 0
    # weight of the tokens that are not the answer
    other_weight: float = 0.02


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they are laid into batches."""

    # what documents are: text, or generated passkey retrieval
    task: Literal["text", "passkey"] = "text"
    # text: file, folder or glob, several separated by commas; none at all: Python's own library.
    # .jsonl: a document on each line, {"text": ...}, {"inputs": ..., "targets": ...},
    # {"prompt": ..., "response": ...} or {"messages": [{"role": ..., "content": ...}, ...]}
    files: str = ""
    # text: name of a seqio task or mixture (needs famjax[seqio])
    seqio: str = ""
    # text: name of a TFDS set, "name/config:version" (needs famjax[seqio])
    tfds: str = ""
    # feature of the seqio or TFDS examples that holds the text; seqio tokens: "targets"
    feature: str = "text"
    # "bytes", the path of a SentencePiece model or of a tokenizer.json, or a folder with either
    tokenizer: str = "bytes"
    # lanes: rows follow documents, memory carried between steps; packed: rows are independent
    layout: Literal["lanes", "packed"] = "lanes"
    # b, rows of a batch
    batch: int = 8
    # t, tokens of a row in a step; a multiple of model.block_len
    length: int = 1024
    # lanes: a document that fits a row waits for the next one rather than be cut by the step's end
    keep_whole: bool = False
    # one document in so many is kept from training, for evaluation; 0 keeps none
    holdout: int = 20
    # packed: tokens of the row repeated at its end after '[repeat random segment]' (3.1.1); 0 none
    repeat_len: int = 0
    # packed: weight of the repeated tokens
    repeat_weight: float = 0.1
    passkey: PasskeyConfig = field(default_factory=PasskeyConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw", "adafactor"] = "adamw"
    learning_rate: float = 3e-3
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 100
    # wsd: last part of the run over which the rate falls linearly to zero
    decay_fraction: float = 0.2
    # cosine: final rate as a fraction of learning_rate
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    # largest global gradient norm; 0 does not clip
    clip_norm: float = 1.0


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    # rows of a batch are cut into so many parts whose gradients are added up
    accumulate: int = 1
    # a step's tokens are read as so many segments, each rematerialised; the gradient flows through
    # all of them and is cut at the step's start (truncated BPTT)
    bptt_segments: int = 1
    # probability of starting a packed row from the last step's memory (B.2.3); 0 = off
    rsp: float = 0.0
    # steps over which that probability rises linearly from 0
    rsp_ramp: int = 0
    # random position offset (B.2.2): uniform up to the longest wavelength, half of the time 0
    rpo: bool = False
    log_every: int = 10
    checkpoint_every: int = 200
    # checkpoints kept; the newest good one is used on resume
    keep: int = 2


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis. -1 for one axis takes what the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Config:
    name: str = "run"
    seed: int = 0
    # folder of a run or a converted model to begin with: its shape, tokenizer and weights; what its
    # layers attend to may be another thing (model.mixer=fam)
    init: str = ""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
