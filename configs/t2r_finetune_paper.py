"""A pretrained Transformer becomes an RNN on WikiText-103, at the size of "Finetuning Pretrained
Transformers into RNNs" (3.2.1, A.1.1, Table 4).

Command:  famjax convert runs/t2r_lm_paper models/t2r_paper --to t2r --feature-size 32   # first
          famjax train t2r_finetune_paper init=models/t2r_paper
          famjax eval runs/t2r_finetune_paper --tasks text:wiki.test.tokens --window 512 --score 256
          to keep every fourth layer from the top (T2R 75%): --keep-every 4 in the first command
          RFA: model.linear.map=rfa at the end of the first command
          ELU: model.linear.map=elu instead of --feature-size 32
Cost:     8 accelerators (the paper: 95 to 104 GPU hours); not run here
Expected: perplexity of the test set (paper, Table 1; in brackets the validation set,
          --tasks text:wiki.valid.tokens; nothing is held out of the training text):
          T2R 19.6 (19.0), T2R 75% 18.5 (17.9), RFA 21.6 (20.8), ELU 22.2 (21.5)

Shape, tokenizer and weights come from `init`. Dropout is the teacher's (`t2r_lm_paper`); dropout of
attention weights applies to the layers that keep their attention.

Learning rate: from 0.5 to 5e-5, as in Table 4; in the paper's text it ends at 5e-6. 8K warm-up
steps and a period of 135K are 1K more than the run's 142K steps; here the cosine ends with the run.
The rate warms up from 0: see `_t2r_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_t2r_paper"),
        {
            "name": "t2r_finetune_paper",
            # 3,072 tokens on each of 8 GPUs: 24,576
            "data.batch": 48,
            "optimizer.learning_rate": 0.5,
            "optimizer.warmup_steps": 8_000,
            "train.steps": 142_000,
        },
    )
