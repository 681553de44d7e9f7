"""T2R of a trained translation model (T2R 3.2.2, A.1.2, Tables 2 and 6), with linear attention for
both causal attention (4 features) and attention to the encoder (32 features).

Command:  famjax train t2r_mt_paper init=runs/wmt14_ende_paper_average model.mixer=linear \
              model.linear.features=4 model.encoder.cross=linear
          famjax average runs/t2r_mt_paper --last 5 --out runs/t2r_mt_paper_average
          famjax eval runs/t2r_mt_paper_average --tasks translate:test.en=test.de --beam 5 \
              --length-penalty 0.6
          # without a teacher (Table 5); average and evaluate it in the same way
          famjax train t2r_mt_paper optimizer.learning_rate=3e-4 train.steps=30000 \
              name=t2r_mt_scratch_paper
Cost:     needs accelerators; not run here
Expected: tokenized BLEU 28.7 on WMT14 English-German, 27.5 without a teacher; the teacher 28.9
          (Table 2)

The model of this config is the one without a teacher; with `init` it is the teacher's, apart from
what the command replaces. The hyperparameters are the teacher's, except for the learning rate of
2e-4 and 20,000 steps (3.2.2, Table 6). The paper averages the checkpoints of the last five epochs;
here the last five checkpoints are averaged. No position is rotated, so the feature maps are
folded into the projections for inference. The teachers for other languages, with the commands that
make them recurrent, are `wmt14_enfr_paper` (60,000 steps without a teacher) and `wmt17_zhen_paper`.
For departures of the model, the tokens and the optimizer see `_seq2seq_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_seq2seq_paper"),
        {
            "name": "t2r_mt_paper",
            "model.mixer": "linear",
            "model.linear.features": 4,
            "model.encoder.cross": "linear",
            "model.encoder.features": 32,
            "optimizer.learning_rate": 2e-4,
            "train.steps": 20000,
        },
    )
