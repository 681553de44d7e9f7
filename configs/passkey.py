"""Passkey retrieval with FAM, trained in lanes (TransformerFAM 3.2, D.1, Figure 3).

Command:  make demo (trains the tokenizer, this config, and BSWA M1 and M2)
          famjax train passkey data.tokenizer=runs/demo/tokenizer.model
          famjax train passkey data.tokenizer=runs/demo/tokenizer.model model.stack=rmt \
              name=passkey_rmt
          famjax train passkey data.tokenizer=runs/demo/tokenizer.model \
              model.stack=autocompressor model.fam_len=4 name=passkey_autocompressor
Cost:     2 to 4 minutes on two cores; with rmt 1.8 times as much, with autocompressor 3.8
Expected: all keys at lengths up to a million tokens with each of five seeds; the key is anywhere in
          the first 4,096 tokens, questions are anywhere, and training documents have at most 4,096
          tokens: docs/memory.md and docs/results.md. The other memories of Figure 8, rmt and
          autocompressor (docs/alternatives.md), have no short convolution, and were not trained
          long enough
"""

from famjax.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PasskeyConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        name="passkey",
        model=ModelConfig(
            layers=2,
            width=64,
            # with 4 heads the index of a digit in the answer is learned sooner than with 2 or 8
            # (docs/log.md)
            heads=4,
            # slow rotations, so that a token finds a FAM slot by content from any position in its
            # block
            rope_base=1e5,
            mlp_width=128,
            mlp="gelu",
            tied=False,
            mixer="fam",
            block_len=32,
            # one segment, so that an answer that crosses a block's end continues from the digits
            # before it (docs/log.md)
            memory_segments=1,
            fam_len=16,
            # the paper's update, a sum, forgets: see docs/memory.md
            fam_update="gated",
            # gates close at a sigmoid of 0.1 and start at up to 1/36: documents grow sooner than
            # with 0.01, and with the write penalty below filler opens hardly any (docs/log.md)
            fam_gate_threshold=0.1,
            fam_max_timescale=8.0,
            # blends each key with the previous token's, so that a query can find a digit of the
            # passkey by the digit before it, at any position in a block
            smeared_keys=True,
            # queries and keys tell the tokens before theirs: keys are found in a sixth of the steps
            short_conv=4,
            # two layers compile quickly even unrolled, and then run a fifth faster on a CPU
            scan_layers=False,
        ),
        data=DataConfig(
            task="passkey",
            tokenizer="runs/demo/tokenizer.model",
            layout="lanes",
            batch=4,
            length=2048,
            keep_whole=True,
            passkey=PasskeyConfig(
                digits=5,
                min_length=76,
                # documents of any length, so that questions are anywhere in a block, or cross its
                # end
                multiple=1,
                start_length=96,
                max_length=4096,
                # curriculum: documents grow when the accuracy on the current lengths reaches this;
                # a step has many of the short ones
                threshold=0.95,
                ask_every=64,
                # equal to max_length: the key may be anywhere in a document
                needle_within=4096,
                hard_keys=0.5,
                other_weight=0.02,
            ),
        ),
        optimizer=OptimizerConfig(
            learning_rate=5e-3, schedule="cosine", warmup_steps=20, beta2=0.99, final_fraction=0.0
        ),
        train=TrainConfig(steps=600, write_loss=0.01, log_every=5, checkpoint_every=100),
    )
