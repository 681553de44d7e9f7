"""L-Eval's scores of exams (arXiv 2307.11088), as its `auto_eval.py` and `em.py` compute them."""

from __future__ import annotations

import re

# removed from an answer that tells what code prints
_TOLD = re.compile("will be|of the code|is|would be|the value of|the result of|printed")


def letters(several: bool, output: str, reference: str) -> float:
    """Return 1 if an answer chooses the letters that a reference begins with.

    A part of several right letters scores 0.25.

    Args:
      several: more than one letter may be right; else the first of A to D in the output counts.
    """
    right = set(re.findall("[A-D]", reference.split()[0]))
    chosen = _chosen(output, several)
    return 1.0 if chosen == right else 0.25 if chosen and chosen < right else 0.0


def _chosen(output: str, several: bool) -> set[str]:
    """Return the letters of an answer. One with words but without these letters counts as A."""
    if output in "ABCD":
        return set(output)
    if not several:
        return set(re.findall("[A-D]", output)[:1]) or {"A"}
    begin = re.split("[^A-D]", output, maxsplit=1)[0]
    if len(begin) > 1:
        return set(begin)
    rest = output.removeprefix(begin).split("Question")[0]
    found = {*begin, *re.findall(r"[A-D](?=[\s.)])", rest)}
    return found or set("".join(re.findall("[A-D]+", rest)[:1])) or {"A"}


def contains(output: str, reference: str) -> float:
    """Return 1 if a reference is in an output, but for case and spaces, or is the same number."""
    try:
        return float(float(output) == float(reference))
    except ValueError:
        return float(_packed(reference) in _packed(output))


def _packed(text: str) -> str:
    return text.lower().replace(" ", "")


def final_number(output: str, reference: str) -> float:
    """Return 1 if an output ends with the number of a reference (GSM8K).

    That is what follows "The answer is", or else the last number of the first paragraph.
    """
    found = _result(output)
    return float(found != "" and float(found) == float(_result(reference)))


def _result(text: str) -> str:
    """Return the digits of the result, without a fraction; "" if there is none."""
    told = re.search(r"The answer is (\S+)", text)
    words = text.split("\n\n")[0].split(" ")
    last = next((word for word in reversed(words) if re.search(r"\d", word)), "")
    return re.sub(r"\D", "", (told[1] if told else last).split(".")[0])


def truth(output: str, reference: str) -> float:
    """Return 1 if the first "true" or "false" in an output is the reference."""
    found = re.search("true|false", output.lower())
    return float(found is not None and found[0] == reference.lower())


def printed(output: str, reference: str) -> float:
    """Return 1 if what code prints is in an answer that explains it.

    The answer's last words count, or those after "the final output": three more than a reference
    has.
    """
    most = len(reference.split()) + 3
    _, found, after = _TOLD.sub("", _joined(output)).rpartition("the final output")
    words = re.split(r"\s+", after)
    return contains(" ".join(words[:most] if found else words[-most:]), _joined(reference))


def _joined(text: str) -> str:
    """Return printed arrays in one line, without commas, quotes and fractions of 0."""
    text = re.sub(r",|'|\\|\.0", "", re.sub(r"\s+", " ", text))
    return text.replace("] [", "][").replace("[ [", "[[").replace("] ]", "]]")
