"""WMT14 English-German at the papers' size: Transformer big.

Feedback Transformer v3 4.2.1 and Table 8, T2R A.1.2 and Table 5.

Command:  famjax tokenizer train train.en train.de --vocab-size 32000 --out joint.model
          famjax train wmt14_ende_paper
          famjax average runs/wmt14_ende_paper --last 10 --out runs/wmt14_ende_paper_average
          # find the length penalty with the best BLEU on newstest2013 (FT3); T2R has 0.6
          famjax eval runs/wmt14_ende_paper_average --tasks translate:val.en=val.de --beam 5 --tune
          famjax eval runs/wmt14_ende_paper_average --tasks translate:test.en=test.de --beam 5 \
              --length-penalty 0.6
          # the Feedback Transformer's decoder; also with model.layers=1, 2 and 4 (Figure 4), as the
          # Transformer's with this rate, and with 12 encoder layers and 2 decoder layers, BLEU
          # 29.0: model.encoder.layers=12 model.layers=2 model.dropout.layer=0.1
          famjax train wmt14_ende_paper model.stack=feedback model.feedback.span=512 \
              optimizer.learning_rate=1e-3 name=wmt14_ende_paper_feedback
Cost:     needs accelerators; not run here
Expected: tokenized BLEU (compounds split) 28.9 (T2R, Table 2); 29.5 with the Feedback Transformer's
          decoder, 28.3 if it has one layer; 29.3 with a Transformer's (Ott et al., 2018), 27.3 if
          that has one layer (Feedback Transformer v3, Table 2, Figure 4)

There are 4.5 million training pairs, in the Feedback Transformer's paper those of WMT16; val is
newstest2013, and test newstest2014. A step has 460,000 target tokens (T2R A.1.2). The Feedback
Transformer's paper gives a learning rate of 1e-3 and no number of steps; the steps are those of
T2R's Table 5. Its layers share keys and values "on large datasets" (4), so they do here. The
last 10 checkpoints are averaged, as in that paper; T2R averages those of the last five epochs. For
departures of the model, the tokens and the optimizer see `_seq2seq_paper`.
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(load_config("_seq2seq_paper"), {"name": "wmt14_ende_paper"})
