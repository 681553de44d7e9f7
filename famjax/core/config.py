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
    # false: norms stand behind the residual sums, and there is no final one (Vaswani et al., 2017)
    pre_norm: bool = True
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
class FeedbackConfig:
    """Feedback Transformer (arXiv 2002.09402), and the Transformer of the same parts."""

    # tokens whose memory a token attends to, itself not included (tau, 3.1)
    span: int = 128
    # what a token's memory is made of (Equation 1; v1 5.1): its states before, between and behind
    # the layers, weighted by a softmax that is learned or equal; the last; the one behind `layer`
    # layers; of each layer, those up to its own output (as in an RNN), or its input (Transformer)
    composition: Literal["all", "average", "top", "layer", "same_and_lower", "previous"] = "all"
    # 0 is the embedding
    layer: int = 0
    # one projection to keys and values for all layers (3.3)
    shared_kv: bool = True
    # what is carried: keys and values, or the memory that they are made from anew at every call,
    # which is less to store and more to compute (v1 5.3)
    cache: Literal["keys_values", "memory"] = "keys_values"
    # learned: a vector for each distance is added to the keys, the same for all heads and layers
    positions: Literal["learned", "rotary"] = "learned"
    # each head learns how far it sees (Sukhbaatar et al., 2019)
    adaptive_span: bool = False
    # tokens over which a head's sight fades
    span_ramp: int = 32
    # share of `span` that heads see at first
    span_start: float = 0.0
    # a loss of this times the mean span of the heads, summed over layers
    span_loss: float = 0.0
    # training alone: sweeps over all tokens at once that approach the memory, and the relative
    # change of the last sweep beyond which the exact loop is taken; 0 sweeps: always the loop
    sweeps: int = 0
    tolerance: float = 0.1


@dataclass(frozen=True)
class LinearConfig:
    """Normalised linear attention (T2R, arXiv 2103.13076), of layers whose mixer is `linear`."""

    # phi, one for a head's queries and its keys. Learned are relu, and learned_elu (1 + elu), cos
    # and tanh of W x + b. Without W: 1 + elu(x), sines and cosines of random products over a
    # learned temperature (Peng et al., 2021), positive ones of orthogonal vectors (Performer)
    map: Literal["relu", "learned_elu", "cos", "tanh", "elu", "rfa", "performer"] = "relu"
    # k, elements of phi(x), even for rfa; elu has head_dim, whatever stands here
    features: int = 32
    # queries and keys are rotated before phi, as far as model.arch rotates any
    rope: bool = True
    # tokens that a call reads at once, all pairs of them; between chunks goes the state. The same
    # numbers for any, but for rounding
    chunk: int = 32


@dataclass(frozen=True)
class DropoutConfig:
    """Shares that are dropped in training (FT3 7.6, 4.2.1); for all stacks but lstm."""

    # of attention weights; layers of linear attention have none
    attention: float = 0.0
    # of the feed-forward's hidden units
    hidden: float = 0.0
    # of what attention and feed-forward give, before it is added (Vaswani et al., 2017)
    residual: float = 0.0
    # of what the embedding gives, learned positions with it
    embedding: float = 0.0
    # of what the last layer gives
    output: float = 0.0
    # of layers, each as a whole (LayerDrop)
    layer: float = 0.0


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
    # what layers stand in: on one residual stream, each with a mixer; with feedback memory; the
    # Transformer of the same parts; an LSTM
    stack: Literal["residual", "feedback", "transformer", "lstm"] = "residual"
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
    mlp: Literal["relu", "gelu", "gelu_exact", "swiglu", "geglu"] = "swiglu"
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
    # what backward computes again. none: what is cheap; attention: each layer but what attention
    # gave, one block at a time; layer: each layer; block: each layer, one block at a time
    remat: Literal["none", "attention", "layer", "block"] = "none"
    # compute type; parameters and optimizer are float32
    dtype: Literal["float32", "bfloat16"] = "float32"
    linear: LinearConfig = field(default_factory=LinearConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    dropout: DropoutConfig = field(default_factory=DropoutConfig)
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
class ToyConfig:
    """The toy tasks of the Feedback Transformer (v3 4.1, 7.1, 7.4; v1 B.1): docs/tasks.md."""

    # training episodes, the same ones in every epoch, in another order
    episodes: int = 10_000
    # of an episode: actions of a walk, digits to copy or reverse, the most A's to count, statements
    # of a program; 0 = the paper's: 100, 40, 50, 100
    steps: int = 0
    # training episodes have so many at first; they double each time the accuracy over a logging
    # interval reaches `threshold`; 0 = `steps` from the beginning
    start_steps: int = 0
    threshold: float = 0.9
    # the same in evaluation; 0 = the paper's: 400 digits, all else as in training
    test_steps: int = 0
    # random_walk: cells along each side of the grid
    size: int = 8
    # algorithmic: variables of a program, at most 5
    variables: int = 3
    # a document is an epoch of the lane's episodes, one behind the other, and the memory goes on
    # through them; otherwise every episode is a document
    concatenate: bool = True


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they are laid into batches."""

    # what documents are: text, generated passkey retrieval, or a toy task (data.toy)
    task: Literal[
        "text",
        "passkey",
        "random_walk",
        "blocked_walk",
        "copy",
        "reverse",
        "counting",
        "algorithmic",
    ] = "text"
    # text: file, folder or glob, several separated by commas; none at all: Python's own library.
    # .jsonl: a document on each line, {"text": ...}, {"inputs": ..., "targets": ...},
    # {"prompt": ..., "response": ...} or {"messages": [{"role": ..., "content": ...}, ...]}
    files: str = ""
    # text: name of a seqio task or mixture (needs the extra seqio)
    seqio: str = ""
    # text: name of a TFDS set, "name/config:version" (needs the extra seqio)
    tfds: str = ""
    # feature of the seqio or TFDS examples that holds the text; seqio tokens: "targets"
    feature: str = "text"
    # "bytes", "task" (the words of a toy task), the path of a SentencePiece model, of a
    # tokenizer.json or of a list of words (.txt), or a folder with one of them
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
    toy: ToyConfig = field(default_factory=ToyConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    # nag is gradient descent with Nesterov's momentum, which beta1 is
    name: Literal["adamw", "adafactor", "nag"] = "adamw"
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
    """How long, which parameters, how gradients are truncated, what is logged and kept."""

    steps: int = 1000
    # what is trained: everything (with adapters: those and what is new beside them), the feature
    # maps of linear layers alone, or all but them (T2R 2.2, note 5); the rest stays as it is in
    # `init`, and is in no checkpoint
    only: Literal["all", "maps", "not_maps"] = "all"
    # a first stage, of train.only=maps: the maps of linear layers learn to give, layer by layer,
    # what softmax attention of the same weights gives; the layers above read what that gave
    match: bool = False
    # rows of a batch are cut into so many parts whose gradients are added up
    accumulate: int = 1
    # a step's tokens are read as so many segments, each rematerialised; the gradient flows through
    # all of them and is cut at the step's start (truncated BPTT)
    bptt_segments: int = 1
    # lanes: a step reads so many tokens of a row at first, of as many more rows: every step has
    # data.batch * data.length tokens. It doubles until it is data.length, and half of the lanes end
    # each time (Feedback Transformer, arXiv 2002.09402v1, 3.2). 0 = data.length from the start
    bptt_start: int = 0
    # steps after which it doubles; the paper: 50,000 from 32 to 256
    bptt_double_every: int = 0
    # probability of starting a packed row from the last step's memory (B.2.3); 0 = off
    rsp: float = 0.0
    # steps over which that probability rises linearly from 0
    rsp_ramp: int = 0
    # random position offset (B.2.2): each row's positions begin at a number drawn at every step,
    # uniform up to the longest wavelength, half of the time 0. Relative positions do not see it
    rpo: bool = False
    log_every: int = 10
    checkpoint_every: int = 200
    # checkpoints kept; the newest good one is used on resume
    keep: int = 2


# of a mesh
AXES = ("data", "fsdp", "tensor", "sequence")


@dataclass(frozen=True)
class ProfileConfig:
    """What is written to RUN/profile; it changes nothing of the run."""

    # "A:B": a trace of what device and host do from when A steps are done until B are, for XProf,
    # TensorBoard and Perfetto
    steps: str = ""
    # after so many steps, which arrays the devices hold, for pprof; 0 = never
    memory: int = 0


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis. -1 takes what the others leave.

    Several that are -1 are chosen by the devices, the model and the batch (`famjax.core.mesh`);
    `mesh=auto` is -1 for all.
    """

    # devices that divide the rows of a batch; -1: as many as the other axes leave, and of several
    # -1 what suits the model and the batch. mesh=auto: all four are
    data: int = -1
    # ... rows, and with them parameters, gradients and the optimizer's state
    fsdp: int = 1
    # ... heads, the feed-forward's hidden units and the vocabulary
    tensor: int = 1
    # ... the tokens of a call, in whole blocks
    sequence: int = 1


@dataclass(frozen=True)
class Config:
    """Name and seed of a run, and what it begins with."""

    name: str = "run"
    seed: int = 0
    # folder of a run or a converted model to begin with: its shape, tokenizer and weights; what its
    # layers attend to may be another thing (model.mixer=fam)
    init: str = ""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
