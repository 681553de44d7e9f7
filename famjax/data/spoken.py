"""Whether a text that a chat template wrote has what the messages say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# stands in no text
_APART = "\0"


def first_missing_message(messages: Sequence[Mapping[str, Any]], text: str) -> int | None:
    """Return the index of the first message whose content a rendered text lacks; None if all are
    there, as often as they are said.

    Space around a content may go, and so may the thoughts before it (up to "</think>"), which some
    templates leave out of earlier answers.
    """
    said = [_spoken(message) for message in messages]
    if _in_order(said, text):
        return None
    # a template may write the system's message before the last question
    every = _APART.join(said)
    for i, words in enumerate(said):
        # some write JSON
        forms = {words, json.dumps(words, ensure_ascii=False)[1:-1]} if words else ()
        if forms and sum(map(text.count, forms)) < every.count(words):
            return i
    return None


def _spoken(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content.rpartition("</think>")[2].strip() if isinstance(content, str) else ""


def _in_order(said: Sequence[str], text: str) -> bool:
    at = 0
    for words in said:
        if (found := text.find(words, at)) < 0:
            return False
        at = found + len(words)
    return True
