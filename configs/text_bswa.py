"""TransformerBSWA on text: the baseline of `text_fam`, without feedback memory (2.1).

    famjax train text_bswa                                   # Python's standard library
    famjax train text_bswa data.files='books/*.txt' name=books_bswa
    famjax train text_bswa model.smeared_keys=false data.files=TRAIN data.batch=4 data.length=1024 \
        data.tokenizer=sp2048.model data.holdout=0 train.steps=2850 name=books_bswa_2850

Reads bytes in lanes: each of the 8 rows reads one document from beginning to end, and its memory
is carried from step to step. A block of 64 tokens attends to itself and to the previous block (one
memory segment).

Cost: first command: about 8 minutes on one core (from the time of single steps of 4 rows of 1,024
tokens); third command: 18 minutes.
Expected: third command: 1.706 bits per byte of three books, where TRAIN is 33 other books and
sp2048.model has a SentencePiece vocabulary of 2,048 (docs/log.md). Compare with `text_fam`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("text_fam"),
        {
            "name": "text_bswa",
            "model.mixer": "bswa",
        },
    )
