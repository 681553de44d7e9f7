"""Passkey retrieval with up to four named keys, of which the question names one (docs/memory.md).

Command:  make demo (trains the tokenizer)
          famjax train passkey_named data.tokenizer=runs/demo/tokenizer.model
          famjax eval runs/passkey_named --tasks passkey --lengths 256,4096,65536 --examples 32
Cost:     46 to 68 minutes on one core of a busy machine, evaluation included
Expected: all of 480 keys from 256 to 65,536 tokens (three seeds: famjax reproduce memory-keys
          --only DELTA); with two layers 34 to 44%
"""

from famjax import Config, load_config, replace_values


def config() -> Config:
    return replace_values(
        load_config("passkey"),
        {
            "name": "passkey_named",
            "model.mixer": "delta",
            # with two layers, distinguishing the named keys takes far more steps
            "model.layers": 3,
            # measured without one
            "model.short_conv": 0,
            "data.passkey.keys": 4,
            "data.passkey.min_length": 97,
            "data.passkey.start_length": 97,
            # the hard keys keep short documents below 95% of digits
            "data.passkey.threshold": 0.88,
            "train.steps": 3000,
            "train.write_loss": 0.1,
        },
    )
