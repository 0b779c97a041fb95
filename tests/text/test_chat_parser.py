"""Reading what the model writes: reasoning, content and tool calls, in any pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import deepseek_recipe
import pytest
from deepseek_recipe import InferenceChunk, InferenceFinishReason, ThinkingInitialStage
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer_neuron.text.chat_parser import (
    ChatEvent,
    ChatParser,
    ContentDelta,
    ParsedMessage,
    ParserStart,
    ParserState,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
    random_call_id,
)

D = "｜DSML｜"
REASONING = ParserStart(ParserState.REASONING)
CONTENT = ParserStart(ParserState.CONTENT)
CALLS = ParserStart(ParserState.CALLS)
Calls = list[tuple[str, str]]


def parameter(name: str, value: str, string: str | None = "true") -> str:
    """One argument; ``string`` None leaves the mark out."""
    mark = "" if string is None else f' string="{string}"'
    return f'<{D} parameter name="{name}"{mark}>{value}</{D} parameter>'


def invoke(name: str, *parameters: str) -> str:
    """One call."""
    return f'<{D} invoke name="{name}">\n' + "\n".join(parameters) + f"\n</{D} invoke>"


def block(*calls: str) -> str:
    """The block of calls."""
    return f"<{D} calls>\n" + "\n".join(calls) + f"\n</{D} calls>"


def parse(pieces: Sequence[str], start: ParserStart) -> tuple[list[ChatEvent], ParsedMessage]:
    """Events and message, with ids that are just the index."""
    parser = ChatParser(start, new_call_id=str)
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.flush(), parser.message


def read(text: str, start: ParserStart) -> tuple[str | None, str, Calls]:
    """Reasoning, content and (name, arguments) of the calls."""
    message = parse([text], start)[1]
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.reasoning_content, message.content, calls


def replay(events: Sequence[ChatEvent]) -> tuple[str, str, Calls]:
    """The same from the events."""
    reasoning, content = "", ""
    names: list[str] = []
    arguments: list[str] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning += text
            case ContentDelta(text):
                content += text
            case ToolCallStart(index, call_id, name):
                assert (index, call_id) == (len(names), str(index))
                names.append(name)
                arguments.append("")
            case ToolCallDelta(index, text):
                assert text
                arguments[index] += text
    return reasoning, content, list(zip(names, arguments, strict=True))


TWO_CALLS = block(invoke("f", parameter("a", "x")), invoke("g"))
EXAMPLES: list[tuple[str, ParserStart, tuple[str | None, str, Calls]]] = [
    # Text.
    ("\n\nhi\n", CONTENT, (None, "hi\n", [])),
    ("\n\nwhy</think>\n\nhi \n", REASONING, ("why", "hi \n", [])),
    ("why\n\n</think>hi", REASONING, ("why\n\n", "hi", [])),
    ("no end", REASONING, ("no end", "", [])),
    ("", REASONING, ("", "", [])),
    ("a</think>\nb", CONTENT, (None, "a\nb", [])),
    ("r</think>a</think>b", REASONING, ("r", "ab", [])),
    ("<think>a</think>b", CONTENT, (None, "<think>ab", [])),
    ("r</thi", REASONING, ("r</thi", "", [])),
    ("a < b </ c <｜D", CONTENT, (None, "a < b </ c <｜D", [])),
    ("a\n\n\nb\n", CONTENT, (None, "a\n\n\nb\n", [])),
    (f"a\n\n<{D} ca", CONTENT, (None, f"a\n\n<{D} ca", [])),
    # Continued messages keep their line feeds.
    ("\nx</think>\ny", ParserStart(ParserState.REASONING, fresh=False), ("\nx", "y", [])),
    ("\nx", ParserStart(ParserState.CONTENT, fresh=False), (None, "\nx", [])),
    # Calls.
    (f"ok\n\n{TWO_CALLS}", CONTENT, (None, "ok", [("f", '{"a": "x"}'), ("g", "{}")])),
    (f"ok \n{TWO_CALLS}\n\nmore", CONTENT, (None, "ok ", [("f", '{"a": "x"}'), ("g", "{}")])),
    (f"r{TWO_CALLS}more", REASONING, ("r", "", [("f", '{"a": "x"}'), ("g", "{}")])),
    (f"r</think>\n\n{TWO_CALLS}", REASONING, ("r", "", [("f", '{"a": "x"}'), ("g", "{}")])),
    (TWO_CALLS.split("calls>\n", 1)[1], CALLS, (None, "", [("f", '{"a": "x"}'), ("g", "{}")])),
    (TWO_CALLS, CALLS, (None, "", [("f", '{"a": "x"}'), ("g", "{}")])),
    (f"a\n{block()}b", CONTENT, (None, "a", [])),
    (f"x{block(invoke('f'))}{block(invoke('g'))}", CONTENT, (None, "x", [("f", "{}")])),
    # The spelling of the previous model version.
    (
        f"c\n\n{TWO_CALLS}".replace(f"{D} ", D).replace("calls", "tool_calls"),
        CONTENT,
        (None, "c", [("f", '{"a": "x"}'), ("g", "{}")]),
    ),
    # Arguments.
    (
        block(invoke("f", parameter("s", 'q"\\\n\té <b> </x> </think>'), parameter("e", ""))),
        CONTENT,
        (None, "", [("f", '{"s": "q\\"\\\\\\n\\té <b> </x> </think>", "e": ""}')]),
    ),
    (
        block(
            invoke("f", parameter("n", "1.50", "false"), parameter("l", '[1, {"é": 2}]', "false"))
        ),
        CONTENT,
        (None, "", [("f", '{"n": 1.50, "l": [1, {"é": 2}]}')]),
    ),
    (
        block(invoke("f", parameter("n", "7", None), parameter("t", "it's", None))),
        CONTENT,
        (None, "", [("f", '{"n": 7, "t": "it\'s"}')]),
    ),
    (
        block(invoke("f", parameter("n", "{'a'", "false"), parameter("x", "", "false"))),
        CONTENT,
        (None, "", [("f", '{"n": "{\'a\'", "x": ""}')]),
    ),
    (
        block(invoke("f", parameter("n", "NaN", "false"), parameter("x", "9" * 5000, "false"))),
        CONTENT,
        (None, "", [("f", f'{{"n": "NaN", "x": {"9" * 5000}}}')]),
    ),
    (
        block(invoke("f", parameter("deep", "[" * 100_000, "false"))),
        CONTENT,
        (None, "", [("f", f'{{"deep": "{"[" * 100_000}"}}')]),
    ),
    # Unusual tags.
    (
        block(f'<{D} invoke name="f"><{D} parameter string="true" name="a>b">v</{D} parameter>'),
        CONTENT,
        (None, "", [("f", '{"a>b": "v"}')]),
    ),
    (
        block(f'junk<{D} invoke><{D} invoke name="f"> no <{D} parameter>1</{D} parameter>')
        + "</x>",
        CONTENT,
        (None, "", [("f", "{}")]),
    ),
    (
        f'<{D} calls><{D} invoke name="f"><{D} invoke name="g"></{D} invoke></{D} calls>',
        CONTENT,
        (None, "", [("f", "{}"), ("g", "{}")]),
    ),
    (
        block(f'<{D} invoke name="{"x" * 2000}">', invoke("f")),
        CONTENT,
        (None, "", [("f", "{}")]),
    ),
    # Without tools, their markup is text.
    (TWO_CALLS, ParserStart(ParserState.CONTENT, tools=False), (None, TWO_CALLS, [])),
    (
        f"r\n{TWO_CALLS}</think>\nc\n",
        ParserStart(ParserState.REASONING, tools=False),
        (f"r\n{TWO_CALLS}", "c\n", []),
    ),
]


class TestMessages:
    """Outputs and what is read from them."""

    @pytest.mark.parametrize(("text", "start", "expected"), EXAMPLES)
    def test_examples(
        self, text: str, start: ParserStart, expected: tuple[str | None, str, Calls]
    ) -> None:
        assert read(text, start) == expected

    @pytest.mark.parametrize(
        ("text", "start", "expected"), [case for case in EXAMPLES if len(case[0]) < 1000]
    )
    def test_split_at_every_position(
        self, text: str, start: ParserStart, expected: tuple[str | None, str, Calls]
    ) -> None:
        whole = parse([text], start)[1]
        for position in range(len(text) + 1):
            events, message = parse([text[:position], text[position:]], start)
            assert message == whole
            assert replay(events) == (expected[0] or "", *expected[1:])

    @pytest.mark.parametrize(("text", "start", "expected"), EXAMPLES)
    def test_character_by_character(
        self, text: str, start: ParserStart, expected: tuple[str | None, str, Calls]
    ) -> None:
        events, message = parse(list(text), start)
        assert message == parse([text], start)[1]
        assert replay(events) == (expected[0] or "", *expected[1:])

    @pytest.mark.parametrize("call", [call for case in EXAMPLES for call in case[2][2]])
    def test_arguments_are_json_objects(self, call: tuple[str, str]) -> None:
        if len(call[1]) < 4000:
            assert isinstance(json.loads(call[1]), dict)


class TestEndOfOutput:
    """Outputs that break off, and finish reasons."""

    @pytest.mark.parametrize(
        ("end", "arguments", "complete"),
        [
            ("", "", False),
            (f"<{D} param", "", False),
            (parameter("a", "x"), '{"a": "x"', False),
            (f'<{D} parameter name="a" string="true">rm /tm', '{"a": "rm /tm', False),
            (f'<{D} parameter name="a" string="true">x</{D} par', f'{{"a": "x</{D} par', False),
            (f'<{D} parameter name="a" string="false">[1, 2', '{"a": [1, 2', False),
            (f"</{D} invoke>", "{}", True),
        ],
    )
    def test_the_last_call_is_kept(self, end: str, arguments: str, complete: bool) -> None:
        text = f'ok\n\n<{D} calls>\n<{D} invoke name="f">\n' + end
        for pieces in ([text], list(text)):
            message = parse(pieces, CONTENT)[1]
            (call,) = message.tool_calls
            assert (call.name, call.arguments, call.complete) == ("f", arguments, complete)
            assert message.content == "ok"
            assert message.finish_reason is None

    def test_finish_reason(self) -> None:
        assert parse([block(invoke("f"))], CONTENT)[1].finish_reason == "tool_calls"
        assert parse([block()], CONTENT)[1].finish_reason is None
        assert parse(["hi"], CONTENT)[1].finish_reason is None

    def test_finished_once_the_block_is_closed(self) -> None:
        parser = ChatParser(CONTENT)
        finished = []
        for piece in (block(invoke("f"))[:-1], ">"):
            parser.push(piece)
            finished.append(parser.finished)
        assert finished == [False, True]
        assert parser.push("more") == []

    def test_nothing_is_read_after_the_end(self) -> None:
        parser = ChatParser(CONTENT)
        parser.push("a<")
        assert parser.flush() == [ContentDelta("<")]
        assert parser.push("b") == []
        assert parser.flush() == []
        assert parser.message.content == "a<"


class TestEvents:
    """What is reported before the output is complete."""

    def test_text_is_reported_as_soon_as_it_is_certain(self) -> None:
        parser = ChatParser(REASONING)
        assert parser.push("\n") == []
        assert parser.push("so <") == [ReasoningDelta("so ")]
        assert parser.push("/") == []
        assert parser.push("b") == [ReasoningDelta("</b")]
        assert parser.push("</think>\n") == []
        assert parser.push("yes\n\n") == [ContentDelta("yes")]
        assert parser.push("!") == [ContentDelta("\n\n"), ContentDelta("!")]

    def test_calls_are_reported_as_they_are_written(self) -> None:
        parser = ChatParser(CALLS, new_call_id=lambda index: f"id{index}")
        assert parser.push(f'<{D} invoke name="f"') == []
        assert parser.push(">") == [ToolCallStart(0, "id0", "f")]
        opening = f'<{D} parameter name="a" string="true">'
        assert parser.push(opening) == [ToolCallDelta(0, '{"a": "')]
        assert parser.push('say "') == [ToolCallDelta(0, 'say \\"')]
        assert parser.push(f"</{D} parameter>") == [ToolCallDelta(0, '"')]
        assert parser.push(parameter("n", "1", "false")) == [
            ToolCallDelta(0, ', "n": '),
            ToolCallDelta(0, "1"),
        ]
        assert parser.push(f"</{D} invoke>") == [ToolCallDelta(0, "}")]

    def test_call_ids_differ(self) -> None:
        ids = {random_call_id(index % 2) for index in range(100)}
        assert len(ids) == 100

    def test_as_message(self) -> None:
        message = parse([f"r</think>c{block(invoke('f', parameter('a', 'é')))}"], REASONING)[1]
        assert message.as_message() == {
            "role": "assistant",
            "content": "c",
            "reasoning_content": "r",
            "tool_calls": [
                {
                    "id": "0",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": "é"}'},
                }
            ],
        }
        assert parse(["c"], CONTENT)[1].as_message() == {"role": "assistant", "content": "c"}

    def test_time_grows_with_the_text_only(self) -> None:
        """Many tags in one piece, and a long start of a tag in small pieces."""
        many = block(*(invoke("f", parameter("a", "</think>")) for _ in range(5000)))
        assert len(parse([many], CONTENT)[1].tool_calls) == 5000
        never = f'<{D} calls><{D} invoke name="' + "x" * 50_000
        assert parse(list(never), CONTENT)[1].tool_calls == ()


FRAGMENTS = [
    *("</think>", "<think>", f"<{D} calls>", f"</{D} calls>", f"<{D}tool_calls>", "\n", "\n\n"),
    *(f'<{D} invoke name="f">', f"</{D} invoke>", f"<{D} invoke name=", '"', ">", "<", "</"),
    *(f'<{D} parameter name="a" string="true">', f'<{D} parameter name="b">', f"</{D} parameter>"),
    *("text", "1", "{}", " ", D, f"</{D}", f"<{D} ", "｜"),
]


@settings(deadline=None, derandomize=True, max_examples=400)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=30),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    state=st.sampled_from(list(ParserState)),
    fresh=st.booleans(),
    tools=st.booleans(),
)
@example([f'<{D} invoke name="', f"</{D} calls>", '"', ">"], [40], ParserState.CALLS, True, True)
def test_any_text_in_any_pieces(
    fragments: list[str], cuts: list[int], state: ParserState, fresh: bool, tools: bool
) -> None:
    text = "".join(fragments)
    start = ParserStart(state, fresh, tools or state is ParserState.CALLS)
    expected = parse([text], start)[1]
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    for split in (pieces, list(text)):
        events, message = parse(split, start)
        assert message == expected
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        assert replay(events) == (message.reasoning_content or "", message.content, calls)
    for call in expected.tool_calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


def library_parse(text: str, thinking: bool) -> tuple[str, str, Calls]:
    """The same by the stream processor of the library that writes the prompts."""
    request = deepseek_recipe.ChatCompletionRequest(
        {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "x"}]}
    ).convert(deepseek_recipe.ConversionOptions())
    processor = deepseek_recipe.StreamProcessor(
        deepseek_recipe.ChatCompletionRequest.chunk_generator(request, "id", "m"),
        deepseek_recipe.ParsingOptions(
            thinking_initial_stage=ThinkingInitialStage.ReasoningStart if thinking else None
        ),
    )
    chunks = [*processor.push(InferenceChunk.ready()), *processor.push(InferenceChunk.text(text))]
    chunks += processor.push(InferenceChunk.finish(InferenceFinishReason.Stop))
    chunks += processor.finish()
    reasoning, content = "", ""
    calls: Calls = []
    for chunk in chunks:
        for choice in json.loads(chunk.to_json())["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    calls.append((call["function"]["name"], ""))
                name, arguments = calls[call["index"]]
                calls[call["index"]] = (name, arguments + call["function"]["arguments"])
    return reasoning, content, calls


words = st.text('ab é"\\{}[]1<>/', min_size=1, max_size=12).map(str.strip).filter(bool)
strings = st.tuples(st.text("xyz", min_size=1, max_size=3), words).map(lambda p: parameter(*p))
values = st.tuples(
    st.text("xyz", min_size=1, max_size=3),
    st.recursive(st.none() | st.integers() | words, st.lists).map(json.dumps),
).map(lambda p: parameter(*p, "false"))
calls = st.lists(strings | values, max_size=3).map(lambda p: invoke("f", *p))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    reasoning=words | st.none(),
    # Where content ends in what could be the start of a tag, the library keeps a line feed.
    content=words.map(lambda text: text.rstrip("</")) | st.just(""),
    written=st.lists(calls, max_size=3),
)
def test_well_formed_outputs_are_read_as_the_library_reads_them(
    reasoning: str | None, content: str, written: list[str]
) -> None:
    text = "" if reasoning is None else f"{reasoning}</think>"
    text += content + (f"\n\n{block(*written)}" if written else "")
    start = CONTENT if reasoning is None else REASONING
    ours, said, made = read(text, start)
    assert (ours or "", said, made) == library_parse(text, reasoning is not None)
