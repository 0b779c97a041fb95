"""Chats: messages to a prompt, and the model's text back to a message.

The prompt is written by ``deepseek_recipe``, which knows the form the model was trained with.
This module gives it checked messages and encodes what it writes such that only the control tokens
it placed itself become control ids, whatever the messages spell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from deepseek_recipe import DeepseekV41Encoding, RenderedPrompt, SpecialToken, SpecialTokens

from deepinfer_neuron.errors import TokenizerError
from deepinfer_neuron.text.chat_messages import ChatOptions, read_chat
from deepinfer_neuron.text.chat_parser import (
    ChatParser,
    ParsedMessage,
    ParserStart,
    ParserState,
    ToolCall,
)
from deepinfer_neuron.text.policy import IMAGE_TOKEN
from deepinfer_neuron.text.tokenizer import Tokenizer

__all__ = [
    "ChatFormat",
    "ChatParser",
    "ParsedMessage",
    "ParserStart",
    "ParserState",
    "RenderedChat",
    "ToolCall",
]

_TEXT_TOKENS: Final = (
    SpecialToken.Bos,
    SpecialToken.Eos,
    SpecialToken.ThinkingStart,
    SpecialToken.ThinkingEnd,
    SpecialToken.System,
    SpecialToken.User,
    SpecialToken.Assistant,
    SpecialToken.LatestReminder,
    SpecialToken.Dsml,
)
"""The control tokens that a prompt without images may hold."""


@dataclass(frozen=True)
class RenderedChat:
    """A prompt: its ids, its text, and how to read what the model appends to it."""

    token_ids: tuple[int, ...]
    text: str
    start: ParserStart


class ChatFormat:
    """The chat form of a DeepSeek-V4.1 checkpoint."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes the checkpoint's tokenizer.

        Raises ``TokenizerError`` if it lacks a control token of the chat form, or begins and ends
        texts with other ones.
        """
        # The placeholder for images has this name in the tokenizers of the model, which is not
        # the one that the library assumes.
        spellings = SpecialTokens(image=IMAGE_TOKEN)
        self._tokenizer = tokenizer
        self._encoding = DeepseekV41Encoding().with_special_tokens(spellings)
        self._think = spellings.token(SpecialToken.ThinkingStart)
        self._end_think = spellings.token(SpecialToken.ThinkingEnd)
        self._ids = {
            spelling: _control_id(tokenizer, spelling)
            for spelling in map(spellings.token, _TEXT_TOKENS)
        }
        for token, expected in (
            (SpecialToken.Bos, tokenizer.bos_token_id),
            (SpecialToken.Eos, tokenizer.eos_token_id),
        ):
            spelling = spellings.token(token)
            if self._ids[spelling] != expected:
                raise TokenizerError(
                    f"{spelling!r} has id {self._ids[spelling]} but the model uses {expected} in "
                    "its place, so chats cannot be encoded. Use generate with a prompt."
                )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        thinking: bool = True,
        reasoning_effort: str | None = None,
        response_format: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
    ) -> RenderedChat:
        """Writes the prompt that makes the model answer a chat.

        Args:
            messages: a list of OpenAI messages: dicts with ``role`` (system, developer, user,
                assistant, tool, latest_reminder) and ``content``, text or a list of text parts.
                An assistant message may have ``reasoning_content`` and ``tool_calls``, a tool
                message has ``tool_call_id``. A developer's message counts as a user's.
            tools: a list of OpenAI function tools, or None.
            tool_choice: ``"auto"`` (also None), ``"none"``, and without thinking ``"required"``
                or ``{"type": "function", "function": {"name": ...}}``.
            thinking: whether the model reasons before it answers.
            reasoning_effort: ``"low"``, ``"high"`` (also None), ``"xhigh"``, ``"max"``;
                ``"minimal"`` counts as low and ``"medium"`` as high; ``"none"`` turns thinking
                off. Without thinking it has no effect.
            response_format: ``{"type": "text"}`` (also None), ``{"type": "json_object"}`` or
                ``{"type": "json_schema", "json_schema": {"schema": ...}}``: tells the model, but
                does not force it.
            continue_final_message: continue the last message, an assistant's, instead of
                answering. What is parsed later is the continuation alone.

        Raises:
            RequestError: one of them is not as described; the message says which and why. Images
                are not supported.
        """
        chat = read_chat(
            messages,
            ChatOptions(
                tools,
                tool_choice,
                thinking,
                reasoning_effort,
                response_format,
                continue_final_message,
            ),
        )
        prompt = self._encoding.render_conversation(chat.conversation)
        state = ParserState.CALLS if chat.forces_call else self._final_state(prompt)
        # A new turn begins right behind a control token; a continued one ends in text.
        fresh = prompt.special_ranges[-1][1] == len(prompt.prompt)
        start = ParserStart(state, fresh, tools=chat.has_tools)
        return RenderedChat(self._encode(prompt), prompt.prompt, start)

    def parser(self, start: ParserStart) -> ChatParser:
        """A parser of what the model appends to a prompt, for text that arrives in pieces."""
        return ChatParser(start)

    def parse(self, text: str, start: ParserStart) -> ParsedMessage:
        """Reads a complete output ``text``, as the tokenizer decodes it, special tokens skipped."""
        parser = ChatParser(start)
        parser.push(text)
        parser.flush()
        return parser.message

    def _final_state(self, prompt: RenderedPrompt) -> ParserState:
        """Whether the prompt ends inside reasoning: only its own tags count."""
        placed = (prompt.prompt[start:end] for start, end in reversed(prompt.special_ranges))
        last = next((token for token in placed if token in (self._think, self._end_think)), None)
        return ParserState.REASONING if last == self._think else ParserState.CONTENT

    def _encode(self, prompt: RenderedPrompt) -> tuple[int, ...]:
        """Control tokens that the encoding placed become their ids, all else is plain text."""
        ids: list[int] = []
        done = 0
        for start, end in prompt.special_ranges:
            ids += self._tokenizer.encode(prompt.prompt[done:start], add_bos=False)
            ids.append(self._ids[prompt.prompt[start:end]])
            done = end
        ids += self._tokenizer.encode(prompt.prompt[done:], add_bos=False)
        return tuple(ids)


def _control_id(tokenizer: Tokenizer, spelling: str) -> int:
    found = tokenizer.token_id(spelling)
    if found is None:
        raise TokenizerError(
            f"The tokenizer has no token {spelling!r}, so chats cannot be encoded. Use the "
            "tokenizer of a DeepSeek-V4.1 checkpoint, or generate with a prompt."
        )
    return found
