"""Conversations as text: the Jinja chat template that comes with a tokenizer.

The content of a message must not inject control tokens. If a message contains the string of a
control token, that string is escaped: in rendered text it is enclosed in two Unicode noncharacters,
and it is tokenized as plain text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from famjax.core.errors import UserError
from famjax.tokenizers.missing_text import first_missing_message
from famjax.tokenizers.rendering import Renderer

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_ESCAPED = re.compile(f"{_OPEN}(.+?){_CLOSE}", re.DOTALL)
# Some templates write the date. Training documents must not depend on the day they are read.
_FIXED_DATE = datetime(2025, 1, 1)

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A chat template, rendered like Hugging Face's `apply_chat_template`.

    Args:
      name: name of the tokenizer, for error messages.
      source: the template, in Jinja.
      variables: the template's variables besides the messages: bos_token, eos_token.
      bos, eos: strings of the tokens around a document.
      controls: strings of all control tokens.

    Attributes:
      digest: hash of all arguments except the name.
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
        identity = [source, dict(variables), bos, eos, list(controls)]
        self.digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._label = f"the chat template of tokenizer {name}"
        self._renderer = Renderer(self._label, source, variables)
        self._bos, self._eos, self._controls = bos, eos, tuple(controls)
        # longest first, since a token may begin with another one
        strings = sorted([*controls, _OPEN, _CLOSE], key=len, reverse=True)
        control = "|".join(map(re.escape, strings))
        self._control_pattern = re.compile(control)
        self._mark_pattern = re.compile(f"{_OPEN}({control}){_CLOSE}|[{_OPEN}{_CLOSE}]")

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Return the text that the template writes.

        Raises:
          UserError: see `famjax.tokenizers.rendering.Renderer.render`.
        """
        return self._renderer.render(messages, add_generation_prompt).text

    def render_prompt(
        self, messages: Messages, add_generation_prompt: bool, continues: bool = False
    ) -> str:
        """Return a prompt without a leading bos; split it with `split_escaped`.

        Args:
          messages, add_generation_prompt, continues: as in `Tokenizer.encode_chat`.
        """
        _, text = self._render_whole(messages, add_generation_prompt)
        return self._drop_stray_marks(self._drop_bos(text, continues))

    def _drop_bos(self, text: str, continues: bool) -> str:
        """Return a rendered text without its leading bos, unless messages begin with it, too.

        That is so if a continued text has it more than once.
        """
        written = sum(part.count(self._bos) for part, acts in split_escaped(text) if acts)
        return text if continues and written > 1 else text.removeprefix(self._bos)

    def render_unfinished(self, messages: Messages) -> str:
        """Return a prompt like `render_prompt` that ends with the content of the last message.

        It is like `continue_final_message` of transformers: the model continues that message.
        """
        escaped, text = self._render_whole(messages, add_generation_prompt=False)
        content = str(escaped[-1]["content"])
        begin = text.rindex(content.strip())
        # templates may strip messages
        whole = text.startswith(content.lstrip(), begin)
        text = text[: begin + len(content.lstrip() if whole else content.strip())]
        return self._drop_stray_marks(text.removeprefix(self._bos))

    def _render_whole(
        self, messages: Messages, add_generation_prompt: bool
    ) -> tuple[list[dict[str, Any]], str]:
        """Return the escaped messages, and the rendered text, which contains all of them."""
        escaped = self._escape_messages(messages)
        text = self.render(escaped, add_generation_prompt)
        self._check_complete(escaped, text)
        return escaped, text

    def render_document(self, messages: Messages) -> list[tuple[str, float]]:
        """Return a training conversation as texts with loss weights, each for `split_escaped`.

        Messages of the assistant have weight 1, up to and including their closing control token;
        all other text has weight 0. Text after the last assistant message is dropped, and so are
        the leading bos and the trailing eos, which every document gets anyway.

        Raises:
          UserError: no message is the assistant's; or the template rejects the messages; or it
            writes a message differently when others follow, so that it cannot be located.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise UserError('no message has the role "assistant": there is nothing to learn')
        escaped = self._escape_messages(messages[: answers[-1] + 1])
        # cuts before and after each answer
        cuts = [cut for i in answers for cut in ((i, True), (i + 1, False))]
        whole, ends = self._renderer.render(escaped, False, _FIXED_DATE, cuts)
        texts, start = [], 0
        for i, begin, end in zip(answers, ends[::2], ends[1::2], strict=True):
            if begin is not None and end is None:
                end = self._find_answer_end(whole, begin, escaped[i])
            if begin is None or end is None or not start <= begin <= end:
                raise UserError(
                    f"{self._label}: does not write message {i + 1} after the text of those "
                    "before it, so its tokens cannot be located; use another template"
                )
            stop = self._find_message_end(whole[:end])
            texts += [(whole[start:begin], 0.0), (whole[begin:stop], 1.0)]
            start = stop
        self._check_complete(escaped[: answers[-1] + 1], whole)
        texts[0] = (texts[0][0].removeprefix(self._bos), 0.0)
        texts[-1] = (texts[-1][0].removesuffix(self._eos), 1.0)
        return [(self._drop_stray_marks(text), weight) for text, weight in texts]

    def _find_answer_end(self, text: str, begin: int, message: Mapping[str, Any]) -> int | None:
        """Return the end of an answer that the template writes differently from the last one.

        Qwen 3's, for example, has empty thoughts in the last answer only. None if between `begin`
        and the next control token there is anything but the answer.
        """
        content = message.get("content")
        if not isinstance(content, str) or not (content := content.strip()):
            return None
        at = text.find(content, begin)
        after = text[at + len(content) :].lstrip()
        if at < 0 or text[begin:at].strip() or not after.startswith(self._controls):
            return None
        control = max(filter(after.startswith, self._controls), key=len)
        return len(text) - len(after) + len(control)

    def _find_message_end(self, text: str) -> int:
        """Return where the last message ends: at its control token if only white space follows."""
        stripped = text.rstrip()
        return len(stripped if stripped.endswith(self._controls) else text)

    def _check_complete(self, escaped: Messages, text: str) -> None:
        """Raise a `UserError` if the rendered text lacks the content of a message."""
        if (i := first_missing_message(escaped, text)) is not None:
            raise UserError(
                f"{self._label}: does not write what message {i + 1} (role {escaped[i]['role']!r}) "
                "says; use another template, as chat_template.jinja beside tokenizer.json"
            )

    def _escape_messages(self, messages: Messages) -> list[dict[str, Any]]:
        """Return the messages, in which the strings of control tokens are escaped."""
        return [self._escape_value(message) for message in messages]

    def _escape_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control_pattern.sub(lambda match: f"{_OPEN}{match[0]}{_CLOSE}", value)
        if isinstance(value, Mapping):
            return {self._escape_value(k): self._escape_value(part) for k, part in value.items()}
        if isinstance(value, list):
            return [self._escape_value(part) for part in value]
        return value

    def _drop_stray_marks(self, text: str) -> str:
        """Return a rendered text without the marks of strings that the template took apart.

        Some templates look for a control token's string, such as "</think>", in a message, and
        write it themselves. What is left of its escape is the marks.
        """
        return self._mark_pattern.sub(lambda match: match[0] if match[1] else "", text)


def split_escaped(rendered: str) -> Iterator[tuple[str, bool]]:
    """Yield each part of a rendered text, and whether control tokens are special in it."""
    for i, part in enumerate(_ESCAPED.split(rendered)):
        if part:
            yield part, i % 2 == 0
