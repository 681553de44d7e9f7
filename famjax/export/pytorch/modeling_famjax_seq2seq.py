"""An encoder, and a decoder of `modeling_famjax` whose layers attend to its output.

    output = model(ids, attention_mask=mask, decoder_input_ids=targets)
    output = model(decoder_input_ids=more, state=output.state)   # continues, with the same source
    ids = model.generate(ids, attention_mask=mask, num_beams=5)

A source ends with eos; a target begins with bos. The state includes the keys and values of the
source, which are computed once.

Shapes: b batch, s source tokens, t target tokens, d width.
"""

import functools

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from .attention_famjax import Attention, Norm
from .configuration_famjax import FamjaxConfig
from .modeling_famjax import (
    CACHE,
    FamjaxForCausalLM,
    FamjaxState,
    FeedForward,
    SourceState,
    add_positions,
    position_table,
)


class EncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config, "full")
        self.mlp = FeedForward(config)

    def forward(self, x, mask):
        """Attend in both directions: [b s d], [b 1 s] -> [b s d]."""
        at = torch.arange(x.shape[1], device=x.device)
        q, k, v = self.attention.project(x)
        q, k = self.attention.rotate(q, at), self.attention.rotate(k, at)
        a = self.attention.project_output(self.attention.attend(q, k, v, mask), x)
        return self.mlp(a, x)


class Encoder(nn.Module):
    main_input_name = "input_ids"  # generate() asks for it

    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder["layers"]))
        self.config, arch = config, config.arch
        self.positions = position_table(config)
        norm = functools.partial(Norm, config.norm, config.width, arch)
        self.embed_norm = norm() if arch["embed_norm"] else None
        self.norm = norm() if arch["pre_norm"] else nn.Identity()
        self.gradient_checkpointing = False

    def forward(self, x, mask):
        """Encode embedded sources: [b s d], [b 1 s] -> [b s d].

        Positions are counted from a source's first token that is no padding.
        """
        if self.config.arch["positions"] == "learned" and x.shape[1] > self.config.capacity:
            raise ValueError(
                f"a source has {x.shape[1]} tokens, more than the {self.config.capacity} positions "
                "of the model: shorten it"
            )
        at = (mask[:, 0].cumsum(-1) - 1).clamp_min(0)
        x = add_positions(self.config, self.positions, x, at)
        x = x if self.embed_norm is None else self.embed_norm(x)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(layer.__call__, x, mask)
            else:
                x = layer(x, mask)
        return self.norm(x)


class FamjaxForConditionalGeneration(FamjaxForCausalLM):
    config_class = FamjaxConfig
    _no_split_modules = ["Layer", "EncoderLayer"]  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        shared = config.encoder["shared"]
        self.source_embed = None if shared else nn.Embedding(config.vocab_size, config.width)
        self.encoder = Encoder(config)
        self.post_init()

    def _resize_token_embeddings(self, new_num_tokens, *args, **kwargs):
        """Resize the embedding; also that of sources, if they have one of their own."""
        if self.source_embed is not None:
            is_trained = self.source_embed.weight.requires_grad
            self.source_embed = self._get_resized_embeddings(
                self.source_embed, new_num_tokens, *args, **kwargs
            ).requires_grad_(is_trained)
        return super()._resize_token_embeddings(new_num_tokens, *args, **kwargs)

    def encode(self, input_ids, attention_mask=None):
        """Encode sources [b s]; attention_mask [b s] is 0 at padding."""
        embed = self.embed if self.source_embed is None else self.source_embed
        x = embed(input_ids) * self.embed_scale
        mask = source_mask(attention_mask, x)
        return BaseModelOutput(last_hidden_state=self.encoder(x, mask))

    def read_source(self, encoded, attention_mask=None):
        """Return what the decoder's layers need of an encoded source [b s d]."""
        # linear attention to no tokens is 0; a softmax over none is undefined
        allow_empty = self.config.encoder["cross"] == "linear"
        mask = source_mask(attention_mask, encoded, allow_empty)
        layers = tuple(layer.cross.read_source(encoded, mask) for layer in self.layers)
        return SourceState(layers, mask)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        state=None,
        labels=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Encode sources [b s], and process the tokens [b t] of their targets.

        Args:
          attention_mask: [b s], 0 at padding of the sources.
          decoder_input_ids: [b t], bos and a target's tokens; None takes them from `labels`.
          decoder_attention_mask: [b t], 0 at padding of the targets.
          encoder_outputs: output of `encode`, in place of input_ids.
          state: state of an earlier call. If it includes a source, the other arguments for a source
            are ignored.
          labels: [b t], a target's tokens and eos; -100 is ignored. The loss is that of predicting
            each of them from those before it.
          num_items_in_batch: divisor of the summed loss; None means the mean loss.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("give decoder_input_ids, or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        self.check_inputs(decoder_input_ids, labels, kwargs.get("logits_to_keep", 0), {})
        if state is None or state.source is None:
            if encoder_outputs is None:
                if input_ids is None:
                    raise ValueError("give input_ids of the sources, encoder_outputs, or state")
                encoder_outputs = self.encode(input_ids, attention_mask)
            source = self.read_source(encoder_outputs[0], attention_mask)
            state = self.init_state(len(decoder_input_ids)) if state is None else state
            state = state._replace(source=source)
        by_name = self.default_to_config(kwargs.pop("return_dict", None), "return_dict", True)
        output = super().forward(
            decoder_input_ids, state=state, attention_mask=decoder_attention_mask, **kwargs
        )
        if labels is not None:
            if decoder_attention_mask is not None:
                labels = labels.masked_fill(decoder_attention_mask == 0, -100)
            output.loss = target_loss(output.logits, labels, num_items_in_batch)
        return output if by_name else output.to_tuple()

    def prepare_decoder_input_ids_from_labels(self, labels):
        """Return the decoder's inputs for labels [b t]: bos, and all but the last."""
        first = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
        return torch.cat([first, labels[:, :-1].clamp_min(0)], 1)

    @torch.no_grad()
    def generate(self, inputs=None, generation_config=None, **kwargs):
        """Write the targets of sources [b s], or of the `encoder_outputs` of `encode`."""
        if kwargs.get("state") is not None:
            raise ValueError("generate starts a new target: pass the source, and no state")
        ids = kwargs.pop("input_ids", inputs)
        if kwargs.get("encoder_outputs") is None:
            if ids is None:
                raise ValueError("give input_ids of the sources, or encoder_outputs")
            kwargs["encoder_outputs"] = self.encode(ids, kwargs.get("attention_mask"))
        return super().generate(generation_config=generation_config, **kwargs)

    def prepare_inputs_for_generation(
        self,
        decoder_input_ids,
        encoder_outputs=None,
        attention_mask=None,
        decoder_attention_mask=None,
        **kwargs,
    ):
        """Return the arguments of `forward`; after the first call, only the newest token."""
        current = kwargs.get(CACHE)
        started = isinstance(current, FamjaxState)
        forwarded = ("use_cache", "output_hidden_states", "output_attentions")
        return {
            "decoder_input_ids": decoder_input_ids[:, -1:] if started else decoder_input_ids,
            "encoder_outputs": encoder_outputs,
            "attention_mask": attention_mask,
            "decoder_attention_mask": decoder_attention_mask,
            "state": current if started else None,
            "logits_to_keep": 1,
            **{name: kwargs[name] for name in forwarded if name in kwargs},
        }


def source_mask(attention_mask, x, allow_empty=False):
    """Return the mask [b 1 s] of sources [b s d].

    Args:
      allow_empty: whether a source that is all padding is masked entirely; if False, all of it is
        visible, so that no softmax is empty.
    """
    if attention_mask is None:
        return torch.ones(len(x), 1, x.shape[1], dtype=torch.bool, device=x.device)
    mask = attention_mask[:, None].to(x.device).bool()
    return mask if allow_empty else mask | ~mask.any(-1, keepdim=True)


def target_loss(logits, labels, count):
    """Return the mean loss of labels [b t]; or its sum over `count`, if given."""
    reduction = "mean" if count is None else "sum"
    targets = labels.flatten().to(logits.device)
    total = functional.cross_entropy(logits.flatten(0, 1), targets, reduction=reduction)
    return total if count is None else total / count
