"""Conversations as text: the Jinja chat template that comes with a tokenizer.

What stands in a message must not act. In rendered text, a control token's string that came from a
message is enclosed in two noncharacters, and so is read as the text it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from famjax.core.errors import UserError
from famjax.data.rendering import Renderer
from famjax.data.spoken import first_missing_message

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_ENCLOSED = re.compile(f"{_OPEN}(.+?){_CLOSE}", re.DOTALL)
# Documents must not depend on the day they are read: some templates write the date.
_DAY = datetime(2025, 1, 1)

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A chat template, rendered as Hugging Face's `apply_chat_template` does.

    Args:
      name: of the tokenizer, for messages.
      source: Jinja.
      variables: what the template sees besides the messages: bos_token, eos_token.
      bos, eos: strings of the tokens that stand around a document.
      controls: strings of all control tokens.

    Attributes:
      digest: of all but the name.
    """

    def __init__(
        self,
        name: str,
        source: str,
        variables: Mapping[str, str],
        bos: str,
        eos: str,
        controls: Sequence[str],
    ):
        about = [source, dict(variables), bos, eos, list(controls)]
        self.digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self._called = f"the chat template of tokenizer {name}"
        self._renderer = Renderer(self._called, source, variables)
        self._bos, self._eos, self._controls = bos, eos, tuple(controls)
        # the longest first, as a token may begin with another
        strings = sorted([*controls, _OPEN, _CLOSE], key=len, reverse=True)
        self._acting = re.compile("|".join(map(re.escape, strings)))

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Return the text the template writes.

        Raises:
          UserError: see `famjax.data.rendering.Renderer.render`.
        """
        return self._renderer.render(messages, add_generation_prompt).text

    def prompt(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Return what a model reads, for `parts`, without a bos at its start."""
        tamed = self._tamed(messages)
        text = self.render(tamed, add_generation_prompt)
        self._refuse_dropped(tamed, text)
        return text.removeprefix(self._bos)

    def document(self, messages: Messages) -> list[tuple[str, float]]:
        """Return a conversation to learn from, for `parts`, as texts and their weights.

        The assistant's turns weigh 1, each to the end of its closing control token, all else 0.
        What follows the last of them is left out, and so are bos at the start and eos at the end,
        which stand around every document.

        Raises:
          UserError: no turn is the assistant's; or the template refuses the messages, or writes
            earlier turns in another way once others follow, so that no part of the text is a turn.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise UserError('no message has the role "assistant": there is nothing to learn')
        tamed = self._tamed(messages[: answers[-1] + 1])
        # up to each answer, and with it
        cuts = [cut for i in answers for cut in ((i, True), (i + 1, False))]
        whole, ends = self._renderer.render(tamed, False, _DAY, cuts)
        texts, at = [], 0
        for i, asked, told in zip(answers, ends[::2], ends[1::2], strict=True):
            if asked is None or told is None or not at <= asked <= told:
                raise UserError(
                    f"{self._called}: does not write message {i + 1} behind the text of those "
                    "before it, so its tokens cannot be told; give another template"
                )
            end = self._turn_end(whole[:told])
            texts += [(whole[at:asked], 0.0), (whole[asked:end], 1.0)]
            at = end
        self._refuse_dropped(tamed[: answers[-1] + 1], whole)
        texts[0] = (texts[0][0].removeprefix(self._bos), 0.0)
        texts[-1] = (texts[-1][0].removesuffix(self._eos), 1.0)
        return texts

    def _turn_end(self, text: str) -> int:
        """Return where the last turn of `text` ends: at its control token if only space follows."""
        closed = text.rstrip()
        return len(closed if closed.endswith(self._controls) else text)

    def _refuse_dropped(self, tamed: Messages, text: str) -> None:
        """Raise a `UserError` if a rendered text lacks what a message says."""
        if (i := first_missing_message(tamed, text)) is not None:
            raise UserError(
                f"{self._called}: does not write what message {i + 1} (role {tamed[i]['role']!r}) "
                "says; give another template, in chat_template.jinja beside tokenizer.json"
            )

    def _tamed(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages with the strings of control tokens in them enclosed."""
        return [
            {key: value if key == "role" else self._tame(value) for key, value in message.items()}
            for message in messages
        ]

    def _tame(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._acting.sub(lambda found: f"{_OPEN}{found[0]}{_CLOSE}", value)
        if isinstance(value, Mapping):
            return {key: self._tame(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self._tame(part) for part in value]
        return value


def parts(rendered: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text from a template, and whether control tokens act in each."""
    for i, part in enumerate(_ENCLOSED.split(rendered)):
        if part:
            yield part, i % 2 == 0
