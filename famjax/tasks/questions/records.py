"""Reading of documents with questions from JSON lines, in the formats of published data sets."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from famjax.core.errors import UserError
from famjax.core.json_files import parse_json
from famjax.data.files import is_jsonl, open_text, wrap_read_errors
from famjax.data.find_files import list_files
from famjax.data.json_lines import iter_lines, wrap_line_errors

# an option in a question, "(A) text"
_OPTION = re.compile(r"^[ \t]*\(([A-Z])\)(.*?)(?=^[ \t]*\([A-Z]\)|\Z)", re.MULTILINE | re.DOTALL)

_ANSWER = "\nAnswer:"
# prefix of the name of a data set, in place of files
TFDS = "tfds:"


class Asked(NamedTuple):
    """A question about a document.

    Attributes:
      prompt: text after the document, up to where the answer begins.
      references: right answers, of which one suffices.
      options: answers to choose from; empty for an open question.
      metric: name of the metric that scores the answer; "" is the task's.
      stop: string before which an answer ends, "" is none; None is the task's.
      answer_tokens: maximum number of tokens of an answer; None is the task's.
      subset: in a collection of data sets, the data set that the question is from.
      words: number of words of the document with question and answers, as a collection counts them.
    """

    prompt: str
    references: tuple[str, ...]
    options: tuple[str, ...] = ()
    metric: str = ""
    stop: str | None = None
    answer_tokens: int | None = None
    subset: str = ""
    words: int | None = None


class AskedDocument(NamedTuple):
    """A document with questions.

    Attributes:
      text: text of the document.
      questions: questions about the document.
      name: file and line of the document, for errors.
      left_out: the reason if the document is left out, because its answers cannot be scored here;
        else "".
    """

    text: str
    questions: tuple[Asked, ...]
    name: str = ""
    left_out: str = ""


# returns the document of a JSON record
Parse = Callable[[dict[str, Any]], AskedDocument]


def read_documents(
    files: str, parse: Parse, skip_broken: bool = False
) -> tuple[list[AskedDocument], list[str]]:
    """Return the documents in files of JSON lines, and the reasons for lines that were left out.

    Documents with equal texts become one: data sets with one question per line repeat them.

    Args:
      files: file, folder or glob of .jsonl (plain or compressed) or .parquet; several separated by
        commas. Or "tfds:SET:SPLIT", a data set of TFDS.
      parse: returns the document of a record; a missing field raises a KeyError.
      skip_broken: whether to leave out lines that cannot be read.

    Raises:
      UserError: a line cannot be read, or no document is left.
    """
    found: dict[str, AskedDocument] = {}
    left_out: list[str] = []
    for name, read in _named_documents(files, parse):
        try:
            document = read()
        except UserError as error:
            if not skip_broken:
                raise UserError(f"{error}; --skip-broken leaves such lines out") from None
            left_out.append(str(error))
            continue
        if document.left_out:
            left_out.append(f"{name}: {document.left_out}")
            continue
        known = found.setdefault(document.text, AskedDocument(document.text, (), name))
        questions = _join_equal([*known.questions, *document.questions])
        found[document.text] = known._replace(questions=questions)
    if not found:
        first = f", the first: {left_out[0]}" if left_out else ""
        raise UserError(
            f"{files}: has no document with questions in {len(left_out):,} lines{first}"
        )
    return list(found.values()), left_out


def _join_equal(questions: list[Asked]) -> tuple[Asked, ...]:
    """Return the questions, with equal ones joined to one that has the references of all.

    Some data sets have a line for each reference.
    """
    joined: dict[tuple[Any, ...], Asked] = {}
    for asked in questions:
        key = asked.prompt, asked.options, asked.metric, asked.subset
        known = joined.setdefault(key, asked)
        references = tuple(dict.fromkeys((*known.references, *asked.references)))
        joined[key] = known._replace(references=references)
    return tuple(joined.values())


def _named_documents(files: str, parse: Parse) -> Iterator[tuple[str, Callable[[], AskedDocument]]]:
    """Yield for each record its place, and a function that parses it.

    The function raises a `UserError` with this place if the record cannot be parsed.
    """
    if files.startswith(TFDS):
        # TensorFlow is imported only where it is needed
        from famjax.data.seqio_tasks import read_records

        for number, record in enumerate(read_records(files), 1):
            name = f"{files}:{number}"
            yield name, functools.partial(_parse_named, name, record, parse)
        return
    paths = list_files(files, "--tasks")
    # a folder may also have other files: take only JSON lines, if there are any
    for path in [path for path in paths if is_jsonl(path)] or paths:
        for number, line in _numbered_lines(path):
            yield f"{path}:{number}", functools.partial(_parse_line, path, number, line, parse)


def _numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    with open_text(path) as stream, wrap_read_errors(path):
        for number, line in enumerate(iter_lines(stream), 1):
            if line.strip():
                yield number, line


def _parse_line(path: str, number: int, line: bytes, parse: Parse) -> AskedDocument:
    with wrap_line_errors(path, functools.partial(int, number)):
        return _parse(parse_json(line), parse)


def _parse_named(name: str, record: Any, parse: Parse) -> AskedDocument:
    try:
        return _parse(record, parse)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _parse(record: Any, parse: Parse) -> AskedDocument:
    if not isinstance(record, dict):
        raise UserError(f"a {type(record).__name__} instead of an object")
    try:
        document = parse(record)
    except KeyError as error:
        has = ", ".join(map(repr, list(record)[:8]))
        raise UserError(f"has no field {error}; it has {has}") from None
    except (TypeError, AttributeError, IndexError) as error:
        raise UserError(f"a field is not what the task's records have ({error})") from None
    _check(document)
    return document


def _check(document: AskedDocument) -> None:
    """Raise a `UserError` for a document without text, questions, or answers to a question."""
    if document.left_out:
        return
    questions = document.questions
    texts = [part for q in questions for part in (q.prompt, *q.references, *q.options)]
    for text in (document.text, *texts):
        if type(text) is not str:
            raise UserError(f"{text!r:.40} is a {type(text).__name__}, not a text")
        text.encode("utf-8")  # a lone surrogate is not text
    if not document.text.strip():
        raise UserError("the document is empty")
    if not questions:
        raise UserError("has no question")
    for asked in questions:
        question = repr(asked.prompt.strip()[-60:])
        if not asked.references or not all(reference.strip() for reference in asked.references):
            raise UserError(f"a reference that answers {question} is empty, or there is none")
        if asked.options and not set(asked.references) & set(asked.options):
            raise UserError(f"the answer {asked.references[0][:40]!r} is none of the options")
        if not all(option.strip() for option in asked.options):
            raise UserError(f"an option of {question} is empty")
        if not asked.prompt:
            raise UserError("nothing follows the document, so that nothing is asked")


def question_prompt(question: str, options: str = "") -> str:
    """Return the prompt of a question, with its options on lines, which follows its document."""
    if not question.strip():
        raise UserError("the question is empty")
    return f"\n\nQuestion: {question.strip()}{options}{_ANSWER}"


def strings(value: Any) -> tuple[str, ...]:
    """Return the strings of a list, or a single string, as a tuple."""
    every = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(each, str) for each in every):
        raise TypeError(f"{value!r} is not a text")
    return every


def parse_leval(record: dict[str, Any]) -> AskedDocument:
    """Parse L-Eval's {input, instructions: [question], outputs: [answer]}."""
    questions, answers = strings(record["instructions"]), strings(record["outputs"])
    if len(questions) != len(answers):
        raise UserError(f"{len(questions)} instructions and {len(answers)} outputs")
    asked = [Asked(question_prompt(q), (a,)) for q, a in zip(questions, answers, strict=True)]
    return AskedDocument(record["input"], tuple(asked))


def parse_longbench(record: dict[str, Any]) -> AskedDocument:
    """Parse LongBench's {context, input, answers, prompt_template}, or {prompt, answers}.

    The part of the template before the context belongs to the document, the rest to the question.
    """
    answers = strings(record["answers"])
    options = strings(record.get("all_classes") or ())
    if "context" not in record:
        # the question is the last line of a prompt
        prompt = record["prompt"]
        cut = prompt.rstrip().rfind("\n")
        return AskedDocument(prompt[:cut], (Asked(prompt[cut:], answers, options),))
    template = record.get("prompt_template") or "{context}\n\nQuestion: {input}\nAnswer:"
    head, found, tail = template.partition("{context}")
    if not found:
        raise UserError("prompt_template has no {context}")
    head, prompt = (part.replace("{input}", record["input"]) for part in (head, tail))
    return AskedDocument(head + record["context"], (Asked(prompt, answers, options),))


def parse_scrolls(record: dict[str, Any]) -> AskedDocument:
    """Parse SCROLLS' {input: question, empty line, document; output}."""
    question, found, text = record["input"].partition("\n\n")
    if not found:
        raise UserError("input has no empty line after the question")
    if text.lstrip().startswith("(A)"):
        # the options are a paragraph of their own after the question
        listed, _, text = text.lstrip().partition("\n\n")
        question = f"{question}\n\n{listed}"
    return AskedDocument(text, (Asked(question_prompt(question), strings(record["output"])),))


def with_options(document: AskedDocument) -> AskedDocument:
    """Return a document with `options` set, for questions that list them in the prompt, "(A) text".

    Questions that list no options are left out.
    """
    questions = []
    for asked in document.questions:
        listed = asked.prompt.removesuffix(_ANSWER)
        found = {letter: text.strip() for letter, text in _OPTION.findall(listed)}
        options = tuple(found.values())
        answer = asked.references[0].strip()
        letter = re.match(r"\(([A-Z])\)|([A-Z])$", answer)
        by_letter = found.get(letter[1] or letter[2]) if letter else None
        if len(options) > 1:
            by_text = next((o for o in options if o.split() == answer.split()), None)
            right = by_text or by_letter or answer
            questions.append(asked._replace(references=(right,), options=options))
    return document._replace(questions=tuple(questions))
