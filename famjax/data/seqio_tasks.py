"""Documents from seqio tasks and mixtures and from TFDS data sets. Needs the extra seqio.

TensorFlow is imported only when a source is created, since its import takes seconds.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from famjax.config.schema import DataConfig
from famjax.core.errors import UserError, did_you_mean
from famjax.core.optional import install_command
from famjax.data.sources import Key, Piece, Source, Split
from famjax.tokenizers.tokenizer import Tokenizer

_SHUFFLE_BUFFER = 1000


class TfSource(Source):
    """Documents of a seqio task or mixture, or of a TFDS data set; each example is a document.

    With seqio a document has the task's own tokens, untrimmed: "inputs", if there are any, with
    weight 0, then "targets". With TFDS it is the text of one feature. Lanes read disjoint shards of
    the examples, which are reshuffled in each epoch.

    The held-out examples are the data set's own "validation" or "test" split.

    Args:
      data: config in which `seqio` or `tfds` is set.
      tokenizer: encodes text; with seqio, it must have the task's vocabulary.
      seed: seed of the order.
      split: which examples to read.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, seed: int, split: Split = "train"):
        _import_tensorflow()
        self._set: _Seqio | _Tfds
        self._set = _Seqio(data, tokenizer) if data.seqio else _Tfds(data, tokenizer)
        self._split = self._set.split(split)
        self._tokenizer = tokenizer
        self._seed = seed
        # for each lane: number of documents read -> iterator over the following ones. A lane can
        # have several iterators after documents were reassigned (`famjax.data.reassign`), since the
        # new lanes read a previous lane's documents at different speeds
        self._open: defaultdict[tuple[int, int], dict[int, Iterator[Piece]]] = defaultdict(dict)

    def report(self) -> str:
        """Return a line for the user."""
        return f"{self._set.name}, split {self._split!r}"

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        return [lane, lanes, k]

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        lane, lanes, k = key
        opened = self._open[lane, lanes]
        # take the most advanced iterator, since a new one has to read all earlier documents
        done = max((n for n in opened if n <= k), default=None)
        if done is None:
            examples = self._examples(lane, lanes, k)
        else:
            examples = opened.pop(done)
            for _ in range(k - done):
                next(examples)
        document = self._add_bos_eos(next(examples))
        opened[k + 1] = examples
        if piece == 0:
            yield document

    def get_state(self) -> dict[str, Any]:
        """Return a description that identifies the data set; keys are valid only for this one."""
        return {"set": self._set.name, "split": self._split, **self._set.metadata(self._split)}

    def set_state(self, state: dict[str, Any]) -> None:
        now = self.get_state()
        if state != now:
            changed = ", ".join(
                f"{key} {state.get(key)} then, {now.get(key)} here"
                for key in sorted({*state, *now})
                if state.get(key) != now.get(key)
            )
            raise UserError(
                f"{self._set.name}: the set changed since the run was saved ({changed}); restore "
                "it, or start another run"
            )

    def _examples(self, lane: int, lanes: int, skip: int) -> Iterator[Piece]:
        """Yield the tokens of a lane's examples forever, without the first `skip` examples."""
        epoch = 0
        while True:
            seed = int(np.random.SeedSequence((self._seed, epoch)).generate_state(1)[0] >> 1)
            dataset = self._set.dataset(self._split, lane, lanes, seed)
            has_examples = False
            for example in dataset.skip(skip).as_numpy_iterator():
                has_examples = True
                yield self._set.tokens(example)
            if not has_examples:
                # the epoch has ended within the skipped examples, or has none
                size = int(dataset.reduce(np.int64(0), lambda count, _: count + 1))
                if size == 0:
                    raise UserError(
                        f"{self._set.name}: fewer examples than lanes; lower data.batch={lanes}"
                    )
                skip -= size
            else:
                skip = 0
            epoch += 1

    def _add_bos_eos(self, piece: Piece) -> Piece:
        """Add bos and eos to an example's tokens, unless they are present."""
        tokens, weights = piece.tokens, piece.weights
        if not len(tokens) or tokens[0] != self._tokenizer.bos_id:
            tokens = np.append(self._tokenizer.bos_id, tokens)
            weights = np.append(0, weights)
        if tokens[-1] != self._tokenizer.eos_id:
            tokens = np.append(tokens, self._tokenizer.eos_id)
            weights = np.append(weights, 1)
        return Piece(tokens.astype(np.int32), weights.astype(np.float32))


class _Seqio:
    def __init__(self, data: DataConfig, tokenizer: Tokenizer):
        import seqio

        self._seqio = seqio
        self.name = f"data.seqio={data.seqio}"
        known = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
        if data.seqio not in known:
            raise UserError(
                f"{self.name}: no such task or mixture is registered; import the module that "
                f"registers it in the configuration{did_you_mean(data.seqio, known)}"
            )
        self._task = seqio.get_mixture_or_task(data.seqio)
        features = self._task.output_features
        if "targets" not in features:
            raise UserError(f"{self.name}: has no feature 'targets', only {', '.join(features)}")
        self._features = [name for name in ("inputs", "targets") if name in features]
        for feature in self._features:
            size = features[feature].vocabulary.vocab_size
            if size > tokenizer.vocab_size:
                raise UserError(
                    f"{self.name}: its vocabulary has {size} ids, data.tokenizer={tokenizer.name} "
                    f"only {tokenizer.vocab_size}; give the task's own SentencePiece model"
                )

    def split(self, split: Split) -> str:
        return _split_name(self.name, split, list(self._task.splits))

    def metadata(self, split: str) -> dict[str, Any]:
        tasks = getattr(self._task, "tasks", [self._task])
        counts = [task.num_input_examples(split) for task in tasks if split in task.splits]
        return {"examples": counts}

    def dataset(self, split: str, lane: int, lanes: int, seed: int) -> Any:
        return self._task.get_dataset(
            sequence_length=None,
            split=split,
            shuffle=True,
            seed=seed,
            shard_info=self._seqio.ShardInfo(index=lane, num_shards=lanes),
            # in a finite mixture the smaller tasks would run out first
            num_epochs=None if isinstance(self._task, self._seqio.Mixture) else 1,
            trim_output_features=False,
        )

    def tokens(self, example: dict[str, np.ndarray]) -> Piece:
        parts = [example[name] for name in self._features if name in example]
        weights = [np.full(len(part), float(i == len(parts) - 1)) for i, part in enumerate(parts)]
        return Piece(np.concatenate(parts), np.concatenate(weights))


class _Tfds:
    def __init__(self, data: DataConfig, tokenizer: Tokenizer):
        import tensorflow_datasets as tfds

        self._tfds = tfds
        self.name = f"data.tfds={data.tfds}"
        self._feature = data.feature
        self._tokenizer = tokenizer
        self._builder = _prepare(self.name, data.tfds)
        features = list(self._builder.info.features)
        if self._feature not in features:
            raise UserError(
                f"{self.name}: no feature {self._feature!r}, set data.feature to one of "
                + ", ".join(features)
            )

    def split(self, split: Split) -> str:
        return _split_name(self.name, split, list(self._builder.info.splits))

    def metadata(self, split: str) -> dict[str, Any]:
        info = self._builder.info
        return {"examples": info.splits[split].num_examples, "version": str(info.version)}

    def dataset(self, split: str, lane: int, lanes: int, seed: int) -> Any:
        read = self._tfds.ReadConfig(shuffle_seed=seed, try_autocache=False)
        dataset = self._builder.as_dataset(split=split, shuffle_files=True, read_config=read)
        return dataset.shard(lanes, lane).shuffle(_SHUFFLE_BUFFER, seed=seed)

    def tokens(self, example: dict[str, Any]) -> Piece:
        text = example[self._feature]
        if not isinstance(text, bytes):
            raise UserError(f"{self.name}: feature {self._feature!r} is not text")
        try:
            tokens = self._tokenizer.encode(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.name}: an example's {self._feature!r} is not UTF-8 at byte {error.start}; "
                "use a data set whose text is"
            ) from None
        return Piece(tokens, np.ones(len(tokens)))


def read_records(name: str) -> Iterator[dict[str, Any]]:
    """Yield the examples of a TFDS data set in order, as values that JSON can represent.

    Args:
      name: "tfds:SET:SPLIT", such as "tfds:scrolls/qasper:validation".

    Raises:
      UserError: the data set is unknown, has no such split or cannot be prepared; or the text of
        an example is not UTF-8.
    """
    _import_tensorflow()
    import tensorflow_datasets as tfds

    wanted, _, split = name.removeprefix("tfds:").partition(":")
    builder = _prepare(name, wanted)
    if split not in builder.info.splits:
        known = ", ".join(builder.info.splits)
        raise UserError(
            f"{name}: has no split {split!r}; write tfds:{wanted}:SPLIT, one of {known}"
        )
    dataset = builder.as_dataset(split=split, shuffle_files=False)
    for number, example in enumerate(tfds.as_numpy(dataset), 1):
        try:
            yield {key: _as_json(value) for key, value in example.items()}
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}: example {number} is not UTF-8 at byte {error.start}; use a data set "
                "whose text is"
            ) from None


def read_texts(name: str) -> Iterator[str]:
    """Yield the texts of a feature of a seqio task, in order.

    If the task keeps the texts before tokenization, these are yielded; otherwise the tokens are
    decoded.

    Args:
      name: "seqio:TASK:SPLIT:FEATURE", such as "seqio:wmt_t2t_ende_v003:train:inputs".

    Raises:
      UserError: no such task is registered, or it has no such split or feature.
    """
    _import_tensorflow()
    import seqio
    import tensorflow_datasets as tfds

    # from the right: a task's name may have colons
    rest, _, feature = name.removeprefix("seqio:").rpartition(":")
    wanted, _, split = rest.rpartition(":")
    if wanted not in seqio.TaskRegistry.names():
        near = did_you_mean(wanted, seqio.TaskRegistry.names())
        raise UserError(
            f"{name}: no such task is registered (mixtures have no order of pairs); import the "
            f"module that registers it in the configuration{near}"
        )
    task = seqio.TaskRegistry.get(wanted)
    for part, given, known in (
        ("split", split, task.splits),
        ("feature", feature, task.output_features),
    ):
        if given not in known:
            raise UserError(
                f"{name}: has no {part} {given!r}; write seqio:{wanted}:SPLIT:FEATURE, with one of "
                f"{', '.join(known)}"
            )
    vocabulary = task.output_features[feature].vocabulary
    # a fixed seed, so that random preprocessors draw the same numbers for sources and targets
    dataset = task.get_dataset(
        sequence_length=None, split=split, shuffle=False, trim_output_features=False, seed=0
    )
    for number, example in enumerate(tfds.as_numpy(dataset), 1):
        text = example.get(f"{feature}_pretokenized")
        if text is None:
            # decoding stops at eos
            yield vocabulary.decode(example[feature].tolist())
            continue
        try:
            yield text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}: example {number} is not UTF-8 at byte {error.start}; use a task whose "
                "text is"
            ) from None


def _as_json(value: Any) -> Any:
    """Convert a NumPy value, or a ragged TFDS value, to text, numbers and lists."""
    if hasattr(value, "to_list"):
        value = value.to_list()
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return [_as_json(each) for each in value] if isinstance(value, list) else value


def _prepare(label: str, name: str) -> Any:
    """Return the builder of a TFDS data set, which is first downloaded if it is not here."""
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name)
        if not builder.data_path.exists():
            print(f"famjax: {label}: TFDS downloads it to {builder.data_dir}", file=sys.stderr)
        builder.download_and_prepare()
    except tfds.core.DatasetNotFoundError:
        # without community data sets: their list is in the cloud, and without a network took 20 s
        near = did_you_mean(name, tfds.list_builders(with_community_datasets=False))
        raise UserError(f"{label}: TFDS knows no such set{near}") from None
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{label}: could not be prepared ({reason}); run `tfds build {name}` where there is a "
            "network, and set TFDS_DATA_DIR to the folder that it wrote"
        ) from None
    return builder


def _split_name(name: str, split: Split, known: list[str]) -> str:
    """Return the name that the data set has for a split."""
    wanted = ["train"] if split == "train" else ["validation", "test"]
    for candidate in wanted:
        if candidate in known:
            return candidate
    raise UserError(f"{name}: has no {' or '.join(wanted)} split, only {', '.join(known)}")


def _import_tensorflow() -> None:
    """Import TensorFlow without its log messages, and hide the accelerators from it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # PyTorch for CUDA comes with triton, which aborts the process if it is loaded after TensorFlow,
    # as in an export; so it is loaded first
    with suppress(ImportError):
        importlib.import_module("triton")
    with _suppress_stderr():
        try:
            import seqio  # noqa: F401
            import tensorflow as tf
            import tensorflow_datasets  # noqa: F401
            from absl import logging
        except ImportError as error:
            missing = (error.name or str(error)).partition(".")[0]
            raise UserError(
                f"seqio and TFDS data sets need {missing}; {install_command(('seqio',))}"
            ) from None
        logging.set_verbosity(logging.ERROR)
        # raises if TensorFlow is initialized already: then the caller has configured it
        with suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")
            tf.config.set_visible_devices([], "TPU")


@contextmanager
def _suppress_stderr() -> Iterator[None]:
    """Discard the process's stderr, to which TensorFlow logs before it can be configured."""
    sys.stderr.flush()
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)
