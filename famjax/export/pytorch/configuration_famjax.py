"""The config of a model exported from famjax."""

from transformers import PreTrainedConfig


class FamjaxConfig(PreTrainedConfig):
    """Config of a decoder whose layers carry a memory, with or without an encoder.

    Args:
      layers, width, heads, kv_heads, head_dim, mlp_width: as in any transformer.
      mlp: gelu, gelu_exact, relu, swish, swiglu or geglu.
      norm: rmsnorm or layernorm.
      mixer: what the layers attend to, a comma-separated pattern that is repeated over the layers:
        full, swa, bswa, bswa_sg, fam, delta, linear.
      stack: residual; feedback, layers that attend to memories of earlier tokens; or transformer,
        the same layers without feedback.
      block_len: tokens per block.
      memory_segments: previous blocks that bswa, bswa_sg, fam and delta attend to.
      smeared_keys: whether each key of bswa, bswa_sg, fam and delta is blended with the key before
        it.
      short_conv: number of tokens, each token itself included, that a convolution of the embeddings
        spans; 0 is none.
      window: number of tokens that a query of swa attends to, itself included.
      capacity: maximum number of tokens of full attention; rows of the learned position table.
      fam_len, fam_previous: number of memory tokens of fam, and how many of its last memories a
        block attends to.
      fam_update: sum; gated: memory tokens move towards their new value by a gate; static: the
        prompt is the query of every update.
      fam_min_timescale, fam_max_timescale: initial gates in training; not read here.
      fam_gate_threshold: gates below it are closed.
      delta_order: number of features of a key in the memory of delta, divided by 2 * head_dim.
      delta_heads: number of key heads that have a memory of delta, the last ones; 0 means all.
      ngram_memory: number of contexts of the n-gram memory; 0 is no such memory.
      ngram_slots: number of contexts of each length that it keeps.
      encoder: for a model with an encoder, a dict with its number of layers, and whether it shares
        the decoder's embedding (shared), its attention to the source (cross: softmax, linear), and
        the features of a linear one.
      linear: for linear attention, a dict with its feature map (map), their number (features), and
        whether positions are rotated before the map (rope).
      feedback: for other stacks than residual, a dict with span, composition, layer, shared_kv,
        positions, adaptive_span and span_ramp; its other keys are only used by famjax.
      arch: options in which pretrained families differ.
      tie_word_embeddings: the head shares the embedding's weights.
    """

    model_type = "famjax"
    keys_to_ignore_at_inference = ["state"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "mlp_width",
    }

    def __init__(
        self,
        vocab_size=258,
        layers=2,
        width=16,
        heads=2,
        kv_heads=2,
        head_dim=8,
        mlp_width=64,
        mlp="swiglu",
        norm="rmsnorm",
        rope_base=10_000.0,
        stack="residual",
        mixer="fam",
        block_len=8,
        memory_segments=1,
        smeared_keys=False,
        window=8,
        capacity=64,
        fam_len=2,
        fam_previous=1,
        fam_update="sum",
        fam_min_timescale=1.5,
        fam_max_timescale=64.0,
        fam_gate_threshold=0.01,
        delta_order=2,
        delta_heads=0,
        short_conv=0,
        ngram_memory=0,
        ngram_slots=16384,
        encoder=None,
        linear=None,
        feedback=None,
        arch=None,
        tie_word_embeddings=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.layers = layers
        self.width = width
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.mlp_width = mlp_width
        self.mlp = mlp
        self.norm = norm
        self.rope_base = rope_base
        self.stack = stack
        self.mixer = mixer
        self.block_len = block_len
        self.memory_segments = memory_segments
        self.smeared_keys = smeared_keys
        self.window = window
        self.capacity = capacity
        self.fam_len = fam_len
        self.fam_previous = fam_previous
        self.fam_update = fam_update
        self.fam_min_timescale = fam_min_timescale
        self.fam_max_timescale = fam_max_timescale
        self.fam_gate_threshold = fam_gate_threshold
        self.delta_order = delta_order
        self.delta_heads = delta_heads
        self.short_conv = short_conv
        self.ngram_memory = ngram_memory
        self.ngram_slots = ngram_slots
        self.encoder = encoder
        self.linear = linear
        self.feedback = feedback
        self.arch = _ARCH | (arch or {})
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**kwargs)


class FamjaxFeedbackConfig(FamjaxConfig):
    """Config of a model of `modeling_famjax_feedback`.

    A class of its own, since transformers remembers one model class for each config class.
    """

    def __init__(self, **kwargs):  # transformers would generate one that sets no default
        super().__init__(**kwargs)


_ARCH = {
    "norm_eps": 1e-6,
    "norm_plus_one": False,
    "post_norm": False,
    "qk_norm": False,
    "query_scale": 0.0,
    "attention_cap": 0.0,
    "logit_cap": 0.0,
    "pre_norm": True,
    "parallel": False,
    "positions": "none",
    "position_offset": 0,
    "embed_norm": False,
    "logit_bias": False,
    "embed_scale": 0.0,
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "rotary_fraction": 1.0,
    "local_rope_base": 0.0,
    "rope_scaling": "none",
    "rope_factor": 1.0,
    "rope_low": 1.0,
    "rope_high": 4.0,
    "rope_length": 8192,
}
