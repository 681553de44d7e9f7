"""The config schema: frozen nested dataclasses with a comment for every field.

The comments are the help texts of `famjax train --help GROUP`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ArchConfig:
    """Architecture details in which pretrained families differ; the defaults are famjax's."""

    # epsilon of norms, added to the mean square
    norm_eps: float = 1e-6
    # an RMSNorm multiplies by 1 + its scale (Gemma)
    norm_plus_one: bool = False
    # norms the outputs of attention and feed-forward before the residual sum (Gemma 2, 3)
    post_norm: bool = False
    # norms each head's query and key before the rotation (Qwen 3, Gemma 3)
    qk_norm: bool = False
    # scores are divided by its square root; 0 = head_dim
    query_scale: float = 0.0
    # soft cap of scores: s becomes cap * tanh(s / cap); 0 = no cap (Gemma 2)
    attention_cap: float = 0.0
    # the same for logits
    logit_cap: float = 0.0
    # false: post-norm, after the residual sums, without a final norm (Vaswani et al., 2017)
    pre_norm: bool = True
    # attention and feed-forward both read the layer's input (GPT-NeoX)
    parallel: bool = False
    # adds a learned vector for each of `model.capacity` positions of a document to its token;
    # later positions wrap around (GPT-2)
    learned_positions: bool = False
    # the embedding is multiplied by it; 0 = the square root of width
    embed_scale: float = 0.0
    # biases of queries, keys and values (Qwen 2)
    qkv_bias: bool = False
    # a bias of the attention's output projection
    out_bias: bool = False
    # biases of the feed-forward
    mlp_bias: bool = False
    # fraction of each head's elements, from the first, that is rotated (GPT-NeoX); 0 = none (GPT-2)
    rotary_fraction: float = 1.0
    # rope_base of swa layers if it differs, without rope_scaling; 0 = the same for all layers
    # (Gemma 3)
    local_rope_base: float = 0.0
    # RoPE frequency scaling for longer texts: all by a factor, or the low ones (Llama 3)
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    # the scaling factor
    rope_factor: float = 1.0
    # llama3: wavelengths above rope_length / this are scaled fully
    rope_low: float = 1.0
    # ... those below rope_length / this not at all
    rope_high: float = 4.0
    # ... the context length before scaling
    rope_length: int = 8192


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of frozen weights.

    Trained with them: the FAM prompt, gates, key blends, delta-rule memories and feature maps; the
    tokens and the norm of rmt's and autocompressor's memories.
    """

    # r; 0 = no adapters, everything is trained
    rank: int = 0
    # the adapters' output is multiplied by alpha / rank; 0 = rank
    alpha: float = 0.0
    # ... by alpha / sqrt(rank) (rsLoRA)
    rs: bool = False
    # dropout rate of the adapters' input
    dropout: float = 0.0
    # which maps have them: patterns of attention.q, .k, .v, .out, mlp.gate, .up, .down
    on: str = "attention.*,mlp.*"
    # dtype of the frozen weights
    base: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class FeedbackConfig:
    """Feedback Transformer (arXiv 2002.09402), and a Transformer with the same components."""

    # previous tokens whose memory a token attends to, excluding itself (tau, 3.1)
    span: int = 128
    # composition of a token's memory (Equation 1; v1 5.1): its states before, between and after the
    # layers, weighted by a learned softmax (all) or equally (average); the last (top); the one
    # after `layer` layers; for each layer, those up to its own output (as in an RNN), or its input
    # (Transformer)
    composition: Literal["all", "average", "top", "layer", "same_and_lower", "previous"] = "all"
    # 0 is the embedding
    layer: int = 0
    # one key and value projection for all layers (3.3)
    shared_kv: bool = True
    # carried state: keys and values, or the memory from which every call recomputes them: less
    # memory, more compute (v1 5.3)
    cache: Literal["keys_values", "memory"] = "keys_values"
    # learned: a vector per distance is added to the keys, shared by all heads and layers
    positions: Literal["learned", "rotary"] = "learned"
    # each head learns its attention span (Sukhbaatar et al., 2019)
    adaptive_span: bool = False
    # tokens over which the soft mask of a span falls from 1 to 0
    span_ramp: int = 32
    # initial span of the heads, as a fraction of `span`
    span_start: float = 0.0
    # weight of a loss on the mean span of the heads, summed over layers
    span_loss: float = 0.0
    # training only: fixed-point sweeps over all tokens in parallel that approximate the memory, and
    # the relative change of the last sweep above which the exact loop is used; 0: always the loop
    sweeps: int = 0
    tolerance: float = 0.1


@dataclass(frozen=True)
class LinearConfig:
    """Normalised linear attention (T2R, arXiv 2103.13076), for layers with the mixer `linear`."""

    # phi, shared by a head's queries and keys. Learned: relu, learned_elu (1 + elu), cos and tanh
    # of W x + b. Without W: elu (1 + elu(x)); rfa, random Fourier features with a learned
    # temperature (Peng et al., 2021); performer, positive orthogonal random features
    map: Literal["relu", "learned_elu", "cos", "tanh", "elu", "rfa", "performer"] = "relu"
    # k, elements of phi(x), even for rfa; ignored by elu, which has head_dim
    features: int = 32
    # rotates queries and keys before phi, by model.arch.rotary_fraction
    rope: bool = True
    # tokens of a chunk, computed as all pairs; the state is carried between chunks. It changes
    # results by rounding only
    chunk: int = 32


@dataclass(frozen=True)
class EncoderConfig:
    """Encoder of a sequence-to-sequence model, and the decoder's attention to its output.

    Its layers attend in both directions; their sizes are those of the decoder's layers.
    """

    # 0 = none: a decoder-only language model
    layers: int = 0
    # the decoder's attention to the encoder's output. linear: normalised linear attention with the
    # map model.linear.map (T2R 3.2.2)
    cross: Literal["softmax", "linear"] = "softmax"
    # linear: k, features of a query or a key
    features: int = 32
    # source and target share one embedding table
    shared: bool = True


@dataclass(frozen=True)
class DropoutConfig:
    """Dropout rates in training (FT3 7.6, 4.2.1); not of lstm, rmt and autocompressor."""

    # of attention weights; layers of linear attention have none
    attention: float = 0.0
    # of the feed-forward's hidden units
    hidden: float = 0.0
    # of the outputs of attention and feed-forward, before the residual sum (Vaswani et al., 2017)
    residual: float = 0.0
    # of the embedding's output, learned positions included
    embedding: float = 0.0
    # of the last layer's output
    output: float = 0.0
    # of whole layers (LayerDrop)
    layer: float = 0.0


@dataclass(frozen=True)
class AdaptiveConfig:
    """Adaptive input and softmax, for vocabularies of words sorted by descending frequency.

    `model.tied` then shares the tables, and the projections of all clusters but the first.
    """

    # first words of the rarer clusters, "20000,60000"; empty: one embedding and one softmax
    cutoffs: str = ""
    # cluster i has vectors of width / factor^i
    factor: int = 4


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a language model, or of a decoder with its encoder. Letters: `famjax.core.types`."""

    # 0 = the tokenizer's size; any other number must be at least that
    vocab_size: int = 0
    # residual: layers on a residual stream, each with a mixer; feedback: the Feedback Transformer;
    # transformer: a Transformer with the same components; lstm; rmt, autocompressor: a Transformer
    # that reads segments of block_len tokens, and remembers each in fam_len tokens
    stack: Literal["residual", "feedback", "transformer", "lstm", "rmt", "autocompressor"] = (
        "residual"
    )
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
    # gelu and geglu use the tanh approximation, gelu_exact the error function
    mlp: Literal["relu", "gelu", "gelu_exact", "swiglu", "geglu"] = "swiglu"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    # the head shares the embedding table
    tied: bool = True
    rope_base: float = 10_000.0
    # a mixer, or a comma-separated pattern that the stack repeats ("bswa,bswa,fam")
    mixer: str = "fam"
    # w, tokens in a block (2.1), or in a segment of rmt and autocompressor
    block_len: int = 128
    # m, memory segments of bswa, bswa_sg, fam, fm, delta and block_recurrent (2.1)
    memory_segments: int = 1
    # bswa, bswa_sg, fam and delta: keys blended with the key before, so that one layer finds what
    # followed an earlier token (Olsson et al. 2022)
    smeared_keys: bool = False
    # tokens that a query of swa attends to, itself included; block_len is Transformer-XL (B.4.5)
    window: int = 128
    # KV cache size of full attention, in tokens; autocompressor: most tokens of a document
    capacity: int = 4096
    # f, tokens of the memory (3.4.1), as of rmt; autocompressor: summary tokens of a segment;
    # block_recurrent: state vectors
    fam_len: int = 16
    # p, previous FAMs a block attends to (3.4.2)
    fam_previous: int = 1
    # what a block does to the FAM. sum: it is added, as in the paper; gated: each FAM token moves
    # towards it by a learned gate that can close; static: it is what the learned prompt, as a
    # query, finds in the block and the last FAM (C.3)
    fam_update: Literal["sum", "gated", "static"] = "sum"
    # the first FAM of a document. prompt: learned tokens at the embedding, which run through the
    # layers; prefix: learned for each layer (B.1, B.4.4)
    fam_init: Literal["prompt", "prefix"] = "prompt"
    # RoPE positions of the FAM. last: those of the last f tokens of the block that it summarizes;
    # between: fractions between that block and the next; zero: the document's first (B.4.1)
    fam_position: Literal["last", "between", "zero"] = "last"
    # gated: 1 / the initial gates before their threshold, in blocks; log-uniform over the f tokens
    fam_min_timescale: float = 1.5
    fam_max_timescale: float = 64.0
    # delta: features of a key in its memory, times 2 * head_dim (nu of DPFP, Schlag et al. 2021)
    delta_order: int = 2
    # block_recurrent: how states are updated (3.2 of arXiv 2203.07852). fixed: a learned average;
    # lstm: gates that see the block
    recurrent_gate: Literal["fixed", "lstm"] = "fixed"
    # scans over the repeats of the pattern, so that one is compiled; same results either way
    scan_layers: bool = True
    # rematerialisation in the backward pass. none: cheap operations only; attention: each layer
    # but the attention output, one block at a time; layer: each layer; block: each layer, one
    # block at a time
    remat: Literal["none", "attention", "layer", "block"] = "none"
    # compute type; parameters and optimizer are float32
    dtype: Literal["float32", "bfloat16"] = "float32"
    linear: LinearConfig = field(default_factory=LinearConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    dropout: DropoutConfig = field(default_factory=DropoutConfig)
    arch: ArchConfig = field(default_factory=ArchConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)


@dataclass(frozen=True)
class PasskeyConfig:
    """Passkey retrieval (TransformerFAM 3.2, D.1): needle, filler, question, answer."""

    digits: int = 5
    # most keys of a document, up to 8; if more than one, each has a name, and one is asked for.
    # Training documents have 1 to `keys`, as many as the curriculum's longest holds
    keys: int = 1
    # document lengths L have density 1 / L^2 from min_length to the curriculum's current longest,
    # including needle and question, or from what a document with its number of keys takes
    min_length: int = 96
    # ... rounded up to a multiple of this; with model.block_len every document ends at a block
    # boundary, so that no question crosses one
    multiple: int = 1
    # initial longest length; it doubles, up to max_length, each time the answers' token accuracy
    # over a logging interval reaches `threshold`
    start_length: int = 96
    max_length: int = 4096
    threshold: float = 0.97
    # asks the question every so many tokens; the document continues from the memory before the
    # block of the answer. 0 asks at the end only
    ask_every: int = 0
    # most tokens before the needle, uniform; 0 = the needle comes first, as in the paper
    needle_within: int = 0
    # fraction of training keys made of only two or three different digits: in them the digit before
    # does not tell the next one, its index in the key does
    hard_keys: float = 0.0
    # loss weight of the tokens that are not the answer
    other_weight: float = 0.02


@dataclass(frozen=True)
class LongConfig:
    """Training documents of the long tasks (niah_single_1, vt, ...): docs/evaluation.md."""

    # babilong: a task of bAbI, such as qa1_single-supporting-fact_train.txt; qa_1: a JSON file of
    # SQuAD; qa_2: of HotpotQA
    facts: str = ""
    # tokens of a document, bos, question and answer included; each octave has as many tokens
    min_length: int = 512
    max_length: int = 4096
    # loss weight of the tokens that are not the answer
    other_weight: float = 0.02


@dataclass(frozen=True)
class ToyConfig:
    """The toy tasks of the Feedback Transformer (v3 4.1, 7.1, 7.4; v1 B.1): docs/tasks.md."""

    # training episodes, reshuffled in every epoch
    episodes: int = 10_000
    # steps of an episode: actions of a walk, digits to copy or reverse, the most A's to count,
    # statements of a program; 0 = the paper's: 100, 40, 50, 100
    steps: int = 0
    # initial steps of training episodes; they double each time the accuracy over a logging
    # interval reaches `threshold`; 0 = `steps` from the start
    start_steps: int = 0
    threshold: float = 0.9
    # steps in evaluation; 0 = the paper's: 400 digits, otherwise as in training
    test_steps: int = 0
    # random_walk: cells along each side of the grid
    size: int = 8
    # algorithmic: variables of a program, at most 5
    variables: int = 3
    # a document is an epoch of the lane's episodes, concatenated, and the memory is carried through
    # them; false: every episode is a document
    concatenate: bool = True


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they are batched."""

    # source of documents: text, generated passkey retrieval, or a toy task (data.toy): random_walk,
    # blocked_walk, copy, reverse, counting, algorithmic; RULER's niah_single_1, niah_single_2,
    # niah_single_3, niah_multikey_1, niah_multikey_2, niah_multikey_3, niah_multivalue,
    # niah_multiquery, vt, cwe, fwe, qa_1, qa_2; babilong; translate: pairs of a source and a target
    task: str = "text"
    # text: file, folder or glob, several separated by commas; empty: Python's standard library.
    # .jsonl: a document on each line, {"text": ...}, {"inputs": ..., "targets": ...},
    # {"prompt": ..., "response": ...} or {"messages": [{"role": ..., "content": ...}, ...]}
    files: str = ""
    # text: name of a seqio task or mixture (needs the extra seqio)
    seqio: str = ""
    # text: name of a TFDS set, "name/config:version" (needs the extra seqio)
    tfds: str = ""
    # translate: files or globs of sources, one on each line, and of their targets, or features of
    # a set, tfds:SET:SPLIT:FEATURE or seqio:TASK:SPLIT:FEATURE; without targets, .jsonl of inputs
    # and targets
    source: str = ""
    target: str = ""
    # translate: tokens of a row's sources; 0 = data.length, which is that of its targets
    source_length: int = 0
    # feature of the seqio or TFDS examples that holds the text; seqio tokens: "targets"
    feature: str = "text"
    # "bytes", "task" (the words of a toy task), the path of a SentencePiece model, of a
    # tokenizer.json or of a list of words (.txt), or a folder with one of them
    tokenizer: str = "bytes"
    # lanes: each row continues its document across steps (contiguous batching), with memory
    # carried; packed: rows are independent; pairs: a row holds whole pairs of data.task=translate
    layout: Literal["lanes", "packed", "pairs"] = "lanes"
    # b, rows of a batch
    batch: int = 8
    # t, tokens of a row in a step; a multiple of model.block_len
    length: int = 1024
    # lanes: a document that fits a row moves to the next one rather than cross a step boundary
    keep_whole: bool = False
    # passkey: rows of a batch that read text (files, seqio, tfds) instead, so that a finetuned
    # model keeps its language
    text_rows: int = 0
    # loss weight of their tokens, less than 1; an answer of the task has weight 1
    text_weight: float = 0.02
    # text: documents of data.files are cut into parts of about so many bytes, read in random order,
    # each without the memory of the ones before it; 0 = whole documents
    part_bytes: int = 0
    # one document in so many is held out for evaluation; 0 = none
    holdout: int = 20
    # packed: tokens of the row repeated at its end after '[repeat random segment]' (3.1.1); 0 none
    repeat_len: int = 0
    # packed: loss weight of the repeated tokens
    repeat_weight: float = 0.1
    passkey: PasskeyConfig = field(default_factory=PasskeyConfig)
    long: LongConfig = field(default_factory=LongConfig)
    toy: ToyConfig = field(default_factory=ToyConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    # adamw, adafactor, or nag: SGD with Nesterov momentum beta1
    name: str = "adamw"
    learning_rate: float = 3e-3
    # inverse_sqrt falls as sqrt(warmup_steps / step) after the warm-up (Vaswani et al., 2017)
    schedule: Literal["constant", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    # steps over which the rate rises linearly from 0
    warmup_steps: int = 100
    # wsd: final fraction of the run over which the rate decays linearly to zero
    decay_fraction: float = 0.2
    # cosine: final rate as a fraction of learning_rate
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    # clips gradients to this global norm; 0 = no clipping
    clip_norm: float = 1.0


@dataclass(frozen=True)
class TrainConfig:
    """Steps, trained parameters, gradient truncation, logging and checkpoints."""

    steps: int = 1000
    # trained parameters: all (with adapters: the adapters and new parameters), only the feature
    # maps of linear layers, or all but them (T2R 2.2, note 5); the rest is frozen as in `init` and
    # not in checkpoints
    only: Literal["all", "maps", "not_maps"] = "all"
    # a first stage, with train.only=maps: the maps of linear layers learn to match, layer by layer,
    # the output of softmax attention with the same weights; layers above take the latter as input
    match: bool = False
    # gradient accumulation: the rows of a batch are split into so many microbatches
    accumulate: int = 1
    # a step processes its tokens in so many segments, each rematerialised; the gradient flows
    # through all of them and stops at the start of the step (truncated BPTT)
    bptt_segments: int = 1
    # lanes: initial tokens of a row in a step, with proportionally more rows: every step has
    # data.batch * data.length tokens. It doubles up to data.length, and half of the lanes end each
    # time (Feedback Transformer, arXiv 2002.09402v1, 3.2). 0 = data.length from the start
    bptt_start: int = 0
    # steps after which it doubles; the paper: 50,000 from 32 to 256
    bptt_double_every: int = 0
    # random state passing: probability that a packed row starts from the last step's memory
    # (B.2.3); 0 = off
    rsp: float = 0.0
    # steps over which rsp rises linearly from 0
    rsp_ramp: int = 0
    # weights of losses on FAM's memory (famjax/mixers/fam_losses.py), means over layers: that
    # attention reaches all keys of a block equally (C.4), in nats; that the memory which a block
    # leaves gives its outputs again (C.5). 0 = off. They take a second pass over the memory
    diversity_loss: float = 0.0
    reconstruction_loss: float = 0.0
    # weight of what a memory writes, a mean over layers: the mean rate of the delta rule, or the
    # mean gate of model.fam_update=gated. A memory then keeps what it has read for longer
    # (docs/memory.md). 0 = off
    write_loss: float = 0.0
    # random position offset (B.2.2): each row's positions start at a random number in every step,
    # uniform up to the longest wavelength, 0 with probability 1/2. It does not change relative
    # positions
    rpo: bool = False
    # label smoothing (Szegedy et al., 2016): with this share each token of the vocabulary is the
    # target, in the loss that is minimized; bits per byte are without it. 0 = off
    label_smoothing: float = 0.0
    log_every: int = 10
    checkpoint_every: int = 200
    # checkpoints to keep; a resume uses the newest good one, famjax average the last 10
    keep: int = 2


# of a mesh
AXES = ("data", "fsdp", "tensor", "sequence")


@dataclass(frozen=True)
class ProfileConfig:
    """Profiles written to RUN/profile; they do not change the run."""

    # "A:B": a trace of device and host after step A until after step B, for XProf, TensorBoard and
    # Perfetto
    steps: str = ""
    # a device memory profile after so many steps, for pprof; 0 = never
    memory: int = 0


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation while a run trains, in metrics.jsonl; the run stays the same."""

    # steps between evaluations, a multiple of train.log_every: bits per byte of held-out documents
    # and of documents trained on, with the memory and without, and `tasks`; 0 = never
    every: int = 0
    # batches of data.batch * data.length tokens that are read of each, from the documents' start:
    # figures of other rows (train.bptt_start) are of other tokens
    batches: int = 4
    # tasks, as of famjax eval --tasks, each measured on documents of these lengths
    tasks: str = ""
    lengths: str = "1024"
    # documents of each length
    examples: int = 20
    # keep the checkpoint with the best of these in RUN/best, a run like any other:
    # heldout_bits_per_byte, or the name of one of the tasks, whose lengths count alike
    best: str = ""


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis. -1 takes the remaining devices.

    Several -1 are chosen by the devices, the model and the batch (`famjax.parallel.mesh`);
    `mesh=auto` is -1 for all.
    """

    # devices that shard the rows of a batch; -1: the remaining devices; several -1 are chosen for
    # the model and the batch. mesh=auto: all four are -1
    data: int = -1
    # ... the rows, and also parameters, gradients and optimizer state
    fsdp: int = 1
    # ... the heads, the feed-forward's hidden units and the vocabulary
    tensor: int = 1
    # ... the tokens of a call, in whole blocks
    sequence: int = 1


@dataclass(frozen=True)
class Config:
    """Name and seed of a run, and its initial weights."""

    name: str = "run"
    seed: int = 0
    # folder of a run or a converted model to start from: its shape, tokenizer and weights; the
    # attention of its layers may be replaced (model.mixer=fam)
    init: str = ""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
