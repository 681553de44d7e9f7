"""`famjax generate RUN --prompt TEXT [--beam N] [--chat] [--read FILE] [--state-out F] ...`.

`famjax generate RUN --prompts FILE` does it for each line of a file.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from famjax.cli.arguments import RunArgument
from famjax.cli.main import named_as_flags, parse
from famjax.core.errors import UserError
from famjax.core.paths import expanded
from famjax.core.units import inflect
from famjax.processes import runtime

# maximum size of a prompt, which is held in memory
_PROMPT_BYTES = 64 << 20
_MAX_TOKENS = 256
# number of lines of --prompts whose texts are printed together, and of those decoded together
_GROUP, _BATCH = 512, 32
# options that models with an encoder lack
_OF_DECODERS = ("chat", "read", "state_out", "state_in", "small_cache", "stop")

if TYPE_CHECKING:
    from famjax.eval.generate import Generator, Hypothesis
    from famjax.eval.streaming import StreamState
    from famjax.eval.translator import Translation, Translator
    from famjax.train.run import Run


@dataclass(frozen=True)
class Arguments:
    """Generate text with a run: from a prompt, after a document, or from its saved memory."""

    run: RunArgument
    """Folder of the run, or of a Hugging Face model."""
    prompt: str | None = None
    """Text to continue, or the source for a model with an encoder; - reads standard input."""
    prompts: str | None = None
    """Continue each line of this file, or write its target for a model with an encoder,
    one on each line."""
    chat: bool = False
    """Format the prompt as a user's message, with the tokenizer's chat template."""
    read: str | None = None
    """Read this text file, of any size, before the prompt."""
    state_out: str | None = None
    """Save the memory to this file after --read."""
    state_in: str | None = None
    """Start from the memory in this file, which --state-out saved."""
    small_cache: bool = False
    """Cache the memory vector of each token instead of its keys and values: less memory, more
    compute. For the stacks feedback and transformer."""
    max_tokens: int | None = None
    """Maximum number of tokens to write. Default: 256; for a model with an encoder
    twice the source's, rounded up to 16, 32, 48, 64, 96, 128, 192 ..., plus 16, but at most
    the longest target in training."""
    temperature: float = 0.0
    """Sampling temperature: 0 decodes greedily, 1 samples from the model's distribution."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 = all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together reach this probability."""
    beam: int | None = None
    """Beam size: write the likeliest text that beam search finds."""
    length_penalty: float = 1.0
    """Length penalty x of beam search: score log p / length ** x; 0 prefers short texts."""
    no_repeat_ngram: int = 0
    """Size of n-grams that must not occur twice in prompt and text, unless it is sampled; 0 = no
    limit."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Stop before this string; may be given several times."""
    seed: int = 0
    """Random seed of the sampling."""
    mesh: str = ""
    """Shard the model over this machine's devices: auto, or sizes of axes, such as tensor=4.
    Default: use the first device."""


@named_as_flags(Arguments)
def run(argv: list[str]) -> int:
    a = parse(Arguments, argv, "famjax generate")
    _check(a)
    prompt = None if a.prompt is None else _decode_prompt(a.prompt)
    runtime.setup()
    from famjax.convert.inference_mesh import inference_mesh
    from famjax.convert.open import open_model
    from famjax.eval.generate import Generator, check_sampling
    from famjax.eval.state_file import load_state, model_fingerprint
    from famjax.tokenizers.words import WordTokenizer

    if a.no_repeat_ngram and a.beam is None:
        a = replace(a, beam=1)  # which is greedy decoding
    # check before --read, which may take an hour
    max_tokens = _MAX_TOKENS if a.max_tokens is None else a.max_tokens
    check_sampling(max_tokens, a.temperature, a.top_k, a.top_p, a.stop, a.seed)
    prompts = _read_prompts(a, prompt)
    opened = open_model(a.run, mesh=inference_mesh(a.run, a.mesh, _rows(a, prompts)))
    _check_model(a, opened, max_tokens)
    if isinstance(opened.tokenizer, WordTokenizer):
        _report_unknown_words(opened.tokenizer.unknown_words("\n".join(prompts)))
    if opened.config.model.encoder.layers:
        return _translate(a, opened, prompts)
    if a.small_cache:
        opened = opened.with_small_cache()
    # a memory belongs to the run as it is, before it is changed for inference
    state = None if a.state_in is None else load_state(expanded(a.state_in), opened)
    if a.state_out is not None:
        opened = replace(opened, original_fingerprint=model_fingerprint(opened))
    opened = opened.for_inference()
    generator = Generator(opened)
    if a.read is not None:
        state = _read_document(a.read, a.state_out, opened, generator)
    if a.prompts is not None:
        _write_lines(a, prompts, generator, opened, state)
    elif prompt is not None:
        _write(a, prompt, generator, state)
    return 0


def _check_model(arguments: Arguments, opened: Run, max_tokens: int) -> None:
    """Check the options that depend on the model, before it reads anything."""
    from famjax.eval.generate import check_search

    a = arguments
    if a.beam is not None:
        size = opened.tokenizer.output_size
        check_search(a.beam, max_tokens, a.length_penalty, a.no_repeat_ngram, a.stop, size)
    if a.chat and opened.tokenizer.chat_template is None:
        raise UserError(
            f"--chat: the tokenizer of {a.run} has no chat template; remove it, or "
            "train with a tokenizer that has one"
        )


def _rows(arguments: Arguments, prompts: list[str]) -> int:
    """Return how many texts are written together, hypotheses included."""
    a = arguments
    if a.temperature:
        return 1
    texts = 1 if a.state_in is not None or a.read is not None else min(len(prompts), _BATCH)
    return max(texts, 1) * (a.beam or 1)


def _read_prompts(arguments: Arguments, prompt: str | None) -> list[str]:
    """Return the lines of --prompts, or else the prompt, if there is one."""
    a = arguments
    if a.prompts is None:
        return [] if prompt is None else [prompt]
    prompts = _read_lines(a.prompts)
    if "" in prompts and (a.read is not None or a.state_in is not None):
        raise UserError(
            f"--prompts: line {prompts.index('') + 1} is empty; a memory needs at least one "
            "character"
        )
    return prompts


def _decode_prompt(prompt: str) -> str:
    """Return the prompt, or standard input for "-".

    Raises:
      UserError: it is not UTF-8, or too large.
    """
    data = sys.stdin.buffer.read(_PROMPT_BYTES + 1) if prompt == "-" else os.fsencode(prompt)
    if len(data) > _PROMPT_BYTES:
        raise UserError(
            f"--prompt: more than {_PROMPT_BYTES >> 20} MiB; give a file to --read, which reads "
            "any size"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt: not UTF-8 at byte {error.start}; convert it") from None


def _read_lines(path: str) -> list[str]:
    """Return the lines of a file."""
    from famjax.data.files import is_jsonl
    from famjax.data.pairs import check_plain_lines, read_lines

    if path == "-":
        raise UserError("--prompts -: takes a file; write the lines to one")
    if is_jsonl(path):
        raise UserError(f"--prompts {path}: is JSON lines; give a text with a prompt on each line")
    file = str(expanded(path))
    if not os.path.exists(file):
        raise UserError(f"--prompts {path}: No such file; check the path")
    check_plain_lines(file)
    lines = [line.decode("utf-8") for line in read_lines(file)]
    if not lines:
        raise UserError(f"--prompts {path}: is empty; write a prompt on each line")
    return lines


def _report_unknown_words(words: list[str]) -> None:
    if words:
        some = ", ".join(words[:5]) + (", ..." if words[5:] else "")
        print(f"not in the vocabulary, read as <unk>: {some}", file=sys.stderr)


def _check(arguments: Arguments) -> None:
    """Check combinations of options before reading a document, which may take an hour."""
    a = arguments
    if a.prompts is not None:
        if a.prompt is not None:
            raise UserError("--prompt is one text and --prompts a file of them; give one of them")
    elif a.prompt is None and a.read is None:
        raise UserError("generate needs --prompt TEXT, or --read FILE with --state-out F")
    has_prompt = a.prompt is not None or a.prompts is not None
    if not has_prompt and a.chat:
        raise UserError("--chat formats the prompt; give --prompt TEXT")
    if not has_prompt and a.state_out is None:
        raise UserError("--read without --prompt needs --state-out F, or its memory would be lost")
    if a.read is not None and a.state_in is not None:
        raise UserError("--read starts a new memory and --state-in loads one; give one of them")
    if a.state_out is not None and a.read is None:
        raise UserError("--state-out saves the memory of what --read reads; give --read FILE")
    _check_decoding(a)
    if a.state_out is not None and a.read is not None:
        _check_writable(expanded(a.state_out), expanded(a.read))


def _check_decoding(a: Arguments) -> None:
    samples = a.temperature != 0 or a.top_k != 0 or a.top_p != 1
    if a.beam is not None and samples:
        raise UserError(
            "--beam searches for the likeliest text; --temperature, --top-k and --top-p sample "
            "one; give either"
        )
    if a.temperature == 0 and (a.top_k != 0 or a.top_p != 1):
        raise UserError(
            "--top-k and --top-p sample, and --temperature 0 takes the likeliest token; give "
            "--temperature 1"
        )
    if a.beam in (None, 1) and a.length_penalty != 1:
        raise UserError("--length-penalty: greedy decoding has none; give --beam 2 or more")
    if a.temperature == 0 and a.seed != 0:
        raise UserError("--seed: decoding is greedy at temperature 0; give --temperature 1")
    if samples and a.no_repeat_ngram:
        raise UserError("--no-repeat-ngram: sampling has no such limit; remove it")


def _check_writable(path: Path, document: Path) -> None:
    if path.exists() and document.exists() and path.samefile(document):
        raise UserError(f"--state-out {path}: is the document itself; give another file")
    if path.is_dir():
        raise UserError(f"--state-out {path}: is a folder; give a file in it")
    if path.exists() and not path.is_file():
        raise UserError(f"--state-out {path}: is a device or a pipe; give a file")
    if not path.parent.is_dir():
        raise UserError(f"--state-out {path}: there is no folder {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--state-out {path}: the folder {path.parent} cannot be written")


def _read_document(
    document: str, state_out: str | None, opened: Run, generator: Generator
) -> StreamState:
    """Return the memory of a document; save it if --state-out is given."""
    from famjax.eval.state_file import save_state

    state = generator.read_document(expanded(document), quiet=False)
    if state_out is not None:
        file = expanded(state_out)
        save_state(file, state, opened)
        size = file.stat().st_size
        print(f"read {state.tokens:,} tokens; wrote {state_out}, {size:,} bytes", file=sys.stderr)
    return state


def _translate(arguments: Arguments, opened: Run, texts: list[str]) -> int:
    """Print the target of each source, for a model with an encoder."""
    import jax

    from famjax.eval.sampling import Sampling
    from famjax.eval.translator import Translator

    a = arguments
    defaults = Arguments(a.run)
    for name in _OF_DECODERS:
        if getattr(a, name) != getattr(defaults, name):
            raise UserError(
                f"--{name.replace('_', '-')}: a model with an encoder writes the target of a "
                "source, which is the prompt alone; remove it"
            )
    sampling = None
    if a.temperature:
        size = opened.tokenizer.output_size
        sampling = Sampling(jax.random.key(a.seed), a.temperature, a.top_k, a.top_p, size)
    translator = Translator(
        opened.for_inference(),
        beams=a.beam or 1,
        length_penalty=a.length_penalty,
        no_repeat_ngram=a.no_repeat_ngram,
        batch=min(len(texts), _BATCH),
        sampling=sampling,
        max_tokens=a.max_tokens,
    )
    # now, not when its turn comes
    translator.check(texts)
    written: list[Translation] = []

    def translate(first: int, group: list[str]) -> list[Translation]:
        found = translator.translate(group, first=first)
        written.extend(found)
        return found

    # as many lines as sources, so that both files are pairs
    _print_groups(texts, _GROUP, translate, as_lines=a.prompts is not None)
    _report_sources(texts, opened)
    _report_limits(written, translator)
    return 0


def _report_sources(texts: list[str], run: Run) -> None:
    """Report sources that are empty, cut, or have text that the tokenizer cannot read."""
    from famjax.data.pairs import cut_source

    words, tokenizer = run.config.data.source_words, run.tokenizer
    read = [cut_source(text, words) for text in texts]
    if cut := sum(short != text.strip() for short, text in zip(read, texts, strict=True)):
        print(
            f"{cut:,} {inflect(cut, 'source is', 'sources are')} cut to data.source_words={words}",
            file=sys.stderr,
        )
    if empty := sum(not text.strip() for text in texts):
        print(f"{empty:,} {inflect(empty, 'source is', 'sources are')} empty", file=sys.stderr)
    if unread := sum(not tokenizer.reads(tokenizer.encode_source(text)) for text in read):
        print(
            f"{unread:,} {inflect(unread, 'source has', 'sources have')} text that the model's "
            "tokenizer cannot read",
            file=sys.stderr,
        )


def _report_limits(written: list[Translation], translator: Translator) -> None:
    """Report sources longer than in training, and targets that were cut."""
    longest, capacity = translator.longest, translator.capacity
    longer = sum(longest is not None and each.source_tokens > longest for each in written)
    cut = sum(each.cut for each in written)
    one = len(written) == 1
    if longer:
        sources = (
            "the source has"
            if one
            else f"{longer:,} {inflect(longer, 'source has', 'sources have')}"
        )
        print(
            f"{sources} more than {longest} tokens, the most that were trained on; "
            f"{inflect(longer, 'its target', 'their targets')} may be worse",
            file=sys.stderr,
        )
    if cut:
        targets = f"the target was cut at {written[0].tokens} tokens"
        if not one:
            targets = f"{cut:,} {inflect(cut, 'target was', 'targets were')} cut"
        more = f"--max-tokens gives {inflect(cut, 'it', 'them')} more"
        if capacity is not None and min(each.tokens for each in written if each.cut) >= capacity:
            more = f"the model's cache holds {capacity:,} (model.capacity)"
        print(f"{targets}; {more}", file=sys.stderr)


def _write(
    arguments: Arguments,
    prompt: str,
    generator: Generator,
    state: StreamState | None,
) -> None:
    from famjax.eval.progress import TokenProgress

    a = arguments
    room = generator.max_tokens([prompt], state, a.chat)
    max_tokens = _fitting_tokens(a.max_tokens, room, "prompt")
    if a.beam is not None:
        with TokenProgress("generate") as progress, progress.compiling():
            found = generator.search(
                prompt, a.beam, max_tokens, **_search_options(a), state=state, best=1
            )
        print(found[0].text if found else "")
        return
    with TokenProgress("generate") as progress, progress.compiling():
        texts = generator.generate(
            prompt, max_tokens, **_sampling_options(a), seed=a.seed, state=state
        )
        # the second token compiles the last program; take both before any text is printed, so that
        # no spinner interrupts it
        first = list(itertools.islice(texts, 2))
    for text in itertools.chain(first, texts):
        print(text, end="", flush=True)
    print()


def _write_lines(
    arguments: Arguments,
    lines: list[str],
    generator: Generator,
    opened: Run,
    state: StreamState | None,
) -> None:
    """Print a text after each line, as one line."""
    from famjax.eval.generate import Hypothesis

    a = arguments
    room = generator.max_tokens(lines, state, a.chat)
    max_tokens = _fitting_tokens(a.max_tokens, room, "longest line")

    def write(first: int, group: list[str]) -> list[Hypothesis]:
        if a.temperature:
            seed = (a.seed + first) % 2**32
            text = "".join(
                generator.generate(
                    group[0], max_tokens, **_sampling_options(a), seed=seed, state=state
                )
            )
            return [Hypothesis(text, 0.0, len(opened.tokenizer.encode(text)))]
        if state is not None:
            found = generator.search(
                group[0], a.beam or 1, max_tokens, **_search_options(a), state=state, best=1
            )
            return found or [Hypothesis("", 0.0, 0)]
        return generator.search_all(
            group, a.beam or 1, max_tokens, **_search_options(a), batch=_BATCH
        )

    # samples, and lines that continue a memory, which may end within a block, are written singly
    group = 1 if a.temperature or state is not None else _GROUP
    _print_groups(lines, group, write, as_lines=True)


def _sampling_options(arguments: Arguments) -> dict[str, Any]:
    """Return the options of `Generator.generate` that are the same for every line."""
    a = arguments
    sampling = {"temperature": a.temperature, "top_k": a.top_k, "top_p": a.top_p}
    return {**sampling, "stop": a.stop, "chat": a.chat}


def _search_options(arguments: Arguments) -> dict[str, Any]:
    """Return the options that `Generator.search` and `search_all` have in common."""
    a = arguments
    search = {"length_penalty": a.length_penalty, "no_repeat_ngram": a.no_repeat_ngram}
    return {**search, "stop": a.stop, "chat": a.chat}


def _fitting_tokens(given: int | None, max_tokens: int | None, what: str) -> int:
    """Return --max-tokens, or its default as far as the model's cache has room for it.

    Args:
      given: --max-tokens.
      max_tokens: how many tokens fit; None is any number.
      what: after which they are written.
    """
    if given is None:
        return _MAX_TOKENS if max_tokens is None else min(_MAX_TOKENS, max_tokens)
    if max_tokens is not None and given > max_tokens:
        raise UserError(
            f"--max-tokens {given}: does not fit the model's cache after the {what}; give at "
            f"most {max_tokens:,}"
        )
    return given


def _print_groups(
    lines: list[str],
    size: int,
    write: Callable[[int, list[str]], Sequence[Hypothesis | Translation]],
    as_lines: bool,
) -> None:
    """Print the texts for lines, group by group, with progress.

    Args:
      size: number of lines of a group.
      write: called with the number of a group's first line, and the group; returns its texts.
      as_lines: whether each text is to be one line.
    """
    from famjax.eval.progress import TokenProgress

    with TokenProgress("generate", len(lines)) as progress:
        for first in range(0, len(lines), size):
            with nullcontext() if first else progress.compiling():
                found = write(first, lines[first : first + size])
            for each in found:
                print(" ".join(each.text.splitlines()) if as_lines else each.text)
            if not sys.stdout.isatty():  # else a live line would be between the texts
                progress.advance(sum(each.tokens for each in found), len(found))
