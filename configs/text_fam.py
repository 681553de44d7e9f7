"""TransformerFAM on text, laptop-sized, with nothing to download (2.2, 3.1.1).

    famjax train text_fam                                    # Python's standard library
    famjax train text_fam data.files='books/*.txt' name=books
    famjax train text_fam model.fam_update=sum model.smeared_keys=false data.files=TRAIN \
        data.batch=4 data.length=1024 data.tokenizer=sp2048.model data.holdout=0 train.steps=2000 \
        name=books_2000

Reads bytes in lanes: each of the 8 rows reads one document from beginning to end, and its memory
is carried from step to step. A block of 64 tokens attends to itself, to the previous block (one
memory segment), and to 16 FAM tokens.

Cost: first command: 11 to 16 minutes on one core, 1.5 to 2.0 times as much as `text_bswa` (from the
time of single steps of 4 rows of 1,024 tokens); third command: 18 minutes.
Expected: the first command's was not measured; third command, an earlier default: 1.760 bits per
byte of three books, where TRAIN is 33 other books and sp2048.model has a SentencePiece vocabulary
of 2,048. `text_bswa`, the same model without FAM, reaches 1.706 in the same time (docs/log.md). On
text a FAM helps where there is no memory segment; with one, `text_delta` has the memory that helps
(docs/results.md).
"""

from famjax.config.schema import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def config() -> Config:
    return Config(
        name="text_fam",
        model=ModelConfig(
            layers=4,
            width=128,
            heads=4,
            mlp_width=256,
            tied=False,
            mixer="fam",
            block_len=64,
            memory_segments=1,
            fam_len=16,
            # the paper's update, sum, forgets early blocks in long documents (docs/memory.md)
            fam_update="gated",
            smeared_keys=True,
            # four small layers run faster unrolled on a CPU, and still compile in seconds
            scan_layers=False,
        ),
        # of as many tokens, 8 rows of 512 learn faster than 2 of 2,048; 32 of 128 are not clearly
        # better (famjax reproduce memory-lanes). The gradient reaches back 8 blocks
        data=DataConfig(layout="lanes", batch=8, length=512),
        optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=50),
        train=TrainConfig(steps=1000),
    )
