"""Passkey retrieval with feedback memory, trained in lanes (TransformerFAM 3.2, D.1, Figure 3).

Command:  famjax train passkey data.tokenizer=runs/demo/tokenizer.model
          (`make demo` makes that tokenizer and runs this config, and BSWA with M1 and M2)
Cost:     see docs/results.md
Expected: whole keys at every length to 262,144 tokens; the paper: 100% to 260k.
"""
