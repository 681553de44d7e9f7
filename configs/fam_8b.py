"""TransformerFAM 3.1, Tables 5 and 6: the Flan-PaLM 8B shape.

    famjax convert HF_FOLDER FOLDER --to fam model.fam_update=sum model.fam_len=64 \
        model.block_len=1024 model.memory_segments=3
    famjax train fam_8b init=FOLDER data.files='flan/*.jsonl.gz'

FOLDER holds pretrained weights, and determines shape and tokenizer. The settings in the first
command give the paper's memory; by default a conversion uses the gated update. The paper's
weights, vocabulary and instruction data are not public, so do not expect the numbers below. Without
init, and with model.lora.rank=0 data.tokenizer=FILE, this shape trains from scratch.

From the paper: 32 layers of width 4096, 32 heads, feed-forward multiplier 4; blocks of 1024 tokens,
3 memory segments, 64 FAM tokens; RSP 0.8, RPO; Adafactor with beta1 0.9 and beta2 0.99 at a
constant rate of 3e-3; 50k steps of 128 rows packed to 8.5k tokens, of which 256 are repeated at the
end with weight 0.1; LoRA of rank 64.
Chosen here, where the paper says nothing: rows of 9216 tokens, which are 9 blocks, the fewest that
hold 8.5k tokens, the prompt and the repetition; SwiGLU, as in PaLM, which gives 8.6B parameters
without the embedding table; RMSNorm; gradients clipped at norm 1; bfloat16. In Adafactor the
decay of second moments rises to beta2 as 1 - t^-0.8, and updates are clipped at RMS 1 and scaled by
the parameter's RMS.

As in the paper, none of the instructions is held out. Next-token accuracy, as the paper has it for
PG-19:
famjax eval runs/fam_8b --tasks text:'pg19/test/*.txt'

Cost: the paper used 64 TPUv5 cores and reports no time; not measured by us.
Expected: in the paper, finetuned from Flan-PaLM 8B, PG-19 accuracy 52.9, NarrativeQA 19.3
(Table 1).
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("_fam_paper"),
        {
            "name": "fam_8b",
            "model.layers": 32,
            "model.width": 4096,
            "model.heads": 32,
            "model.mlp_width": 4 * 4096,
        },
    )
