"""Chats to prompts, compared byte for byte with stored strings.

In stored strings the control tokens are short: ⟨B⟩ and ⟨E⟩ begin and end a text, ⟨S⟩ ⟨U⟩ ⟨A⟩ name
the speaker, D belongs to tool calls. The wording that the library inserts appears as {effort ..},
{tools} and {format}; it is fixed by digests.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import deepseek_recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_neuron.checkpoint import tiny_tokenizer
from deepinfer_neuron.errors import TokenizerError
from deepinfer_neuron.text.chat import ChatFormat, ParserStart, ParserState, RenderedChat
from deepinfer_neuron.text.chat_messages import ChatOptions, read_chat
from deepinfer_neuron.text.tokenizer import Tokenizer
from tests.support import small_tokenizer
from tests.support.chat_messages import Dict, assistant, call, result, system, tool, user
from tests.support.small_tokenizer import ModelStub

SIZE = 1024
SHORT = {
    "<｜begin▁of▁sentence｜>": "⟨B⟩",
    "<｜end▁of▁sentence｜>": "⟨E⟩",
    "<｜System｜>": "⟨S⟩",
    "<｜User｜>": "⟨U⟩",
    "<｜Assistant｜>": "⟨A⟩",
    "<｜latest_reminder｜>": "⟨R⟩",
    "｜DSML｜": "D",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a generated tokenizer."""
    path = tmp_path_factory.mktemp("generated")
    tiny_tokenizer.write_tokenizer(path, SIZE, 4096)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    """That tokenizer; its image placeholder is the 24th id from the end."""
    return Tokenizer.load(directory, ModelStub(vocab_size=SIZE, image_token_id=SIZE - 24))


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer) -> ChatFormat:
    """The chat form with that tokenizer."""
    return ChatFormat(tokenizer)


TOOLS = [tool(description="Adds", parameters={"type": "object", "properties": {}}), tool("g")]
SCHEMA = {"type": "object", "ä": 1, "a": [True]}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def inserted(chat: ChatFormat, **options: Any) -> str:
    """What the options insert behind the text of a system message, without the blank line."""
    plain = chat.render([system("s"), user("u")], thinking=False).text
    longer = chat.render([system("s"), user("u")], thinking=False, **options).text
    head, tail = plain.split("<｜User｜>")
    assert longer.startswith(f"{head}\n\n")
    assert longer.endswith(f"<｜User｜>{tail}")
    return longer.removeprefix(f"{head}\n\n").removesuffix(f"<｜User｜>{tail}")


def short(chat: ChatFormat, rendered: RenderedChat) -> str:
    """The prompt in the notation of the stored strings."""
    text = rendered.text
    inserts = {
        inserted(chat, tools=TOOLS): "{tools}",
        inserted(chat, response_format=AS_SCHEMA): "{format}",
    }
    for long, name in (inserts | SHORT).items():
        text = text.replace(long, name)
    # The effort line is the first of a system message and names its number first.
    return re.sub(r"^(⟨B⟩⟨S⟩)(?!\{)[^\n\d⟨]+(\d+)[^\n⟨]*\n\n", r"\1{effort \2}", text)


def digest(text: str) -> str:
    """A fingerprint of wording that is not repeated here."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


CALLS_12 = (
    "\n\n<D calls>\n"
    '<D invoke name="f">\n\n</D invoke>\n'
    '<D invoke name="g">\n'
    '<D parameter name="q" string="true">é "<b>"\n</D parameter>\n'
    '<D parameter name="n" string="false">{"l": [1, null, "ä"]}</D parameter>\n'
    "</D invoke>\n"
    "</D calls>"
)
ARGUMENTS = '{"q": "é \\"<b>\\"\\n", "n": {"l": [1,null,"\\u00e4"]}}'
ROUND_TRIP = [
    user("u"),
    assistant("x", call("c1"), call("c2", "g", ARGUMENTS), reasoning="r"),
    result("c2", "two"),
    result("c1", "one"),
]
REMINDER = {"role": "latest_reminder", "content": "rem"}
OFF: Dict = {"thinking": False}
FORCED: Dict = {"thinking": False, "tools": TOOLS, "tool_choice": "required"}
NAMED = {"type": "function", "function": {"name": "g"}}

PROMPTS: list[tuple[str, list[Dict], Dict, str]] = [
    ("chat", [user("Hi")], OFF, "⟨B⟩⟨U⟩Hi⟨A⟩</think>"),
    ("thinking", [user("Hi")], {}, "⟨B⟩⟨S⟩{effort 75}⟨U⟩Hi⟨A⟩<think>"),
    *(
        (
            f"effort {name}",
            [user("Hi")],
            {"reasoning_effort": name},
            f"⟨B⟩⟨S⟩{{effort {number}}}⟨U⟩Hi⟨A⟩<think>",
        )
        for name, number in (
            *(("minimal", 50), ("low", 50), ("medium", 75), ("high", 75), ("xhigh", 75)),
            *(("max", 100), (None, 75)),
        )
    ),
    ("effort none", [user("Hi")], {"reasoning_effort": "none"}, "⟨B⟩⟨U⟩Hi⟨A⟩</think>"),
    ("effort unused", [user("Hi")], {**OFF, "reasoning_effort": "max"}, "⟨B⟩⟨U⟩Hi⟨A⟩</think>"),
    # System messages.
    ("system", [system("Be nice"), user("Hi")], OFF, "⟨B⟩⟨S⟩Be nice⟨U⟩Hi⟨A⟩</think>"),
    (
        "system, thinking",
        [system("Be nice"), user("Hi")],
        {},
        "⟨B⟩⟨S⟩{effort 75}Be nice⟨U⟩Hi⟨A⟩<think>",
    ),
    (
        "system in the middle",
        [user("a"), assistant("b"), system("s"), user("c")],
        OFF,
        "⟨B⟩⟨U⟩a⟨A⟩</think>b⟨E⟩⟨S⟩s⟨U⟩c⟨A⟩</think>",
    ),
    ("system last", [user("a"), system("s")], {}, "⟨B⟩⟨S⟩{effort 75}⟨U⟩a⟨S⟩s⟨A⟩<think>"),
    ("system alone", [system("s")], OFF, "⟨B⟩⟨S⟩s⟨A⟩</think>"),
    # Users.
    ("parts", [user([{"type": "text", "text": t} for t in "ab"])], OFF, "⟨B⟩⟨U⟩a\n\nb⟨A⟩</think>"),
    ("consecutive users", [user("a"), user("b")], OFF, "⟨B⟩⟨U⟩a\n\nb⟨A⟩</think>"),
    (
        "developer",
        [{"role": "developer", "content": "d"}, user("a")],
        OFF,
        "⟨B⟩⟨U⟩d\n\na⟨A⟩</think>",
    ),
    ("reminder", [user("a"), REMINDER], OFF, "⟨B⟩⟨U⟩a⟨R⟩rem⟨A⟩</think>"),
    ("reminder first", [REMINDER, user("a")], OFF, "⟨B⟩⟨R⟩rem⟨U⟩a⟨A⟩</think>"),
    # The assistant.
    (
        "empty assistant",
        [user("a"), assistant(""), user("b")],
        OFF,
        "⟨B⟩⟨U⟩a⟨A⟩</think>⟨E⟩⟨U⟩b⟨A⟩</think>",
    ),
    (
        "earlier reasoning is dropped",
        [user("a"), assistant("x", reasoning="r"), user("b")],
        {},
        "⟨B⟩⟨S⟩{effort 75}⟨U⟩a⟨A⟩</think>x⟨E⟩⟨U⟩b⟨A⟩<think>",
    ),
    (
        "tools keep earlier reasoning",
        [user("a"), assistant("x", reasoning="r"), user("b"), assistant("y"), user("c")],
        {"tools": TOOLS},
        "⟨B⟩⟨S⟩{effort 75}\n\n{tools}⟨U⟩a⟨A⟩<think>r</think>x⟨E⟩⟨U⟩b⟨A⟩<think></think>y⟨E⟩"
        "⟨U⟩c⟨A⟩<think>",
    ),
    (
        "no reasoning without thinking",
        [user("a"), assistant("x", reasoning="r"), user("b")],
        {**OFF, "tools": TOOLS},
        "⟨B⟩⟨S⟩\n\n{tools}⟨U⟩a⟨A⟩</think>x⟨E⟩⟨U⟩b⟨A⟩</think>",
    ),
    # Tools.
    ("tools", [user("a")], {**OFF, "tools": TOOLS}, "⟨B⟩⟨S⟩\n\n{tools}⟨U⟩a⟨A⟩</think>"),
    (
        "tools and system",
        [system("s"), user("a")],
        {"tools": TOOLS},
        "⟨B⟩⟨S⟩{effort 75}s\n\n{tools}⟨U⟩a⟨A⟩<think>",
    ),
    (
        "tools, system later",
        [user("a"), system("s")],
        {**OFF, "tools": TOOLS},
        "⟨B⟩⟨S⟩\n\n{tools}⟨U⟩a⟨S⟩s⟨A⟩</think>",
    ),
    ("no tools", [user("a")], {**OFF, "tools": []}, "⟨B⟩⟨U⟩a⟨A⟩</think>"),
    (
        "tool choice none",
        [user("a")],
        {**OFF, "tools": TOOLS, "tool_choice": "none"},
        "⟨B⟩⟨U⟩a⟨A⟩</think>",
    ),
    ("forced", [user("a")], FORCED, "⟨B⟩⟨S⟩\n\n{tools}⟨U⟩a⟨A⟩</think>\n\n<D calls>\n"),
    (
        "results out of order",
        ROUND_TRIP,
        {"tools": TOOLS},
        f"⟨B⟩⟨S⟩{{effort 75}}\n\n{{tools}}⟨U⟩u⟨A⟩<think>r</think>x{CALLS_12}⟨E⟩"
        "⟨U⟩<tool_result>one</tool_result>\n\n<tool_result>two</tool_result>⟨A⟩<think>",
    ),
    (
        "results and a user in one turn",
        [*ROUND_TRIP, user("next")],
        OFF,
        f"⟨B⟩⟨U⟩u⟨A⟩</think>x{CALLS_12}⟨E⟩⟨U⟩<tool_result>one</tool_result>\n\n"
        "<tool_result>two</tool_result>\n\nnext⟨A⟩</think>",
    ),
    (
        "unknown results sort first and stay in order",
        [*ROUND_TRIP[:2], result("c2", "two"), result("?", "p"), result(None, "q")],
        OFF,
        f"⟨B⟩⟨U⟩u⟨A⟩</think>x{CALLS_12}⟨E⟩⟨U⟩<tool_result>p</tool_result>\n\n"
        "<tool_result>q</tool_result>\n\n<tool_result>two</tool_result>⟨A⟩</think>",
    ),
    (
        "calls without content",
        [user("u"), assistant(None, call("c")), result("c", "1")],
        OFF,
        '⟨B⟩⟨U⟩u⟨A⟩</think>\n\n<D calls>\n<D invoke name="f">\n\n</D invoke>\n</D calls>⟨E⟩'
        "⟨U⟩<tool_result>1</tool_result>⟨A⟩</think>",
    ),
    # Response formats.
    (
        "response format",
        [user("a")],
        {**OFF, "response_format": AS_SCHEMA},
        "⟨B⟩⟨S⟩\n\n{format}⟨U⟩a⟨A⟩</think>",
    ),
    (
        "response format behind tools",
        [system("s"), user("a")],
        {**OFF, "response_format": AS_SCHEMA, "tools": TOOLS},
        "⟨B⟩⟨S⟩s\n\n{tools}\n\n{format}⟨U⟩a⟨A⟩</think>",
    ),
    (
        "response format text",
        [user("a")],
        {**OFF, "response_format": {"type": "text"}},
        "⟨B⟩⟨U⟩a⟨A⟩</think>",
    ),
    # Continuations.
    *(
        (name, [user("a"), message], {**options, "continue_final_message": True}, expected)
        for name, message, options, expected in (
            ("continue", assistant("pre"), OFF, "⟨B⟩⟨U⟩a⟨A⟩</think>pre"),
            (
                "continue, thinking",
                assistant("pre", reasoning="r"),
                {},
                "⟨B⟩⟨S⟩{effort 75}⟨U⟩a⟨A⟩<think>r</think>pre",
            ),
            (
                "continue reasoning",
                assistant("", reasoning="r"),
                {},
                "⟨B⟩⟨S⟩{effort 75}⟨U⟩a⟨A⟩<think>r",
            ),
            ("continue nothing", assistant(""), {}, "⟨B⟩⟨S⟩{effort 75}⟨U⟩a⟨A⟩<think>"),
        )
    ),
    ("answer again", [user("a"), assistant("b")], OFF, "⟨B⟩⟨U⟩a⟨A⟩</think>b⟨E⟩⟨A⟩</think>"),
]


class TestRender:
    """The text of prompts."""

    @pytest.mark.parametrize(
        ("messages", "options", "expected"),
        [case[1:] for case in PROMPTS],
        ids=[case[0] for case in PROMPTS],
    )
    def test_stored_prompts(
        self,
        chat: ChatFormat,
        tokenizer: Tokenizer,
        messages: list[Dict],
        options: Dict,
        expected: str,
    ) -> None:
        rendered = chat.render(messages, **options)
        assert short(chat, rendered) == expected
        # Nothing in these messages spells a control token, so the text alone gives the ids too.
        assert tokenizer.decode(rendered.token_ids, skip_special_tokens=False) == rendered.text

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"tools": TOOLS}, "34c70f047e60acac"),
            ({"response_format": AS_SCHEMA}, "226a16b6ce6d60ed"),
            ({"response_format": {"type": "json_object"}}, "26fcf97af21b5a12"),
        ],
    )
    def test_inserted_wording(self, chat: ChatFormat, options: Dict, expected: str) -> None:
        """The wording of deepseek-recipe 0.2.0: a release that changes it must be looked at."""
        assert digest(inserted(chat, **options)) == expected

    @pytest.mark.parametrize(
        ("effort", "expected"),
        [("low", "79348f47e7f5f748"), ("high", "86fdea28dfcf6ee1"), ("max", "eb6335f1fbec0781")],
    )
    def test_effort_line(self, chat: ChatFormat, effort: str, expected: str) -> None:
        text = chat.render([user("Hi")], reasoning_effort=effort).text
        assert digest(text.split("<｜System｜>")[1].split("<｜User｜>")[0]) == expected

    def test_inserted_data(self, chat: ChatFormat) -> None:
        """Schemas stand on lines of their own, in the order their keys are given in."""
        lines = inserted(chat, tools=TOOLS).split("\n")
        first = '{"name": "f", "description": "Adds", "parameters": {"type": "object", '
        position = lines.index(first + '"properties": {}}}')
        assert lines[position + 1] == '{"name": "g", "description": "", "parameters": null}'
        assert lines[-1] == ""
        last = inserted(chat, response_format=AS_SCHEMA).split("\n")[-1]
        assert last == '{"type": "object", "ä": 1, "a": [true]}'
        last = inserted(chat, response_format={"type": "json_object"}).split("\n")[-1]
        assert last == '{"type": "json_object"}'

    def test_a_named_tool_is_the_only_one(self, chat: ChatFormat) -> None:
        named = chat.render([user("a")], **(FORCED | {"tool_choice": NAMED}))
        alone = chat.render([user("a")], **(FORCED | {"tools": [tool("g")]}))
        assert named == alone

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ({"a": "é"}, '<D parameter name="a" string="true">é</D parameter>'),
            ('"{\\"a\\": 1}"', '<D parameter name="a" string="false">1</D parameter>'),
            ("[1]", '<D parameter name="arguments" string="true">[1]</D parameter>'),
            ("no JSON", '<D parameter name="arguments" string="true">no JSON</D parameter>'),
            ('"a"', '<D parameter name="arguments" string="true">"a"</D parameter>'),
            ('"1"', '<D parameter name="arguments" string="true">"1"</D parameter>'),
        ],
    )
    def test_forms_of_arguments(self, chat: ChatFormat, arguments: object, expected: str) -> None:
        messages = [user("u"), assistant("", call("c", arguments=arguments))]
        text = short(chat, chat.render(messages, thinking=False))
        assert f'<D invoke name="f">\n{expected}\n</D invoke>' in text


class TestStart:
    """How the answer to a prompt is to be read."""

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("chat", ParserStart(ParserState.CONTENT, fresh=True, tools=False)),
            ("thinking", ParserStart(ParserState.REASONING, fresh=True, tools=False)),
            ("tools", ParserStart(ParserState.CONTENT, fresh=True, tools=True)),
            ("tools and system", ParserStart(ParserState.REASONING, fresh=True, tools=True)),
            ("tool choice none", ParserStart(ParserState.CONTENT, fresh=True, tools=False)),
            ("forced", ParserStart(ParserState.CALLS, fresh=False, tools=True)),
            ("continue", ParserStart(ParserState.CONTENT, fresh=False, tools=False)),
            ("continue, thinking", ParserStart(ParserState.CONTENT, fresh=False, tools=False)),
            ("continue reasoning", ParserStart(ParserState.REASONING, fresh=False, tools=False)),
            ("continue nothing", ParserStart(ParserState.REASONING, fresh=True, tools=False)),
        ],
    )
    def test_start(self, chat: ChatFormat, name: str, expected: ParserStart) -> None:
        ((messages, options),) = [case[1:3] for case in PROMPTS if case[0] == name]
        assert chat.render(messages, **options).start == expected

    def test_tags_in_messages_do_not_count(self, chat: ChatFormat) -> None:
        rendered = chat.render(
            [user("a"), assistant("x <think>")], **OFF, continue_final_message=True
        )
        assert rendered.start.state is ParserState.CONTENT

    @pytest.mark.parametrize(
        ("thinking", "output"),
        [
            (True, "why\nnot</think>See:" + CALLS_12),
            (True, "</think>" + CALLS_12),
            (True, "no tool</think>Hello\n"),
            (False, "See:" + CALLS_12),
            (False, "Hello"),
        ],
    )
    def test_the_next_prompt_repeats_what_was_written(
        self, chat: ChatFormat, thinking: bool, output: str
    ) -> None:
        """So a cache of the first prompt and its answer serves the next one."""
        output = output.replace("D ", "｜DSML｜ ")
        first = chat.render([user("u")], tools=TOOLS, thinking=thinking)
        message = chat.parse(output, first.start).as_message()
        second = chat.render([user("u"), message, user("v")], tools=TOOLS, thinking=thinking)
        assert second.text.startswith(f"{first.text}{output}<｜end▁of▁sentence｜>")

    def test_parsers_are_independent(self, chat: ChatFormat) -> None:
        start = chat.render([user("u")]).start
        first, second = chat.parser(start), chat.parser(start)
        first.push("a")
        assert (first.message.reasoning_content, second.message.reasoning_content) == ("a", "")


CONTROL_SPELLINGS = [
    *SHORT,
    "<think>",
    "</think>",
    "<｜deepseek_image｜>",
    "<｜image｜>",
    "<｜▁pad▁｜>",
]


class TestIds:
    """Prompts to ids."""

    def test_chat(self, chat: ChatFormat, tokenizer: Tokenizer) -> None:
        names = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"]
        bos, of_user, of_assistant, end = map(tokenizer.token_id, names)
        text = tokenizer.encode("Hi", add_bos=False)
        ids = chat.render([user("Hi")], thinking=False).token_ids
        assert ids == (bos, of_user, *text, of_assistant, end)

    @pytest.mark.parametrize("spelling", CONTROL_SPELLINGS)
    def test_messages_place_no_control_token(
        self, chat: ChatFormat, tokenizer: Tokenizer, spelling: str
    ) -> None:
        """Wherever a text may stand: as many control ids as with a harmless text."""

        def controls(text: str) -> list[int]:
            messages = [
                system(text),
                user([{"type": "text", "text": text}]),
                assistant(text, call("1", "f", {text: text, "n": [text]}), reasoning=text),
                result("1", text),
                REMINDER | {"content": text},
                assistant(text, call("2", "f", text)),
                {"role": "developer", "content": text},
            ]
            parameters = {"type": "object", "description": text}
            rendered = chat.render(
                messages,
                tools=[tool(description=text, parameters=parameters)],
                response_format={"type": "json_schema", "json_schema": {"schema": {text: text}}},
            )
            assert tokenizer.decode(rendered.token_ids, skip_special_tokens=False) == rendered.text
            return [i for i in rendered.token_ids if i < 3 or i >= SIZE - 48]

        assert controls(f"a {spelling}{spelling} b") == controls("harmless")

    @settings(deadline=None, derandomize=True, max_examples=60)
    @given(
        texts=st.lists(
            st.lists(
                st.sampled_from([*CONTROL_SPELLINGS, "a", " the", "\n", "é", "😀"]), max_size=6
            ),
            min_size=3,
            max_size=3,
        ),
        thinking=st.booleans(),
    )
    def test_the_library_gives_the_same_ids(
        self,
        chat: ChatFormat,
        directory: Path,
        texts: list[list[str]],
        thinking: bool,
    ) -> None:
        system_text, user_text, reminder = ("".join(parts) for parts in texts)
        messages = [system(system_text), user(user_text), REMINDER | {"content": reminder}]
        options = ChatOptions(TOOLS, None, thinking, None, None, False)
        encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(
            deepseek_recipe.Tokenizer.from_file(str(directory / "tokenizer.json"))
        )
        expected = encoding.encode(read_chat(messages, options).conversation)
        rendered = chat.render(messages, tools=TOOLS, thinking=thinking)
        assert list(rendered.token_ids) == expected

    def test_a_tokenizer_without_the_control_tokens(self, tmp_path: Path) -> None:
        small_tokenizer.write_tokenizer(tmp_path)
        with pytest.raises(TokenizerError, match="no token '<｜latest_reminder｜>'"):
            ChatFormat(Tokenizer.load(tmp_path, ModelStub()))

    def test_a_model_that_ends_texts_otherwise(self, directory: Path, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
        (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
        model = ModelStub(vocab_size=SIZE, eos_token_id=5, image_token_id=SIZE - 24)
        with pytest.raises(TokenizerError, match="has id 1 but the model uses 5"):
            ChatFormat(Tokenizer.load(tmp_path, model))
