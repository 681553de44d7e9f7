"""Documents with facts in filler: RULER's families, whatever the length."""

from __future__ import annotations

import hashlib
import json
import re
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from long_texts import facts, load
from tiny_tokenizers import byte_level

from famjax.core.errors import UserError
from famjax.data.sources import TextSource
from famjax.experiment.load import load_config
from famjax.pipeline import make_source
from famjax.tasks import TASKS
from famjax.tasks.long.document import Content, LongSource, LongTask, Material, hash_contents
from famjax.tasks.long.filler import NOISE, split_sentences
from famjax.tasks.long.frequencies import _PAIRS, _index, _pair
from famjax.tokenizers.load import load_tokenizer

TOKENIZER = load_tokenizer("bytes")
LONG = {name: task for name, task in TASKS.items() if isinstance(task, LongTask)}


@pytest.fixture
def files(tmp_path: Path) -> str:
    sentences = (f"Sentence {i} of the book is here." for i in range(300))
    (tmp_path / "book.txt").write_text("\n".join(sentences))
    return str(tmp_path / "book.txt")


def read(task: LongTask, length: int, number: int, files: str) -> tuple[str, list[str]]:
    """Return a document before its question, and its pieces."""
    material = load(task, files)
    document = task.evaluated_document(TOKENIZER, length, number, 5, material)
    first, *pieces = document.tokens()
    assert first[0] == TOKENIZER.bos_id
    texts_of = [TOKENIZER.decode(first[1:]), *map(TOKENIZER.decode, pieces)]
    return "".join(texts_of), texts_of


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("length", [5000, 20_000])
def test_a_document_tells_what_its_questions_ask(name: str, length: int, files: str) -> None:
    task = LONG[name]
    for number in range(5):
        text, pieces = read(task, length, number, files)
        document = task.evaluated_document(TOKENIZER, length, number, 5, load(task, files))
        content = document.content
        assert text.startswith(content.head)
        assert "".join(read(task, length, number, files)[1]) == text
        for fact in content.facts:
            found = (piece.removesuffix(content.separator) for piece in pieces)
            assert sum(piece.endswith(fact) for piece in found) == 1
        for question in content.questions:
            for reference in question.references if content.facts else ():
                if not question.any_of:
                    assert any(reference in content.facts[i] for i in question.facts)
                    assert reference in question.answer
        # the question and the answer fit, and little is left
        question = max(map(len, document.questions))
        used = len(text.encode()) + 1 + question + document.max_written
        # lists of words are as long as an estimate of their tokens
        left = length // 10 if name in ("cwe", "fwe") else max(map(len, pieces[1:]))
        # numbers of many digits are reserved for the facts' labels
        left += 7 * len(content.facts) * bool(content.label)
        assert length - left <= used <= length


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "vt", "cwe"])
def test_a_document_has_the_tokens_of_its_text(name: str, files: str, tmp_path: Path) -> None:
    """No lone space is between sentences: a tokenizer of such texts has it with the next word."""
    corpus = [read(LONG[name], 12_000, 0, files)[0]]
    tokenizer = load_tokenizer(str(byte_level(tmp_path, corpus=corpus)))
    document = LONG[name].evaluated_document(tokenizer, 12_000, 0, 5, load(LONG[name], files))
    tokens = np.concatenate([*document.tokens(), document.questions[0]])[1:]
    text = tokenizer.decode(tokens)
    assert "  " not in text
    assert tokens.tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("name", LONG)
def test_facts_are_where_they_should_be(name: str, files: str) -> None:
    task, length = LONG[name], 30_000
    first_depths = []
    for number in range(5):
        text, _ = read(task, length, number, files)
        document = task.evaluated_document(TOKENIZER, length, number, 5, load(task, files))
        at = [text.index(fact) / len(text) for fact in document.content.facts]
        np.testing.assert_allclose(at, document.depths, atol=0.05)
        if not at:
            continue
        if document.content.in_order:
            assert at == sorted(at)
        else:
            first_depths.append(document.depths[document.content.questions[0].facts[0]])
    # five documents have their first needle in five parts of a document
    assert [int(5 * depth) for depth in first_depths] in ([], [0, 1, 2, 3, 4])


def test_the_wording_is_that_of_ruler() -> None:
    content = LONG["niah_multikey_3"].make_content(np.random.default_rng(0), Material())
    assert content.head == (
        "A special magic uuid is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the uuid afterwards.\n"
    )
    (fact,), (question,) = content.facts, content.questions
    key, value = re.fullmatch(
        r"One of the special magic uuids for ([-\da-f]{36}) is: ([-\da-f]{36})\.", fact
    ).groups()  # type: ignore[union-attr]
    assert question.references == (value,)
    assert question.text == (
        f"\nWhat is the special magic uuid for {key} mentioned in the provided text? "
        f"The special magic uuid for {key} mentioned in the provided text is"
    )
    content = LONG["niah_multiquery"].make_content(np.random.default_rng(0), Material())
    assert content.head.startswith("Some special magic numbers are hidden")
    (question,) = content.questions
    assert len(question.references) == len(content.facts) == 4
    assert re.search(
        r"What are all the special magic numbers for (\w+-\w+, ){3}and \w+-\w+ mentioned in the "
        r"provided text\? .* mentioned in the provided text are$",
        question.text,
    )


def test_a_question_of_several_keys_asks_each_of_them_once() -> None:
    content = LONG["niah_multikey_1"].make_content(np.random.default_rng(1), Material())
    assert sorted(i for question in content.questions for i in question.facts) == [0, 1, 2, 3]
    for question in content.questions:
        key = re.search(r"number for (\S+) mentioned", question.text).group(1)  # type: ignore[union-attr]
        assert key in content.facts[question.facts[0]]


def test_distractors_have_other_keys() -> None:
    task = LONG["niah_multikey_2"]
    text, _ = read(task, 200_000, 0, "")
    keys = re.findall(r"numbers for (\S+) is: ", text)
    (question,) = task.evaluated_document(TOKENIZER, 2000, 0, 5).content.questions
    assert len(keys) > 2000
    assert sum(key in question.text for key in keys) == 1


def test_a_chain_of_variables_ends_at_the_number() -> None:
    content = LONG["vt"].make_content(np.random.default_rng(0), Material())
    (question,) = content.questions
    value = re.search(r"assigned the value (\d{5}) in", question.text).group(1)  # type: ignore[union-attr]
    values = dict(re.fullmatch(r"VAR (\w{5}) = (.*)", fact).groups() for fact in content.facts)  # type: ignore[union-attr]
    assert len(values) == 5
    for name in question.references:
        while name in values:
            name = values[name].removeprefix("VAR ")
        assert name == value


@pytest.mark.parametrize("length", [5000, 60_000])
def test_common_words_are_thirty_times_in_the_list(length: int) -> None:
    _, pieces = read(LONG["cwe"], length, 3, "")
    items = [piece.split() for piece in pieces[1:]]
    assert [number for number, _ in items] == [f"{i + 1}." for i in range(len(items))]
    counts = Counter(word for _, word in items)
    document = LONG["cwe"].evaluated_document(TOKENIZER, length, 3, 5)
    common = set(document.content.questions[0].references)
    assert len(common) == 10
    assert {word for word, _ in counts.most_common(10)} == common
    if length > 8000:  # some of the last ones may not fit
        assert all(20 < counts[word] <= 30 for word in common)
        assert {counts[word] for word in counts.keys() - common} <= {1, 2, 3}
        assert len({word.split("-")[0] for word in counts}) > 100
    # another document has other words
    other = LONG["cwe"].evaluated_document(TOKENIZER, length, 4, 5)
    assert not common & set(other.content.questions[0].references)


def test_coded_words_are_as_frequent_as_their_rank_says() -> None:
    _, pieces = read(LONG["fwe"], 60_000, 1, "")
    counts = Counter(piece.strip() for piece in pieces[1:])
    document = LONG["fwe"].evaluated_document(TOKENIZER, 60_000, 1, 5)
    words = [word for word, _ in counts.most_common(4)]
    assert words == ["....", *document.content.questions[0].references]
    total = sum(counts.values())
    for rank, (_, found) in enumerate(counts.most_common(10), 1):
        assert found == pytest.approx(total * 6 / np.pi**2 / rank**2, rel=0.1)
    # in random order
    half = Counter(piece.strip() for piece in pieces[1 : len(pieces) // 2])
    assert half["...."] == pytest.approx(counts["...."] / 2, rel=0.1)


def test_the_words_that_are_asked_for_are_the_most_frequent_ones_at_any_length() -> None:
    for length in range(740, 1600, 20):
        _, pieces = read(LONG["fwe"], length, 1, "")
        frequent = Counter(piece.strip() for piece in pieces[1:]).most_common(5)
        document = LONG["fwe"].evaluated_document(TOKENIZER, length, 1, 5)
        words = ["....", *document.content.questions[0].references]
        assert [word for word, _ in frequent[:4]] == words
        assert len({count for _, count in frequent}) == 5
    with pytest.raises(
        UserError, match="only 52 words fit, of which the most frequent ones would be equal"
    ):
        read(LONG["fwe"], 720, 1, "")


def test_words_of_indices_differ() -> None:
    words = [_pair(i) for i in range(3 * _PAIRS)]
    assert len(set(words)) == len(words)
    assert [_index(_pair(i)) for i in range(0, _PAIRS, 37)] == list(range(0, _PAIRS, 37))


def test_a_story_of_babi_is_read(tmp_path: Path) -> None:
    contents = LONG["babilong"].read_facts(facts())
    told, asked = [c.facts for c in contents], [c.questions[0] for c in contents]
    assert told[0] == ("Mary moved to the bathroom.", "John went to the hall.")
    assert told[1] == (
        *told[0],
        "Daniel went back to the hall.",
        "Mary took the milk there.",
    )
    assert told[2] == ("Sandra got the milk and the apple.",)
    assert [question.text for question in asked] == [
        "\nQuestion: Where is Mary? Answer:",
        "\nQuestion: Where is Daniel? Answer:",
        "\nQuestion: What is Sandra carrying? Answer:",
    ]
    assert [question.facts for question in asked] == [(0,), (2,), (0,)]
    assert [question.references for question in asked] == [
        ("bathroom",),
        ("hall",),
        ("milk", "apple"),
    ]
    # the other answers of the file are wrong, but for those of the question
    others = {("bathroom",): ("apple", "hall", "milk"), ("hall",): ("apple", "bathroom", "milk")}
    assert {q.references: q.wrong for q in asked[:2]} == others
    path = "1 The hall is north of the office.\n2 What is north of the office?\thall\t1\n"
    path += "3 How do you go from a to b?\tn,w\t1\n1 A b.\n2 Where is c?\toffice\t1\n"
    (tmp_path / "babi.txt").write_text(path)
    kept = [c.questions[0] for c in LONG["babilong"].read_facts(str(tmp_path / "babi.txt"))]
    assert kept[0].wrong == ("n,w",)
    assert kept[1].references == ("n,w",)
    for text, told_error in (
        ("1 Mary left.\n", "has no questions of bAbI"),
        ("Once upon a time\n", "babi.txt:1: not a line of bAbI"),
        ("1 Mary left.\n2 Where?\thall\t7\n", "babi.txt:2: its facts '7' are not in the story"),
    ):
        (tmp_path / "babi.txt").write_text(text)
        with pytest.raises(UserError, match=told_error):
            LONG["babilong"].read_facts(str(tmp_path / "babi.txt"))
    with pytest.raises(UserError, match="babilong: give the file with its facts, --facts FILE"):
        LONG["babilong"].load("", "", TOKENIZER)
    with pytest.raises(UserError, match="vt has its own facts; remove it"):
        LONG["vt"].load("", facts(), TOKENIZER)


def test_questions_of_squad_are_about_numbered_documents() -> None:
    task = LONG["qa_1"]
    contents = task.read_facts(facts("qa_1"))
    assert [len(content.questions) for content in contents] == [1, 1, 1, 1]
    question = contents[1].questions[0]
    # any of them is right, the first is trained; what has no answer is left out
    assert question.references == ("3", "3 paws")
    assert question.answer == " 3."
    assert question.text == (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words.\n\nQuestion: How many paws has cat 1? Answer:"
    )
    text, _ = read(task, 900, 0, "")
    document = task.evaluated_document(TOKENIZER, 900, 0, 5, load(task, ""))
    head, _, listed = text.partition("The following are given documents.\n\n")
    assert head.startswith("Answer the question based")
    parts = re.split(r"Document (\d+):\n", listed)[1:]
    assert [int(number) for number in parts[::2]] == list(range(1, len(parts) // 2 + 1))
    assert all(part.endswith("\n\n") for part in parts[1::2])
    documents = [part.strip() for part in parts[1::2]]
    (fact,) = document.content.facts
    assert documents.count(fact) == 1
    # others come again, once all of them are there
    others = [each for each in documents if each != fact]
    assert len(set(others)) == len(set(others[:4])) == 4 < len(others)
    assert "Nobody is asked of this." in others


def write_squad(path: Path, articles: int, paragraphs: int) -> str:
    """Write articles of as many paragraphs, each with two questions."""

    def paragraph(i: int, j: int) -> dict[str, Any]:
        qas = [{"question": f"{i} {j} {k}?", "answers": [{"text": "x"}]} for k in range(2)]
        return {"context": f"Paragraph {j:02} of article {i}.", "qas": qas}

    data = [{"paragraphs": [paragraph(i, j) for j in range(paragraphs)]} for i in range(articles)]
    path.write_text(json.dumps({"data": data}))
    return str(path)


def test_paragraphs_of_the_article_are_among_others(tmp_path: Path) -> None:
    """As in RULER all of them, or as many as fit; none twice before all of a file."""
    task, places = LONG["qa_1"], []
    material = task.load("", write_squad(tmp_path / "f.json", 4, 30), TOKENIZER)
    for number in range(6):
        for length in (1200, 4500):
            document = task.evaluated_document(TOKENIZER, length, number, 6, material)
            text = "".join(
                TOKENIZER.decode(tokens) for tokens in islice(document.tokens(), 1, None)
            )
            (fact,) = document.content.facts
            listed = re.findall(r"^Paragraph .*", text, re.MULTILINE)
            assert len(set(listed)) == len(listed)
            own = [i for i, each in enumerate(listed) if each[-2] == fact[-2]]
            if length == 1200:
                assert len(own) == len(listed) < 30
            else:
                assert len(own) == 30 < len(listed) - 30
                places += [i / len(listed) for i in own]
    assert np.histogram(places, 3, (0, 1))[0] / len(places) == pytest.approx(1 / 3, abs=0.1)


def test_documents_in_another_arrangement_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation with them starts anew (`evaluate_long`)."""
    file = write_squad(tmp_path / "f.json", 2, 2)
    version = LONG["qa_1"].load("", file, TOKENIZER).version
    assert LONG["qa_1"].load("", file, TOKENIZER).version == version
    monkeypatch.setattr("famjax.tasks.long.questions._ARRANGEMENT", 3)
    assert LONG["qa_1"].load("", file, TOKENIZER).version != version


def test_any_question_of_a_paragraph_is_asked(tmp_path: Path) -> None:
    material = LONG["qa_1"].load("", write_squad(tmp_path / "f.json", 1, 2), TOKENIZER)
    documents = [
        LONG["qa_1"].evaluated_document(TOKENIZER, 900, n, 20, material) for n in range(20)
    ]
    assert len({document.content.questions[0].text for document in documents}) == 4


def test_a_file_without_other_documents_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all its documents belong to one question"):
        LONG["qa_1"].load("", write_squad(tmp_path / "f.json", 1, 1), TOKENIZER)


def test_questions_of_hotpot_need_several_documents() -> None:
    contents = LONG["qa_2"].read_facts(facts("qa_2"))
    assert contents[0].facts[0] == "A\nA is a book. B wrote it."
    assert [content.questions[0].facts for content in contents] == [(0, 2), (0, 1)]
    assert contents[1].questions[0].references == ("yes",)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("qa_1", "{", r"f\.json: .*give a JSON file of SQuAD"),
        ("qa_1", "[]", r"f\.json: .*give a JSON file of SQuAD"),
        ("qa_1", '{"data": [{"paragraphs": [{"qas": []}]}]}', "no field 'context'; give a JSON"),
        ("qa_1", '{"data": []}', "has no question with an answer"),
        (
            "qa_1",
            '{"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": '
            '[{"text": " "}]}]}]}]}',
            "has no question with an answer",
        ),
        ("qa_2", '{"data": []}', r"f\.json: .*give a JSON file of HotpotQA"),
        ("qa_2", '[{"context": []}]', "no field 'supporting_facts'; give a JSON file of HotpotQA"),
    ],
)
def test_other_files_are_told(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(UserError, match=says):
        LONG[name].read_facts(str(tmp_path / "f.json"))


def test_a_document_is_streamed() -> None:
    document = LONG["niah_single_1"].evaluated_document(TOKENIZER, 10**12, 1, 5)
    pieces = islice(document.tokens(), 2, 50)
    assert all(TOKENIZER.decode(tokens) == " " + NOISE for tokens in pieces)


def test_sentences_are_split_at_their_ends_and_at_lines() -> None:
    text = "One. Two is 2.5! Three?\n\n  Four\r\nfive" + "x" * 2500
    parts = list(split_sentences(text))
    assert parts[:4] == ["One.", "Two is 2.5!", "Three?", "Four"]
    assert [len(part) for part in parts[4:]] == [1000, 1000, 504]


def test_a_run_is_not_continued_with_other_texts(files: str) -> None:
    config = load_config("text_fam", ["data.task=niah_single_2", f"data.files={files}"])
    source = make_source(config, TOKENIZER)
    state = json.loads(json.dumps(source.get_state()))
    source.set_state(state)
    Path(files).write_text("Another book. " * 100)
    with pytest.raises(UserError, match=r"niah_single_2: data\.files, .* changed since the run"):
        make_source(config, TOKENIZER).set_state(state)


def test_no_held_out_text_is_in_the_filler(tmp_path: Path) -> None:
    """The end of a single file, or some of several, as in `data.task=text` with the same seed."""
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"Sentence of file {i}.\n" * 20)
    (tmp_path / "one").mkdir()
    one = "".join(f"Sentence {i} of one file.\n" for i in range(200))
    (tmp_path / "one" / "text.txt").write_text(one)
    for files in (f"{tmp_path}/*.txt", str(tmp_path / "one")):
        given = [f"data.files={files}", "data.holdout=3", "seed=5"]
        held_out = make_source(load_config("text_fam", given), TOKENIZER, "holdout")
        assert isinstance(held_out, TextSource)
        unseen = {each for text in held_out.texts() for each in split_sentences(text)} - {""}
        source = make_source(
            load_config("text_fam", [*given, "data.task=niah_single_2", *lengths(900, 4000)]),
            TOKENIZER,
        )
        read = set()
        for k in range(60):
            for piece in source.open(source.key(0, 1, k)):
                read.add(TOKENIZER.decode(piece.tokens).strip())
        kept = [f"Sentence of file {i}." for i in range(12)] if "*" in files else one.splitlines()
        # the sentence at the cut may be in both halves, in part
        missing = {*kept} - read
        assert len(missing - unseen) <= 1
        assert len(unseen - missing) <= 1
        assert len(unseen) > 1


def test_a_run_is_not_continued_with_other_held_out_text(files: str) -> None:
    given = ["data.task=niah_single_2", f"data.files={files}"]
    state = make_source(load_config("text_fam", given), TOKENIZER).get_state()
    other = make_source(load_config("text_fam", [*given, "data.holdout=7"]), TOKENIZER)
    with pytest.raises(UserError, match=r"data\.holdout .*changed since the run"):
        other.set_state(state)


@pytest.mark.parametrize("name", ["niah_multikey_1", "vt", "cwe", "fwe"])
def test_a_document_that_does_not_fit_is_longer(name: str, files: str) -> None:
    """Of a minimum length that the first document needs, others may need a bit more."""
    given = [f"data.files={files}"] if LONG[name].has_files else []

    def source_of(length: int) -> LongSource:
        config = load_config("text_fam", [f"data.task={name}", *lengths(length, length), *given])
        source = make_source(config, TOKENIZER)
        assert isinstance(source, LongSource)
        return source

    low, high = 100, 10_000
    while low < high:
        middle = (low + high) // 2
        try:
            source_of(middle)
        except UserError:
            low = middle + 1
        else:
            high = middle
    source = source_of(low)
    needed = []
    for lane in range(30):
        key = source.key(lane, 30, 0)
        pieces = list(source.open(key))
        assert pieces[-1].tokens[-1] == TOKENIZER.eos_id
        needed.append(source._open(key)[0].length)
        assert sum(len(piece.tokens) for piece in pieces) <= needed[-1]
    assert max(needed) < 1.1 * low
    if name == "niah_multikey_1":
        assert max(needed) > low


def test_a_filler_begins_anywhere_in_a_text(files: str) -> None:
    starts = {read(LONG["niah_single_2"], 2000, number, files)[1][1] for number in range(5)}
    assert len(starts) == 5


def test_a_story_that_does_not_fit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    told = "".join(f"{i} Mary moved to the bathroom again.\n" for i in range(1, 60))
    (tmp_path / "long.txt").write_text("1 A b.\n2 C?\td\t1\n" * 30 + told + "60 C?\td\t1\n")
    given = [*lengths(700, 900), f"data.long.facts={tmp_path / 'long.txt'}"]
    with pytest.raises(UserError, match="700 tokens do not hold"):
        make_source(load_config("text_fam", ["data.task=babilong", *given]), TOKENIZER)


def test_contents_are_hashed_one_after_the_other() -> None:
    near = ("word " * 50_000,) * 4
    contents = [Content("?", (f"fact {i}",), (), near=near) for i in range(20)]
    for count in (0, 1, 2):
        expected = hashlib.sha256(repr(tuple(contents[:count])).encode()).hexdigest()
        assert hash_contents(contents[:count]) == expected
    tracemalloc.start()
    hash_contents(contents)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # a million bytes each
    assert peak < 6e6


def test_mistakes_are_told(tmp_path: Path) -> None:
    single = LONG["niah_single_1"]
    with pytest.raises(UserError, match=r"200 tokens do not hold .* which take [45]\d\d with"):
        single.evaluated_document(TOKENIZER, 200, 0, 5)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(UserError, match="texts of the filler are empty"):
        read(LONG["niah_single_2"], 2000, 0, str(tmp_path / "empty.txt"))
    (tmp_path / "words.txt").write_text("<s>\n<unk>\n<eos>\nthe\ngrass\nis\n")
    words = load_tokenizer(str(tmp_path / "words.txt"))
    with pytest.raises(UserError, match=r"cannot express '[A-Z]{5}'"):
        LONG["vt"].evaluated_document(words, 2000, 0, 5)
    with pytest.raises(UserError, match=r"cwe: only 34 words fit, too few for any to be common"):
        read(LONG["cwe"], 1000, 0, "")
    with pytest.raises(UserError, match=r"min_length=900 is more than data\.long\.max_length=800"):
        load_config("text_fam", ["data.task=vt", *lengths(900, 800)])
    with pytest.raises(UserError, match=r"data\.long\.other_weight=1\.0: must be less than 1"):
        load_config("text_fam", ["data.task=vt", "data.long.other_weight=1"])
    with pytest.raises(UserError, match=r"data\.files: has no effect with data\.task=niah"):
        load_config("text_fam", ["data.task=niah_single_1", f"data.files={tmp_path}"])


def lengths(low: int, high: int) -> list[str]:
    return [f"data.long.min_length={low}", f"data.long.max_length={high}"]


@pytest.mark.parametrize("name", ["niah_single_2", "niah_multikey_1", "vt"])
def test_training_documents_end_with_an_answer(name: str, files: str) -> None:
    given = [f"data.files={files}"] if LONG[name].has_files else []
    config = load_config("text_fam", [f"data.task={name}", *lengths(1200, 4000), *given])
    source = make_source(config, TOKENIZER)
    sizes, asked = [], set()
    for k in range(40):
        key = json.loads(json.dumps(source.key(1, 4, k)))
        pieces = list(source.open(key))
        tokens, weights = (np.concatenate(x) for x in zip(*(p[:2] for p in pieces), strict=True))
        sizes.append(len(tokens))
        assert len(tokens) <= key[2]
        assert tokens[-1] == TOKENIZER.eos_id
        assert set(np.unique(weights)) == {np.float32(0.02), np.float32(1)}
        answer = TOKENIZER.decode(tokens[weights == 1][:-1])
        text = TOKENIZER.decode(tokens[1 : -len(answer.encode()) - 1])
        asked.add(text[-120:])
        for value in answer.strip(" .").split(", "):
            assert value in text
        # opened in the middle, it continues
        for start in (1, len(pieces) - 1):
            rest = np.concatenate([piece.tokens for piece in source.open(key, start)])
            skipped = sum(len(piece.tokens) for piece in pieces[:start])
            np.testing.assert_array_equal(rest, tokens[skipped:])
    assert 700 < min(sizes) < 1200 < 2500 < max(sizes) <= 4000
    assert len(asked) > 30
