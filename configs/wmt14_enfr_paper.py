"""WMT14 English-French at the paper's size: Transformer big (T2R A.1.2, Tables 2 and 5).

Command:  famjax tokenizer train train.en train.fr --vocab-size 32000 --out joint.model
          famjax train wmt14_enfr_paper
          famjax average runs/wmt14_enfr_paper --last 5 --out runs/wmt14_enfr_paper_average
          famjax eval runs/wmt14_enfr_paper_average --tasks translate:test.en=test.fr --beam 5 \
              --length-penalty 0.6
          # turn it into a recurrent network
          famjax train t2r_mt_paper init=runs/wmt14_enfr_paper_average model.mixer=linear \
              model.linear.features=4 model.encoder.cross=linear data.target=train.fr \
              train.steps=40000 name=t2r_enfr_paper
          famjax average runs/t2r_enfr_paper --last 5 --out runs/t2r_enfr_paper_average
          famjax eval runs/t2r_enfr_paper_average --tasks translate:test.en=test.fr --beam 5 \
              --length-penalty 0.6
Cost:     needs accelerators; not run here
Expected: tokenized BLEU (compounds not split) 42.2, and 42.1 for the recurrent network (Table 2)

The paper uses joint BPE, and does not give the size of the vocabulary. It averages the checkpoints
of the last five epochs; here the last five, 1,000 steps apart, are averaged. For departures of the
model, the tokens and the optimizer see `_seq2seq_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_seq2seq_paper"),
        {"name": "wmt14_enfr_paper", "data.target": "train.fr", "train.steps": 60000},
    )
