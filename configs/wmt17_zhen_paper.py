"""WMT17 Chinese-English at the paper's size: Transformer big (T2R A.1.2, Tables 2 and 5).

Command:  famjax tokenizer train train.zh train.en --vocab-size 64000 --out joint.model
          famjax train wmt17_zhen_paper
          famjax average runs/wmt17_zhen_paper --last 5 --out runs/wmt17_zhen_paper_average
          famjax eval runs/wmt17_zhen_paper_average --tasks translate:test.zh=test.en --beam 5 \
              --length-penalty 0.6
          # turn it into a recurrent network
          famjax train t2r_mt_paper init=runs/wmt17_zhen_paper_average model.mixer=linear \
              model.linear.features=4 model.encoder.cross=linear data.source=train.zh \
              data.target=train.en name=t2r_zhen_paper
          famjax average runs/t2r_zhen_paper --last 5 --out runs/t2r_zhen_paper_average
          famjax eval runs/t2r_zhen_paper_average --tasks translate:test.zh=test.en --beam 5 \
              --length-penalty 0.6
Cost:     needs accelerators; not run here
Expected: tokenized BLEU (compounds not split) 24.2, and 23.8 for the recurrent network (Table 2)

As in the paper, the decoder's input and output share their embedding, and the encoder has one of
its own. Departures: one vocabulary for both languages, twice as large, where the paper has one for
each (of a size that it does not give); the last five checkpoints, 1,000 steps apart, are averaged,
where the paper averages those of the last five epochs; and those of the model, the tokens and the
optimizer, see `_seq2seq_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_seq2seq_paper"),
        {
            "name": "wmt17_zhen_paper",
            "model.encoder.shared": False,
            "data.source": "train.zh",
            "data.target": "train.en",
        },
    )
