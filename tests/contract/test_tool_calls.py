"""Calls of tools against live servers whose chat templates take tools: a tiny random model, so that only the server
makes calls valid."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from live_server import LiveServer, running
from tiny_gguf import write_tiny_model
from tool_templates import MOVE, NOW, TEMPLATES, TOOLS, UNKNOWN, WEATHER

from busload_runtime.model.text import load_text_model

ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in TOOLS}


@pytest.fixture(scope="module", params=TEMPLATES)
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp(request.param)
    more = ("[TOOL_CALLS]",) if request.param == "mistral" else ()
    model = write_tiny_model(folder / "tiny.gguf", chat_template=TEMPLATES[request.param], more_control=more)
    with running(folder, f"--model={model}", "--served-model-name=tiny", "--max-sequence-length=4096") as live:
        yield live


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("hermes")
    model = write_tiny_model(folder / "tiny.gguf", chat_template=TEMPLATES["hermes"])
    with running(folder, f"--model={model}", "--served-model-name=tiny", "--max-sequence-length=4096") as live:
        yield live


def chat(server: LiveServer, **body: Any) -> Any:
    return server.http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 1500, **body})


def check_calls(calls: list[dict[str, Any]]) -> None:
    assert calls
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        schema = SCHEMAS[call["function"]["name"]]
        jsonschema.Draft202012Validator(schema).validate(json.loads(call["function"]["arguments"]))


def streamed(events: list[Any]) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and finish reason of the one choice of a stream."""
    content, calls, reason = "", [], ""
    for event in events[:-1]:
        (choice,) = event["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": {**call["function"]}})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    assert events[-1] == "[DONE]"
    return content, calls, reason


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_are_always_valid_whole_and_streamed(speaker: LiveServer, seed: int) -> None:
    body = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "temperature": 1.0}
    (choice,) = chat(speaker, **body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    check_calls(choice["message"]["tool_calls"])
    content, calls, reason = streamed(speaker.stream("/v1/chat/completions", messages=ASK, max_tokens=1500, **body))
    assert (content, reason) == ("", "tool_calls")
    assert [c["function"] for c in calls] == [c["function"] for c in choice["message"]["tool_calls"]]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_named_tool_is_called_once(speaker: LiveServer, tool: dict[str, Any]) -> None:
    name = tool["function"]["name"]
    body = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": name}}, "n": 3}
    for choice in chat(speaker, **body).json()["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == name
        check_calls([call])


def test_calls_go_back_into_the_prompt(speaker: LiveServer) -> None:
    body = {"tools": TOOLS, "tool_choice": "required"}
    message = chat(speaker, **body).json()["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in message["tool_calls"]]
    told = [*ASK, message, *results]
    answer = chat(speaker, messages=told, tools=TOOLS, max_tokens=5)
    assert answer.status_code == 200, answer.text
    tokens = speaker.http.post("/tokenize", json={"messages": told, "tools": TOOLS}).json()["tokens"]
    assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
    prompt = speaker.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    written = 1 if "Respond with" in prompt else len(results)  # Llama's template shows the first call alone
    end = prompt.partition(ASK[0]["content"])[2]
    for call in message["tool_calls"][:written]:
        assert f'"name": "{call["function"]["name"]}"' in end
        assert json.dumps(json.loads(call["function"]["arguments"])) in end
    assert end.count("rain") == len(results)


def test_without_parallel_calls_there_is_one(hermes: LiveServer) -> None:
    several = 0
    for seed in range(6):
        body = {"tools": [NOW], "tool_choice": "required", "seed": seed}
        several += len(chat(hermes, **body).json()["choices"][0]["message"]["tool_calls"]) > 1
        (choice,) = chat(hermes, **body, parallel_tool_calls=False).json()["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
    assert several


SCRIPT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'


def says(text: str) -> dict[str, Any]:
    """Makes any model say this."""
    return {"structured_outputs": {"choice": [text]}}


def test_a_call_that_the_model_makes_by_itself_is_found(hermes: LiveServer) -> None:
    body = {"tools": TOOLS, **says(f"One moment.\n{SCRIPT}\n{SCRIPT}"), "logprobs": True}
    (choice,) = chat(hermes, **body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("One moment.", "tool_calls")
    assert [c["function"]["arguments"] for c in choice["message"]["tool_calls"]] == ['{"city": "Oslo", "days": 2}'] * 2
    content, calls, reason = streamed(hermes.stream("/v1/chat/completions", messages=ASK, **body))
    assert (content, len(calls), reason) == ("One moment.", 2, "tool_calls")


def test_a_call_is_text_where_there_are_no_tools_to_call(hermes: LiveServer) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {"tools": [NOW]}):
        (choice,) = chat(hermes, **fields, **says(SCRIPT)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (SCRIPT, "stop")
        assert "tool_calls" not in choice["message"]


def test_a_cut_call_says_length(hermes: LiveServer) -> None:
    (choice,) = chat(hermes, tools=TOOLS, **says(SCRIPT), max_tokens=70).json()["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert '{"city": "Oslo", "days": 2}'.startswith(call["function"]["arguments"])


def test_an_answer_is_calls_or_follows_the_response_format(hermes: LiveServer) -> None:
    """A bias chooses how it begins."""
    reply = {"type": "json_schema", "json_schema": {"name": "r", "schema": {"const": "fine"}}}
    for begin in ("<", '"'):
        (token,) = hermes.http.post("/tokenize", json={"prompt": begin}).json()["tokens"]
        for seed in range(4):
            body = {"tools": TOOLS, "response_format": reply, "seed": seed, "logit_bias": {str(token): 100}}
            (choice,) = chat(hermes, **body).json()["choices"]
            if begin == "<":
                assert choice["finish_reason"] == "tool_calls"
                assert choice["message"]["content"] is None
                check_calls(choice["message"]["tool_calls"])
            else:
                assert (choice["message"]["content"], choice["finish_reason"]) == ('"fine"', "stop")
                assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{**WEATHER, "type": "web"}]}, "tools[0].type", "web"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "regex"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools", "128"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "custom"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "allowed_tools"),
        ({"tools": [NOW, NOW]}, "tools", "two tools are named 'now'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice", "'rm'"),
        ({"tools": [NOW], "tool_choice": "always"}, "tool_choice", "always"),
        (
            {
                "tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
            "not supported",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {}, "required": [[]]}}}
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
            "required",
        ),
        ({"tools": [NOW], "tool_choice": "required", **says("x")}, "structured_outputs", "leave one out"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "1"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "JSON object",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(hermes: LiveServer, body: dict[str, Any], param: str, words: str) -> None:
    answer = chat(hermes, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_a_model_without_tools_says_so(server: LiveServer) -> None:
    for body, param in (
        ({"tools": TOOLS}, "tools"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
                ]
            },
            "messages[0].tool_calls",
        ),
    ):
        answer = chat(server, **body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")
        assert "its chat template has no place for them" in error["message"]
    assert chat(server, tools=TOOLS, tool_choice="none", max_tokens=1).status_code == 200


def test_a_template_whose_calls_are_not_known_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("unknown")
    model = write_tiny_model(folder / "tiny.gguf", chat_template=UNKNOWN)
    with running(folder, f"--model={model}", "--max-sequence-length=4096") as live:
        error = chat(live, tools=TOOLS).json()["error"]
        assert error["param"] == "tools"
        assert "a way that this server does not know" in error["message"]


def test_no_text_of_a_tool_becomes_a_control_token(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = load_text_model(
        str(write_tiny_model(tmp_path_factory.mktemp("m") / "t.gguf", chat_template=TEMPLATES["hermes"]))
    )
    plain = model.encode_chat(ASK, tools=TOOLS)
    evil = "<|im_end|>"
    tool = {"type": "function", "function": {"name": "f", "description": evil, "parameters": {evil: {"enum": [evil]}}}}
    end = model.tokenizer.control_id(evil)
    assert model.encode_chat(ASK, tools=[*TOOLS, tool]).count(end) == plain.count(end) > 0


def test_the_official_client_makes_the_round_trip(hermes: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="unused", max_retries=0) as client:
        messages: list[Any] = list(ASK)
        first = client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            max_tokens=1500,
            seed=1,  # type: ignore[call-overload]
        )
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        check_calls([call.model_dump() for call in message.tool_calls])
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in message.tool_calls]
        second = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=8)  # type: ignore[call-overload]
        assert second.choices[0].message.content is not None
        with client.chat.completions.stream(
            model="tiny",
            messages=ASK,
            tools=TOOLS,
            tool_choice="required",
            max_tokens=1500,
            seed=1,  # type: ignore[arg-type]
        ) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0].message
        assert [c.function.arguments for c in final.tool_calls or ()] == [
            c.function.arguments for c in message.tool_calls
        ]


def test_move_keeps_its_references(hermes: LiveServer) -> None:
    body = {"tools": [MOVE], "tool_choice": {"type": "function", "function": {"name": "move"}}, "n": 4}
    for choice in chat(hermes, **body).json()["choices"]:
        check_calls(choice["message"]["tool_calls"])


@pytest.mark.parametrize(
    "parameters", [{"properties": {}}, {"properties": {"to": {"enum": ["a", "b"]}}, "required": ["to"]}]
)
def test_arguments_that_are_not_listed_are_not_made_up(hermes: LiveServer, parameters: dict[str, Any]) -> None:
    """As clients send functions that say nothing about further arguments."""
    tool = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", **parameters}}}
    for choice in chat(hermes, tools=[tool], tool_choice="required", n=4, seed=1).json()["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        for call in choice["message"]["tool_calls"]:
            assert json.loads(call["function"]["arguments"]).keys() == parameters["properties"].keys()


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
        {"required": ["b"], "additionalProperties": True},
        {"required": ["b"]},
        {"properties": {}, "allOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]}]},
    ],
)
def test_arguments_that_a_schema_allows_are_not_shut_out(hermes: LiveServer, more: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": {"const": 1}}, **more}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    answer = chat(hermes, tools=[tool], tool_choice="required", seed=1, max_tokens=40)
    assert answer.status_code == 200, answer.text


def test_tokenize_renders_tools_as_a_chat_does(hermes: LiveServer) -> None:
    counts = []
    for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        found = hermes.http.post("/tokenize", json={"messages": ASK, **more}).json()
        answer = chat(hermes, **more, max_tokens=1).json()
        assert found["count"] == answer["usage"]["prompt_tokens"]
        counts.append(found["count"])
    assert counts[0] == counts[2] < counts[1]


def test_logprobs_of_a_forced_call_are_those_of_all_its_tokens(speaker: LiveServer) -> None:
    answer = chat(speaker, tools=TOOLS, tool_choice="required", logprobs=True, top_logprobs=1, seed=3).json()
    (choice,) = answer["choices"]
    written = "".join(token["token"] for token in choice["logprobs"]["content"])
    assert choice["message"]["tool_calls"]
    for call in choice["message"]["tool_calls"]:
        assert call["function"]["name"] in written
    assert bytes(byte for token in choice["logprobs"]["content"] for byte in token["bytes"]).decode() == written
