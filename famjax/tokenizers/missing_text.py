"""Checks that the output of a chat template contains the content of every message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# a character that occurs in no text
_SEPARATOR = "\0"


def first_missing_message(messages: Sequence[Mapping[str, Any]], text: str) -> int | None:
    """Return the index of the first message whose content is missing; None if none is missing.

    Content that several messages share must occur as many times. Templates may strip white space
    around the content, and may drop the reasoning before it (up to "</think>") in earlier answers.
    """
    expected = [_expected_text(message) for message in messages]
    if _contains_in_order(expected, text):
        return None
    # not in order: a template may write the system message before the last question
    joined = _SEPARATOR.join(expected)
    for i, words in enumerate(expected):
        # some templates write content as JSON
        forms = {words, json.dumps(words, ensure_ascii=False)[1:-1]} if words else ()
        if forms and sum(map(text.count, forms)) < joined.count(words):
            return i
    return None


def _expected_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content.rpartition("</think>")[2].strip() if isinstance(content, str) else ""


def _contains_in_order(expected: Sequence[str], text: str) -> bool:
    at = 0
    for words in expected:
        if (start := text.find(words, at)) < 0:
            return False
        at = start + len(words)
    return True
