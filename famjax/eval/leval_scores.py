"""L-Eval's scores for exams (arXiv 2307.11088), as its `auto_eval.py` and `em.py` compute them."""

from __future__ import annotations

import re

# phrases that are removed from an answer about what some code prints
_TOLD = re.compile("will be|of the code|is|would be|the value of|the result of|printed")


def letters(several: bool, output: str, reference: str) -> float:
    """Return 1 if the output chooses exactly the letters that the reference begins with.

    A non-empty proper subset of the right letters scores 0.25, anything else 0.

    Args:
      several: whether more than one letter may be right. If not, the first letter of A to D in the
        output counts.
    """
    right = set(re.findall("[A-D]", reference.split()[0]))
    chosen = _chosen(output, several)
    return 1.0 if chosen == right else 0.25 if chosen and chosen < right else 0.0


def _chosen(output: str, several: bool) -> set[str]:
    """Return the chosen letters; an output with none of A to D counts as A."""
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
    """Return 1 if the output contains the reference, or both are the same number, else 0.

    Case and spaces do not matter.
    """
    try:
        return float(float(output) == float(reference))
    except ValueError:
        return float(_packed(reference) in _packed(output))


def _packed(text: str) -> str:
    return text.lower().replace(" ", "")


def final_number(output: str, reference: str) -> float:
    """Return 1 if the final number of the output is that of the reference, else 0 (GSM8K).

    The final number is the one after "The answer is", or else the last one of the first paragraph.
    """
    found = _result(output)
    return float(found != "" and float(found) == float(_result(reference)))


def _result(text: str) -> str:
    """Return the digits of the final number before a decimal point; "" without a number."""
    marked = re.search(r"The answer is (\S+)", text)
    words = text.split("\n\n")[0].split(" ")
    last = next((word for word in reversed(words) if re.search(r"\d", word)), "")
    return re.sub(r"\D", "", (marked[1] if marked else last).split(".")[0])


def truth(output: str, reference: str) -> float:
    """Return 1 if the first "true" or "false" in the output equals the reference, else 0."""
    found = re.search("true|false", output.lower())
    return float(found is not None and found[0] == reference.lower())


def printed(output: str, reference: str) -> float:
    """Return 1 if an output that explains what some code prints contains the reference, else 0.

    Of the output, only the words after "the final output" count, or else the last words; in both
    cases three more than the reference has.
    """
    max_words = len(reference.split()) + 3
    _, found, after = _TOLD.sub("", _joined(output)).rpartition("the final output")
    words = re.split(r"\s+", after)
    return contains(
        " ".join(words[:max_words] if found else words[-max_words:]), _joined(reference)
    )


def _joined(text: str) -> str:
    """Return a text in one line, without commas, quotes, and ".0" after whole numbers."""
    text = re.sub(r",|'|\\|\.0", "", re.sub(r"\s+", " ", text))
    return text.replace("] [", "][").replace("[ [", "[[").replace("] ]", "]]")
