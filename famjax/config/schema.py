"""The config schema: frozen nested dataclasses with a comment for every field.

The comments are the help texts of `famjax train --help GROUP`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ArchConfig:
    """Architecture details in which pretrained families differ; the defaults are famjax's."""

    # epsilon of the norms, added to the mean square (RMSNorm) or to the variance (LayerNorm)
    norm_eps: float = 1e-6
    # RMSNorm multiplies by 1 + scale instead of by scale (Gemma)
    norm_plus_one: bool = False
    # normalizes the outputs of attention and feed-forward before they are added to the residual
    # stream (Gemma 2, 3)
    post_norm: bool = False
    # normalizes each head's queries and keys before RoPE (Qwen 3, Gemma 3)
    qk_norm: bool = False
    # attention scores are divided by the square root of this number; 0 = head_dim
    query_scale: float = 0.0
    # soft cap of attention scores: s becomes cap * tanh(s / cap); 0 = no cap (Gemma 2)
    attention_cap: float = 0.0
    # soft cap of the logits, by the same formula as attention_cap; 0 = no cap
    logit_cap: float = 0.0
    # true: norms before attention and feed-forward, and a final norm. false: post-norm, after the
    # residual sums, without a final norm (Vaswani et al., 2017)
    pre_norm: bool = True
    # attention and feed-forward both take the layer's input, instead of one following the other
    # (GPT-NeoX)
    parallel: bool = False
    # absolute position embedding, added to the token embeddings of the decoder and of the encoder;
    # if the decoder is a feedback stack, whose positions are relative, only to those of the
    # encoder. learned: a table of `model.capacity` positions; later positions of a document wrap
    # around (GPT-2). sinusoidal: alternating sines and cosines (Vaswani et al., 2017, 3.5).
    # sinusoidal_halves: the same values, first all sines, then all cosines (Marian)
    positions: Literal["none", "learned", "sinusoidal", "sinusoidal_halves"] = "none"
    # positions=learned: number of table rows before the row of position 0 (BART: 2)
    position_offset: int = 0
    # normalizes the sum of token and position embedding (BART)
    embed_norm: bool = False
    # token embeddings are multiplied by this number; 0 = the square root of width
    embed_scale: float = 0.0
    # adds a bias to the logits (Marian, BART)
    logit_bias: bool = False
    # adds biases to the projections of queries, keys and values (Qwen 2)
    qkv_bias: bool = False
    # adds a bias to the attention's output projection
    out_bias: bool = False
    # adds biases to the feed-forward
    mlp_bias: bool = False
    # fraction of each head's elements that RoPE rotates, counted from the first (GPT-NeoX); 0 = no
    # RoPE (GPT-2)
    rotary_fraction: float = 1.0
    # RoPE base of swa layers, which then ignore rope_scaling; 0 = swa layers rotate as all other
    # layers do (Gemma 3)
    local_rope_base: float = 0.0
    # scaling of RoPE frequencies for longer contexts. linear: all frequencies are divided by
    # rope_factor; llama3: only the low frequencies (Llama 3)
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    # factor by which rope_scaling divides frequencies
    rope_factor: float = 1.0
    # llama3: wavelengths above rope_length / rope_low are scaled by the whole rope_factor
    rope_low: float = 1.0
    # llama3: wavelengths below rope_length / rope_high are not scaled at all
    rope_high: float = 4.0
    # llama3: context length of the model before scaling
    rope_length: int = 8192


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of frozen weights.

    Trained along with the adapters: the FAM prompt, memory gates, the weights of smeared keys, the
    short convolution, the parameters of delta-rule memories and of the n-gram memory, and feature
    maps; in rmt and autocompressor, the memory tokens and the norm of the memory.
    """

    # r, rank of the adapters; 0 = no adapters, everything is trained
    rank: int = 0
    # the adapters' output is multiplied by alpha / rank; 0 = alpha equals rank
    alpha: float = 0.0
    # multiplies the adapters' output by alpha / sqrt(rank) instead (rsLoRA)
    rs: bool = False
    # dropout rate of the adapters' input
    dropout: float = 0.0
    # which projections have adapters: comma-separated patterns of attention.q, .k, .v, .out,
    # mlp.gate, .up, .down
    on: str = "attention.*,mlp.*"
    # dtype of the frozen weights
    base: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class FeedbackConfig:
    """Feedback Transformer (arXiv 2002.09402), and a Transformer with the same components."""

    # number of previous tokens whose memory a token attends to, itself not included (tau, 3.1)
    span: int = 128
    # which states make up a token's memory (Equation 1; v1 5.1). all: the states before, between
    # and after the layers, with learned softmax weights; average: the same with equal weights; top:
    # the last state; layer: the state after `layer` layers; same_and_lower: a memory for each
    # layer, of the states up to its own output (as in an RNN); previous: a memory for each layer,
    # its input (Transformer)
    composition: Literal["all", "average", "top", "layer", "same_and_lower", "previous"] = "all"
    # number of layers after which composition=layer takes the state; 0 takes the embedding
    layer: int = 0
    # one key and value projection for all layers (3.3)
    shared_kv: bool = True
    # what the state carries: keys and values, or the memory, from which every call recomputes them
    # with less memory and more compute (v1 5.3)
    cache: Literal["keys_values", "memory"] = "keys_values"
    # position encoding. learned: a vector for each distance, added to the keys and shared by all
    # heads and layers; rotary: RoPE
    positions: Literal["learned", "rotary"] = "learned"
    # each head learns its attention span (Sukhbaatar et al., 2019)
    adaptive_span: bool = False
    # adaptive_span: number of tokens over which a head's soft mask falls from 1 to 0
    span_ramp: int = 32
    # adaptive_span: initial span of each head, as a fraction of `span`
    span_start: float = 0.0
    # adaptive_span: weight of a loss on the heads' mean span, summed over layers
    span_loss: float = 0.0
    # training only: number of fixed-point sweeps, each over all tokens in parallel, that
    # approximate the memory; 0 = always the exact, sequential loop
    sweeps: int = 0
    # sweeps: if the last sweep changes the memory of a row by more than this fraction, the exact
    # loop is used
    tolerance: float = 0.1


@dataclass(frozen=True)
class LinearConfig:
    """Normalized linear attention (T2R, arXiv 2103.13076), for layers with the mixer `linear`."""

    # the feature map phi, shared by a head's queries and keys. Learned: relu, learned_elu (1 +
    # elu), cos or tanh of W x + b. Without W: elu (1 + elu(x)); rfa, random Fourier features with a
    # learned temperature (Peng et al., 2021); performer, positive orthogonal random features
    map: Literal["relu", "learned_elu", "cos", "tanh", "elu", "rfa", "performer"] = "relu"
    # k, number of elements of phi(x), even for rfa; elu ignores it and has head_dim elements
    features: int = 32
    # applies RoPE to queries and keys before phi, to the fraction model.arch.rotary_fraction of
    # each head's elements
    rope: bool = True
    # tokens in a chunk. Attention within a chunk is computed for all pairs of tokens, and a state
    # is carried between chunks. Changes results only by rounding
    chunk: int = 32


@dataclass(frozen=True)
class EncoderConfig:
    """Encoder of a sequence-to-sequence model, and the decoder's attention to its output.

    Its layers attend in both directions; their sizes are those of the decoder's layers.
    """

    # number of encoder layers; 0 = no encoder: a decoder-only language model
    layers: int = 0
    # the decoder's attention to the encoder's output. linear: normalized linear attention with the
    # feature map model.linear.map (T2R 3.2.2)
    cross: Literal["softmax", "linear"] = "softmax"
    # cross=linear: k, number of features of a query or a key
    features: int = 32
    # source and target share one embedding table
    shared: bool = True


@dataclass(frozen=True)
class DropoutConfig:
    """Dropout rates in training (Feedback Transformer, arXiv 2002.09402v3, 7.6 and 4.2.1).

    The stacks lstm, rmt and autocompressor have no dropout.
    """

    # dropout rate of attention weights; layers of linear attention have no such dropout
    attention: float = 0.0
    # dropout rate of the feed-forward's hidden units
    hidden: float = 0.0
    # dropout rate of the outputs of attention and feed-forward, before the residual sum (Vaswani et
    # al., 2017)
    residual: float = 0.0
    # dropout rate of the embedding's output, positions included
    embedding: float = 0.0
    # dropout rate of the last layer's output
    output: float = 0.0
    # probability that a whole layer is skipped (LayerDrop)
    layer: float = 0.0


@dataclass(frozen=True)
class AdaptiveConfig:
    """Adaptive input and softmax, for vocabularies of words sorted by descending frequency.

    `model.tied` then shares the tables, and the projections of all clusters but the first.
    """

    # index of the first word of each rarer cluster, such as "20000,60000"; empty: one embedding and
    # one softmax for all words
    cutoffs: str = ""
    # word vectors of cluster i have width / factor^i elements
    factor: int = 4


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a language model, or of a decoder with its encoder.

    The letters for dimensions are defined in `famjax.core.types`. Section numbers in parentheses
    are those of TransformerFAM (arXiv 2404.09173), unless another paper is named.
    """

    # number of tokens in the vocabulary, at least the tokenizer's; 0 = the tokenizer's
    vocab_size: int = 0
    # kind of model. residual: layers on a residual stream, each with a mixer; feedback: the
    # Feedback Transformer; transformer: a Transformer built from the same components as feedback;
    # lstm: an LSTM; rmt, autocompressor: a Transformer that reads segments of block_len tokens and
    # summarizes each in fam_len memory tokens
    stack: Literal["residual", "feedback", "transformer", "lstm", "rmt", "autocompressor"] = (
        "residual"
    )
    layers: int = 4
    # d, the width of the residual stream
    width: int = 256
    heads: int = 4
    # g, heads of keys and values: equal to heads is multi-head attention, 1 is multi-query (A.1),
    # numbers between are grouped-query; 0 = heads
    kv_heads: int = 0
    # e, elements of a head; 0 = width / heads
    head_dim: int = 0
    # hidden width of the feed-forward; 0 = 4 * width
    mlp_width: int = 0
    # gelu and geglu use the tanh approximation, gelu_exact the error function; swish has no gate,
    # unlike swiglu
    mlp: Literal["relu", "gelu", "gelu_exact", "swish", "swiglu", "geglu"] = "swiglu"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    # the output projection shares the embedding table
    tied: bool = True
    rope_base: float = 10_000.0
    # stack=residual: the mixer of every layer, or a comma-separated pattern of mixers that the
    # layers repeat ("bswa,bswa,fam"). Mixers: full, swa, bswa, bswa_sg, fam, fm, delta,
    # block_recurrent, linear
    mixer: str = "fam"
    # w, tokens in a block (2.1), or in a segment of rmt and autocompressor
    block_len: int = 128
    # m, number of memory segments, the previous blocks that a block attends to, in bswa, bswa_sg,
    # fam, fm, delta and block_recurrent (2.1)
    memory_segments: int = 1
    # blends each key with the previous token's key, in bswa, bswa_sg, fam, delta and
    # block_recurrent; one layer can then find what followed an earlier token (Olsson et al. 2022)
    smeared_keys: bool = False
    # k, number of tokens, each token itself included, that a causal convolution of the embeddings
    # spans, before the first layer; 0 is none. Layers then find what followed k-1 earlier tokens
    short_conv: int = 0
    # swa: number of tokens that a query attends to, itself included; window=block_len is
    # Transformer-XL (B.4.5)
    window: int = 128
    # full attention: size of the KV cache, in tokens; autocompressor: maximum tokens in a document
    capacity: int = 4096
    # f, number of memory tokens in FAM (3.4.1) and in rmt; autocompressor: summary tokens of each
    # segment; block_recurrent: state vectors
    fam_len: int = 16
    # p, number of previous FAMs that a block attends to (3.4.2)
    fam_previous: int = 1
    # how a block updates the FAM. sum: the block's contribution is added, as in the paper; gated:
    # each FAM token moves towards the contribution by a learned gate, which can close; static: the
    # learned prompt is the query, and its attention to the block and the last FAM is the new FAM
    # (C.3)
    fam_update: Literal["sum", "gated", "static"] = "sum"
    # the FAM at the start of a document. prompt: learned tokens at the embedding, which run through
    # the layers; prefix: learned for each layer (B.1, B.4.4)
    fam_init: Literal["prompt", "prefix"] = "prompt"
    # RoPE positions of the FAM. last: those of the last f tokens of the block that it summarizes;
    # between: fractions between that block and the next; zero: the start of the document (B.4.1)
    fam_position: Literal["last", "between", "zero"] = "last"
    # gated: shortest initial timescale of the gates, in blocks. The f tokens have timescales from
    # this to fam_max_timescale, evenly spaced in log T; a gate starts at 1 / T, before its
    # threshold is subtracted
    fam_min_timescale: float = 1.5
    # gated: longest initial timescale of the gates, in blocks
    fam_max_timescale: float = 64.0
    # gated: c, a gate whose sigmoid is below it is closed; with 0 gates only approach 0
    fam_gate_threshold: float = 0.01
    # delta: number of features of a key in the memory, in units of 2 * head_dim (nu of DPFP, Schlag
    # et al. 2021)
    delta_order: int = 2
    # delta: number of key heads that have a memory, the last ones; 0 means all. One is as good as
    # all on text (docs/memory.md)
    delta_heads: int = 0
    # o, the number of contexts of the n-gram memory; 0 is no such memory. It adds to each embedding
    # what followed the last 1, 2, 3, 4, 6, 8, 12 ... tokens when the document last had them
    ngram_memory: int = 0
    # slots of the n-gram memory for the contexts of each length; newer ones replace older ones
    ngram_slots: int = 16384
    # block_recurrent: how the state vectors are updated (3.2 of arXiv 2203.07852). fixed: a learned
    # average; lstm: gates that depend on the block
    recurrent_gate: Literal["fixed", "lstm"] = "fixed"
    # runs the layers as a scan over the repeats of the mixer pattern, which compiles the pattern
    # once; results are the same either way
    scan_layers: bool = True
    # what the backward pass recomputes. none: cheap operations only; attention: each layer except
    # the attention output, one block at a time; layer: each layer; block: each layer, one block at
    # a time
    remat: Literal["none", "attention", "layer", "block"] = "none"
    # dtype of the computation; parameters and optimizer state are float32
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
    # maximum number of keys in a document, up to 8. With more than one, each key has a name, and
    # the question asks for one of them. Training documents have from 1 to `keys` keys, but no more
    # than fit in the curriculum's current longest document
    keys: int = 1
    # minimum length of a document, in tokens, needle and question included; a document with several
    # keys may need more
    min_length: int = 96
    # how lengths are drawn from min_length to the curriculum's current longest. octaves: with
    # density 1 / L^2, so that all octaves have equally many tokens; uniform: as in the paper
    lengths: Literal["octaves", "uniform"] = "octaves"
    # document lengths are rounded up to a multiple of this number. With model.block_len every
    # document ends at a block boundary, so that no question crosses one
    multiple: int = 1
    # initial longest length of a document, in tokens. It doubles, up to max_length, each time the
    # token accuracy of answers over a logging interval reaches `threshold`
    start_length: int = 96
    # final longest length of a document, in tokens
    max_length: int = 4096
    # token accuracy of answers at which the longest length doubles
    threshold: float = 0.97
    # number of tokens from one question to the next. After an answer the document continues from
    # the memory before the answer's block. 0 = only one question, at the end
    ask_every: int = 0
    # maximum number of filler tokens before the needle, drawn uniformly; 0 = the needle comes
    # first, as in the paper
    needle_within: int = 0
    # fraction of training keys made of only two or three different digits. In such a key the
    # previous digit does not determine the next one, only its position in the key does
    hard_keys: float = 0.0
    # loss weight of the tokens that are not in the answer
    other_weight: float = 0.02


@dataclass(frozen=True)
class LongConfig:
    """Training documents of the long tasks (niah_single_1, vt, ...): docs/evaluation.md."""

    # file that the task's facts come from. babilong: a task of bAbI, such as
    # qa1_single-supporting-fact_train.txt; qa_1: a JSON file of SQuAD; qa_2: one of HotpotQA
    facts: str = ""
    # minimum tokens in a document, bos, question and answer included. Lengths from min_length to
    # max_length are drawn so that all octaves have equally many tokens
    min_length: int = 512
    # maximum tokens in a document
    max_length: int = 4096
    # loss weight of the tokens that are not in the answer
    other_weight: float = 0.02


@dataclass(frozen=True)
class ToyConfig:
    """The toy tasks of the Feedback Transformer (v3 4.1, 7.1, 7.4; v1 B.1): docs/tasks.md."""

    # number of different training episodes, reshuffled in every epoch
    episodes: int = 10_000
    # size of an episode: actions of a walk, digits to copy or reverse, maximum number of A's to
    # count, statements of a program; 0 = the paper's: 100, 40, 50, 100
    steps: int = 0
    # initial size of training episodes. It doubles, up to `steps`, each time the accuracy over a
    # logging interval reaches `threshold`; 0 = `steps` from the start
    start_steps: int = 0
    # accuracy at which the size of training episodes doubles
    threshold: float = 0.9
    # size of an episode in evaluation; 0 = the paper's: 400 digits, other tasks as in training
    test_steps: int = 0
    # random_walk: number of cells along each side of the grid
    size: int = 8
    # algorithmic: number of variables in a program, at most 5
    variables: int = 3
    # true: a document is one epoch of a lane's episodes, and the memory is carried through them;
    # false: every episode is a document
    concatenate: bool = True


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they are batched."""

    # where documents come from: text; generated passkey retrieval (passkey); a toy task (data.toy):
    # random_walk, blocked_walk, copy, reverse, counting, algorithmic; a task of RULER:
    # niah_single_1, niah_single_2, niah_single_3, niah_multikey_1, niah_multikey_2,
    # niah_multikey_3, niah_multivalue, niah_multiquery, vt, cwe, fwe, qa_1, qa_2; babilong; or
    # translate: pairs of a source and a target
    task: str = "text"
    # text: files, folders or globs, plain or compressed (.gz, .xz, .zst), separated by commas;
    # empty: Python's standard library. A .jsonl or .ndjson file has a document on each line,
    # {"text": ...}, {"inputs": ..., "targets": ...}, {"prompt": ..., "response": ...} or
    # {"messages": [{"role": ..., "content": ...}, ...]}; a .parquet file has one in each row, with
    # these columns (needs the extra parquet). A .json file is rejected, or is plain text in a
    # folder of other texts
    files: str = ""
    # text: name of a seqio task or mixture (needs the extra seqio)
    seqio: str = ""
    # text: name of a TFDS data set, "name/config:version" (needs the extra seqio)
    tfds: str = ""
    # translate: where sources come from: files or globs with a source on each line, or a feature of
    # a data set, tfds:SET:SPLIT:FEATURE or seqio:TASK:SPLIT:FEATURE; or, if data.target is empty,
    # .jsonl files of inputs and targets
    source: str = ""
    # translate: where targets come from, in the form of data.source; empty: from data.source,
    # .jsonl files of inputs and targets
    target: str = ""
    # translate: number of source tokens in a row; 0 = data.length, the number of target tokens
    source_length: int = 0
    # translate: maximum number of words of a source, the first ones, in training, evaluation and
    # generation; words are separated by white space; 0 = all of its words
    source_words: int = 0
    # feature of the TFDS examples that holds the text
    feature: str = "text"
    # "bytes"; "task" (the words of a toy task); the path of a SentencePiece model, of a
    # tokenizer.json or of a list of words (.txt); or a folder with one of these files. With init
    # the default is the tokenizer of that folder, and another one must have the same ids
    tokenizer: str = "bytes"
    # how documents fill the rows of a batch. lanes: each row continues its document across steps
    # (contiguous batching), and the memory is carried; packed: rows are independent; pairs: a row
    # holds whole pairs of data.task=translate
    layout: Literal["lanes", "packed", "pairs"] = "lanes"
    # b, number of rows in a batch, over all devices
    batch: int = 8
    # t, tokens of a row in one step; a multiple of model.block_len
    length: int = 1024
    # lanes: a document of at most `length` tokens is not split between two steps; if it does not
    # fit in the rest of a step, it starts in the next one
    keep_whole: bool = False
    # passkey: number of rows of a batch that read text (files, seqio, tfds) instead of the task, so
    # that a finetuned model keeps its language
    text_rows: int = 0
    # loss weight of the tokens in text_rows, less than 1; an answer of the task has weight 1
    text_weight: float = 0.02
    # text: documents of data.files are cut into parts of about this many bytes. Parts are read in
    # random order, each without the memory of the part before it. 0 = whole documents
    part_bytes: int = 0
    # one document in this many is held out for evaluation; 0 = none
    holdout: int = 20
    # packed: number of tokens of a row that are repeated at its end, after '[repeat random
    # segment]' (3.1.1); 0 = none
    repeat_len: int = 0
    # packed: loss weight of the repeated tokens
    repeat_weight: float = 0.1
    passkey: PasskeyConfig = field(default_factory=PasskeyConfig)
    long: LongConfig = field(default_factory=LongConfig)
    toy: ToyConfig = field(default_factory=ToyConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    # the optimizer: adamw, adafactor, or nag, which is SGD with Nesterov momentum beta1
    name: str = "adamw"
    learning_rate: float = 3e-3
    # inverse_sqrt falls as sqrt(warmup_steps / step) after the warm-up (Vaswani et al., 2017)
    schedule: Literal["constant", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    # number of steps over which the learning rate rises linearly from 0
    warmup_steps: int = 100
    # wsd: final fraction of the run, over which the learning rate decays linearly to 0
    decay_fraction: float = 0.2
    # cosine: final learning rate, as a fraction of learning_rate
    final_fraction: float = 0.1
    # momentum (nag), or decay rate of the mean of gradients or updates (adamw, adafactor)
    beta1: float = 0.9
    # decay rate of the mean of squared gradients (adamw), or its limit (adafactor); nag has none
    beta2: float = 0.95
    # weight decay of all trained parameters, norm scales, biases and embeddings included, except
    # the biases of memory gates and of the delta rule's rates
    weight_decay: float = 0.0
    # clips gradients to this global norm; 0 = no clipping
    clip_norm: float = 1.0


@dataclass(frozen=True)
class TrainConfig:
    """Steps, trained parameters, gradient truncation, logging and checkpoints."""

    steps: int = 1000
    # which parameters are trained: all (with adapters, only the adapters and new parameters); maps,
    # only the feature maps of linear layers; or not_maps, all except these (T2R 2.2, note 5). The
    # others stay as they are in `init` and are not in checkpoints
    only: Literal["all", "maps", "not_maps"] = "all"
    # a first stage of training, with train.only=maps: the feature maps of linear layers learn,
    # layer by layer, to match the output of softmax attention with the same weights. The layers
    # above take the output of softmax attention as input
    match: bool = False
    # gradient accumulation: the rows of a batch are split into this many microbatches
    accumulate: int = 1
    # number of segments in which a step processes its tokens, each rematerialized. The gradient
    # flows through all of them and stops at the start of the step (truncated BPTT)
    bptt_segments: int = 1
    # lanes: initial number of tokens of a row in a step. It doubles up to data.length, and each
    # time half of the lanes end. The number of rows is larger in proportion, so that every step has
    # data.batch * data.length tokens (Feedback Transformer, arXiv 2002.09402v1, 3.2). 0 =
    # data.length from the start
    bptt_start: int = 0
    # number of steps after which the rows' length doubles, from bptt_start to data.length; the
    # paper: 50,000, from 32 to 256
    bptt_double_every: int = 0
    # random state passing: probability that a packed row starts from the memory of the previous
    # step (B.2.3); 0 = off
    rsp: float = 0.0
    # number of steps over which rsp rises linearly from 0
    rsp_ramp: int = 0
    # weight of a loss on FAM's memory that makes attention reach all keys of a block equally (C.4),
    # in nats, a mean over layers; it costs a second pass over the memory. 0 = off
    # (famjax/mixers/fam_measures.py)
    diversity_loss: float = 0.0
    # weight of a loss on FAM's memory that makes a block's outputs reconstructible from the memory
    # that the block leaves (C.5), a mean over layers; it costs a second pass over the memory. 0 =
    # off
    reconstruction_loss: float = 0.0
    # weight of a loss on how much is written to a memory, a mean over layers: the mean write rate
    # of the delta rule, or the mean gate of model.fam_update=gated. A delta memory then skips
    # filler. With FAM, gates closed completely at a weight of 0.1 (docs/memory.md), and the loss
    # costs a second pass over the memory. 0 = off
    write_loss: float = 0.0
    # random position offset (B.2.2): in every step each row's positions start at a random number,
    # which is 0 with probability 1/2, else uniform up to the longest wavelength. Relative positions
    # stay the same
    rpo: bool = False
    # label smoothing (Szegedy et al., 2016): this share of each target's probability is spread
    # evenly over the vocabulary, in the loss that is minimized; bits per byte are without
    # smoothing. 0 = off
    label_smoothing: float = 0.0
    # number of steps between rows of metrics
    log_every: int = 10
    # number of steps between checkpoints
    checkpoint_every: int = 200
    # number of checkpoints to keep, and one more if the newest is not a regular one, but was saved
    # by a stop or by eval.best. A resumed run uses the newest valid one; famjax average by default
    # takes the last 10
    keep: int = 2


# names of the mesh axes
AXES = ("data", "fsdp", "tensor", "sequence")


@dataclass(frozen=True)
class ProfileConfig:
    """Profiles written to RUN/profile; they do not change the run."""

    # "A:B" writes a trace of device and host from after step A until after step B, for XProf,
    # TensorBoard and Perfetto
    steps: str = ""
    # writes a device memory profile after this many steps, for pprof; 0 = never
    memory: int = 0


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation while a run trains, in metrics.jsonl; it does not change the run."""

    # number of steps between evaluations, a multiple of train.log_every; 0 = never. An evaluation
    # measures bits per byte on held-out documents and on training documents, with and without the
    # memory, and runs `tasks`
    every: int = 0
    # number of batches, of data.batch * data.length tokens, to evaluate from held-out documents and
    # from training documents, each document from its start
    batches: int = 4
    # tasks to evaluate, written as for famjax eval --tasks, each on documents of `lengths`
    tasks: str = ""
    # document lengths for `tasks`, in tokens, or in steps of a toy task, separated by commas; "" is
    # 1024 tokens, or data.toy.test_steps
    lengths: str = ""
    # number of documents of each length, or of pairs or questions in a task's files; 0 means all of
    # the files, and for generated documents as many as famjax eval has
    examples: int = 20
    # translate, summarize: number of hypotheses of a beam search, 1 is greedy decoding; its length
    # penalty; and the size of n-grams that may not occur twice in an output, 0 allows all
    beam: int = 1
    length_penalty: float = 1.0
    no_repeat_ngram: int = 0
    # translate: whether the files of `tasks` are already tokenized, as famjax eval --tokenized
    tokenized: bool = False
    # score by which the best checkpoint is kept in RUN/best, as a run like any other:
    # heldout_bits_per_byte, or the name of one of `tasks`, as the mean over its lengths
    best: str = ""


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis; -1 takes the remaining devices.

    If several axes are -1, their sizes are chosen for the devices, the model and the batch
    (`famjax.parallel.mesh`). `mesh=auto` sets all axes to -1.
    """

    # number of devices over which the rows of a batch are sharded; -1: the remaining devices.
    # Several axes of -1 are chosen for the model and the batch, and mesh=auto sets all four to -1
    data: int = -1
    # number of devices over which the rows of a batch are sharded, and also parameters, gradients
    # and optimizer state
    fsdp: int = 1
    # number of devices over which heads, the feed-forward's hidden units and the vocabulary are
    # sharded
    tensor: int = 1
    # number of devices over which the tokens of a call are sharded, in whole blocks
    sequence: int = 1


@dataclass(frozen=True)
class Config:
    """Name and seed of a run, and its initial weights."""

    name: str = "run"
    seed: int = 0
    # folder of a run or a converted model to start from, with its shape, tokenizer and weights. The
    # attention of its layers may be replaced (model.mixer=fam)
    init: str = ""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
