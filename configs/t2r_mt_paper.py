"""T2R of a trained translation model (T2R 3.2.2, A.1.2, Tables 2 and 6): linear attention, both
causal (4 features) and to the encoder (32).

Command:  famjax train t2r_mt_paper init=runs/wmt14_ende_paper_average
          famjax average runs/t2r_mt_paper --last 5 --out runs/t2r_mt_paper_average
          famjax eval runs/t2r_mt_paper_average --tasks translate:test.en=test.de --beam 5 \
              --length-penalty 0.6
Cost:     needs accelerators; not run here
Expected: tokenized BLEU 28.7 on WMT14 English-German, 27.5 without a teacher (Table 2)

With the teacher's hyperparameters but rate and steps, which Table 6 lowers; the values here are
chosen, for the text of that table cannot be read in the copy that we have. Other languages
(WMT14 English-French, WMT17 Chinese-English) by data.source, data.target and data.tokenizer.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_seq2seq_paper"),
        {
            "name": "t2r_mt_paper",
            "model.mixer": "linear",
            "model.linear.features": 4,
            "model.linear.rope": False,
            "model.encoder.cross": "linear",
            "model.encoder.features": 32,
            "optimizer.learning_rate": 3e-4,
            "train.steps": 15000,
        },
    )
