"""Hints for option names of other trainers: the name of the equivalent in famjax.

Names are compared in lower case, without leading dashes, with _ for -. A dotted name that ends a
key, such as `lora.rank`, is that key. If another dotted name is unknown, its last part is looked
up: `trainer.max_epochs=3` is looked up as `max_epochs`.
"""

from __future__ import annotations

import re

from famjax.config.keys import key_types

# a config key, an option of the verb ("--batch"), or a sentence, in which {n} stands for the value
# if that is a number, and for N if it is none, and {every} for the value or 100
Hint = str

_RESUME = "run the same command again to resume the run in its folder; there is no option for it"
_CONFIG = "the config comes first, without an option: famjax train text_fam ..."
_EPOCHS = (
    "a run is counted in steps, of data.batch x data.length tokens each: write train.steps=N, "
    "for E epochs N = E x tokens of the documents / tokens of a step"
)
_TRY = (
    "write train.steps=1 name=try to try one step; famjax plan says what a job needs before it runs"
)
_DEVICES = (
    "all devices that JAX finds are used, and mesh=auto divides the work; select devices with "
    "CUDA_VISIBLE_DEVICES or JAX_PLATFORMS=cpu in the environment"
)
_PRECISION = "write model.dtype=bfloat16 (or float32, the default); there is no float16"
_EVAL = (
    "write eval.every={every} for the loss of held-out text while training; famjax eval RUN "
    "evaluates tasks, also while training runs"
)
_LOGGING = (
    "metrics are in RUN/metrics.jsonl and RUN/tensorboard every train.log_every steps; nothing is "
    "sent anywhere"
)
_MODEL = "the config sets the shape (famjax train --help), init=FOLDER the initial weights"
_HOLDOUT = "write data.holdout=N: one document in N is kept for famjax eval; 0 keeps none"
_ROWS = "data.batch is the global batch size; train.accumulate=N splits it into N microbatches"
_LAUNCH = "start one process per host: --coordinator HOST:PORT --process-id I --process-count N"
_LORA = "write init=FOLDER model.lora.rank={n}"
_FULL_WEIGHTS = "weights are not quantized; model.lora.base=bfloat16 keeps frozen ones in 16 bits"
_FSDP = "write mesh.fsdp={n}, or mesh.fsdp=-1 for all devices"
_RUN = "the run's folder comes first, without an option: famjax {verb} RUN"

TRAIN: dict[str, Hint] = {
    # what is trained
    "c": _CONFIG,
    "config": _CONFIG,
    "cfg": _CONFIG,
    "config_file": _CONFIG,
    "config_name": _CONFIG,
    "config_path": _CONFIG,
    "m": _MODEL,
    "model": _MODEL,
    "model_name": _MODEL,
    "model_type": _MODEL,
    "model_name_or_path": "init",
    "pretrained": "init",
    "load_from": "init",
    "init_from": "init",
    "finetune": "famjax convert makes a folder of a pretrained model; write init=FOLDER",
    "dim": "model.width",
    "d_model": "model.width",
    "n_embd": "model.width",
    "hidden_size": "model.width",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "num_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "lora": _LORA,
    "use_lora": _LORA,
    "peft": _LORA,
    "dora": f"there are plain adapters only: {_LORA}",
    "use_dora": f"there are plain adapters only: {_LORA}",
    "target_modules": "model.lora.on",
    "lora_target_modules": "model.lora.on",
    "lora_target": "model.lora.on",
    **dict.fromkeys(("qlora", "load_in_4bit", "load_in_8bit", "bits"), _FULL_WEIGHTS),
    **dict.fromkeys(("quantization", "quantization_config", "quantize"), _FULL_WEIGHTS),
    "lora_r": "model.lora.rank",
    "lora.r": "model.lora.rank",
    "model.lora.r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "gradient_checkpointing": "write model.remat=layer (or attention, block)",
    "remat": "model.remat",
    # how long, and where
    "resume": _RESUME,
    "r": _RESUME,
    "resume_from": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "continue": _RESUME,
    "auto_resume": _RESUME,
    "load_checkpoint": _RESUME,
    "ckpt": _RESUME,
    "ckpt_path": _RESUME,
    "checkpoint": _RESUME,
    "overwrite_output_dir": "remove the run's folder, or give --run another one",
    "overwrite": "remove the run's folder, or give --run another one",
    "force": "remove the run's folder, or give --run another one",
    "dry_run": _TRY,
    "dryrun": _TRY,
    "fast_dev_run": _TRY,
    "epoch": _EPOCHS,
    "epochs": _EPOCHS,
    "n_epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "step": "train.steps",
    "steps": "train.steps",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "train_steps": "train.steps",
    "num_train_steps": "train.steps",
    "total_steps": "train.steps",
    "max_iters": "train.steps",
    "iters": "train.steps",
    "iterations": "train.steps",
    "o": "write --run FOLDER",
    "out": "write --run FOLDER",
    "output": "write --run FOLDER",
    "out_dir": "write --run FOLDER",
    "outdir": "write --run FOLDER",
    "output_dir": "write --run FOLDER",
    "save_dir": "write --run FOLDER",
    "logdir": "write --run FOLDER",
    "log_dir": "write --run FOLDER",
    "workdir": "write --run FOLDER",
    "model_dir": "write --run FOLDER",
    "run_dir": "write --run FOLDER",
    "base_output_directory": "write --run FOLDER",
    "run_name": "name",
    "experiment": "name",
    "s": "seed",
    "random_seed": "seed",
    "manual_seed": "seed",
    # data
    "d": "data.files",
    "data": "data.files",
    "data_dir": "data.files",
    "data_path": "data.files",
    "dataset": "data.files",
    "dataset_name": "data.files",
    "dataset_path": "data.files",
    "train_file": "data.files",
    "train_files": "data.files",
    "files": "data.files",
    "task": "data.task",
    "tokenizer_name": "data.tokenizer",
    "tokenizer_path": "data.tokenizer",
    "b": "data.batch",
    "bs": "data.batch",
    "batch": "data.batch",
    "batch_size": "data.batch",
    "batchsize": "data.batch",
    "train_batch_size": "data.batch",
    "global_batch_size": "data.batch",
    "per_device_batch_size": _ROWS,
    "per_device_train_batch_size": _ROWS,
    "micro_batch_size": _ROWS,
    "length": "data.length",
    "seq_len": "data.length",
    "seq_length": "data.length",
    "sequence_length": "data.length",
    "max_length": "data.length",
    "max_seq_len": "data.length",
    "max_seq_length": "data.length",
    "cutoff_len": "data.length",
    "max_target_length": "data.length",
    "context_length": "data.length",
    "block_size": "data.length",
    "packing": "write data.layout=packed",
    "val_split": _HOLDOUT,
    "val_size": _HOLDOUT,
    "validation_split": _HOLDOUT,
    "test_size": _HOLDOUT,
    "shuffle": "documents are reshuffled in each epoch, by seed",
    "workers": "a thread prefetches batches; there are no workers to configure",
    "num_workers": "a thread prefetches batches; there are no workers to configure",
    # optimization
    "lr": "optimizer.learning_rate",
    "learning_rate": "optimizer.learning_rate",
    "base_lr": "optimizer.learning_rate",
    "max_lr": "optimizer.learning_rate",
    "min_lr": "the final rate is optimizer.final_fraction x optimizer.learning_rate",
    "optim": "optimizer.name",
    "optimizer": "optimizer.name",
    "scheduler": "optimizer.schedule",
    "lr_scheduler": "optimizer.schedule",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_schedule": "optimizer.schedule",
    "warmup": "optimizer.warmup_steps",
    "warmup_iters": "optimizer.warmup_steps",
    "warmup_ratio": "write optimizer.warmup_steps=N, a number of steps",
    "wd": "optimizer.weight_decay",
    "momentum": "optimizer.beta1",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "grad_clip": "optimizer.clip_norm",
    "clip": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "gradient_clip_val": "optimizer.clip_norm",
    "grad_accum": "train.accumulate",
    "accumulate_grad_batches": "train.accumulate",
    "gradient_accumulation_steps": "train.accumulate",
    "label_smoothing": "train.label_smoothing",
    "label_smoothing_factor": "train.label_smoothing",
    "dropout": "write model.dropout.residual=P, .hidden, .attention, .embedding, .output or .layer",
    # what it runs on
    "device": _DEVICES,
    "devices": _DEVICES,
    "accelerator": _DEVICES,
    "gpu": _DEVICES,
    "gpus": _DEVICES,
    "n_gpus": _DEVICES,
    "num_gpus": _DEVICES,
    "cuda": _DEVICES,
    "cpu": _DEVICES,
    "use_cpu": _DEVICES,
    "tpu": _DEVICES,
    "nproc_per_node": _DEVICES,
    "strategy": "mesh.data, mesh.fsdp, mesh.tensor and mesh.sequence divide the work, or mesh=auto",
    "fsdp": _FSDP,
    "deepspeed": _FSDP,
    "zero_stage": _FSDP,
    "tensor_parallel": "mesh.tensor",
    "tp": "mesh.tensor",
    "nodes": _LAUNCH,
    "num_nodes": _LAUNCH,
    "nnodes": _LAUNCH,
    "node_rank": _LAUNCH,
    "rank": _LAUNCH,
    "local_rank": _LAUNCH,
    "world_size": _LAUNCH,
    "master_addr": _LAUNCH,
    "master_port": _LAUNCH,
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "amp": _PRECISION,
    "half": _PRECISION,
    "precision": _PRECISION,
    "mixed_precision": _PRECISION,
    "dtype": "model.dtype",
    "compile": "every step is compiled; there is no option for it",
    # logging and checkpoints
    "log_interval": "train.log_every",
    "logging_steps": "train.log_every",
    "log_steps": "train.log_every",
    "save_steps": "train.checkpoint_every",
    "save_every": "train.checkpoint_every",
    "save_interval": "train.checkpoint_every",
    "checkpoint_period": "train.checkpoint_every",
    "save_total_limit": "train.keep",
    "keep_last": "train.keep",
    "eval": _EVAL,
    "do_eval": _EVAL,
    "do_train": "famjax train trains; leave it out",
    "eval_steps": _EVAL,
    "eval_every": _EVAL,
    "eval_interval": _EVAL,
    "evaluation_strategy": _EVAL,
    "eval_strategy": _EVAL,
    "wandb": _LOGGING,
    "wandb_project": _LOGGING,
    "use_wandb": _LOGGING,
    "report_to": _LOGGING,
    "tensorboard": _LOGGING,
    "profile": "write profile.steps=10:15 for a trace of these steps",
    "patience": "a run ends at train.steps; stop it earlier with Ctrl-C, which saves",
    "early_stopping": "a run ends at train.steps; stop it earlier with Ctrl-C, which saves",
    "q": "write 2>/dev/null to silence a run",
    "quiet": "write 2>/dev/null to silence a run",
    "v": "metrics of each step are in RUN/metrics.jsonl; famjax plan shows what is compiled",
    "verbose": "metrics of each step are in RUN/metrics.jsonl; famjax plan shows what is compiled",
    "debug": "metrics of each step are in RUN/metrics.jsonl; famjax plan shows what is compiled",
}

# transformers' names of projections
_PROJECTIONS = {
    **{f"{name}_proj": f"attention.{name}" for name in ("q", "k", "v")},
    "o_proj": "attention.out",
    **{f"{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")},
}

# hints for the verbs that read a run
_RUN_VERBS: dict[str, Hint] = {
    **dict.fromkeys(("run", "r", "run_dir", "model", "m", "model_path", "model_dir"), _RUN),
    **dict.fromkeys(("model_name_or_path", "checkpoint", "ckpt", "checkpoint_path"), _RUN),
    **dict.fromkeys(("device", "gpu", "gpus", "cuda", "cpu"), _DEVICES),
    "fp16": "the type is the run's model.dtype",
    "bf16": "the type is the run's model.dtype",
    "step": "the newest valid checkpoint is read; earlier ones through famjax.open_run(RUN, step)",
}

HINTS: dict[str, dict[str, Hint]] = {
    "train": TRAIN,
    "eval": {
        **_RUN_VERBS,
        **dict.fromkeys(("data", "data_path", "dataset", "files", "file"), "--tasks text:FILES"),
        "task": "--tasks",
        "bs": "--batch",
        "batch_size": "--batch",
        **dict.fromkeys(("n", "limit", "num_examples", "max_examples", "samples"), "--examples"),
        **dict.fromkeys(("length", "seq_len", "max_length", "context_length"), "--lengths"),
        "stride": "--score",
        "output": "write --json > FILE",
        "output_path": "write --json > FILE",
        "num_fewshot": "prompts have no examples; famjax generate continues any prompt",
    },
    "generate": {
        **_RUN_VERBS,
        "p": "--prompt",
        "text": "--prompt",
        "input": "--prompt",
        "n": "--max-tokens",
        "length": "--max-tokens",
        **dict.fromkeys(
            ("max_new_tokens", "max_length", "num_tokens", "n_predict"), "--max-tokens"
        ),
        "t": "--temperature",
        "temp": "--temperature",
        **dict.fromkeys(("do_sample", "sample", "greedy"), "--temperature"),
        **dict.fromkeys(("file", "document", "context", "prompt_file"), "--read"),
        **dict.fromkeys(("stop_sequence", "stop_sequences", "eos"), "--stop"),
        "num_samples": "each call writes one text; call again with another --seed",
        "num_return_sequences": "each call writes one text; call again with another --seed",
        **dict.fromkeys(("beams", "num_beams", "beam_size", "beam_width"), "--beam"),
        "no_repeat_ngram_size": "--no-repeat-ngram",
        "stream": "text is always streamed",
        "out": "write > FILE",
        "output": "write > FILE",
    },
    "analyze": _RUN_VERBS,
    "average": {
        **_RUN_VERBS,
        **dict.fromkeys(("n", "num", "checkpoints", "num_update_checkpoints"), "--last"),
        **dict.fromkeys(("o", "output", "output_dir"), "--out"),
    },
    "export": {
        **_RUN_VERBS,
        **dict.fromkeys(
            ("o", "out", "output", "output_dir"), "the folder comes after the run: RUN FOLDER"
        ),
        "type": "--format",
    },
    "convert": {
        **dict.fromkeys(
            ("o", "out", "output", "output_dir"), "the folder comes second: HF_FOLDER FOLDER"
        ),
        **dict.fromkeys(
            ("model", "m", "model_name_or_path", "hf"), "the folder comes first: HF_FOLDER FOLDER"
        ),
        "mixer": "--to",
        "attention": "--to",
    },
    # words in place of a verb
    "": {
        **dict.fromkeys(("evaluate", "test", "validate", "ppl", "benchmark_run"), "eval"),
        **dict.fromkeys(
            ("sample", "predict", "infer", "inference", "chat", "complete"), "generate"
        ),
        **dict.fromkeys(("fit", "run", "pretrain", "resume", "continue", "sft"), "train"),
        "finetune": "train finetune",
        "serve": "export",
        "save": "export",
        "import": "convert",
        "tokenize": "tokenizer",
        "benchmark": "bench",
        "info": "doctor",
        "env": "doctor",
    },
}


def find_hint(name: str, value: str = "", verb: str = "train") -> str:
    """Return "; ..." with the famjax equivalent of another trainer's option, or "" if unknown.

    Args:
      name: as typed, such as "--batch-size".
      value: the option's value, which is repeated in the hint.
      verb: the famjax verb; "" if `name` is in place of the verb.
    """
    known = HINTS.get(verb, {})
    plain = name.lstrip("-+").lower().replace("-", "_")
    ends = [key for key in key_types() if "." in plain and key.endswith(f".{plain}")]
    last = plain.rpartition(".")[2]
    hint = known.get(plain)
    if hint is None and verb == "train":
        hint = next(iter(ends), None)
    if hint is None and len(last) > 1:  # letters are options, not parts of a name
        hint = known.get(last)
    if hint is None:
        return ""
    if verb == "train" and hint in key_types():
        value = (hint == "model.lora.on" and translate_projections(value)) or value
        return f"; write {hint}={value or '...'}"
    if hint.startswith("--"):
        return f"; write {hint}" if " " in hint else f"; write {hint} {value or '...'}"
    if not verb:
        return f"; did you mean famjax {hint}?"
    is_number = value.isascii() and value.isdigit()
    n, every = (value, value) if is_number else ("N", "100")
    return f"; {hint.format(verb=verb, n=n, every=every)}"


def translate_projections(text: str) -> str:
    """Return "attention.q,mlp.up" for "q_proj,up_proj", or "" if it names no such projection."""
    names = re.findall(r"[\w.*-]+", text)
    if not any(name in _PROJECTIONS for name in names):
        return ""
    return ",".join(_PROJECTIONS.get(name, name) for name in names)
