"""`response_format` and `structured_outputs` against a live server: what comes is valid, whatever the model."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jiter
import jsonschema
import openai
import pydantic
import pytest
from live_server import BUNDLED, LiveServer, events, eventually
from schemas import FOLLOWED, HARMLESS, HOSTILE, REFUSED, TOO_MUCH_FOR_A_STEP

ASK = [{"role": "user", "content": "Describe a person in JSON."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SEEDS = (1, 2, 3)


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def chat(server: LiveServer, **body: Any) -> Any:
    return server.http.post("/v1/chat/completions", json={"messages": ASK, **body})


def texts(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


def refusal(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_every_schema_is_followed_greedily_and_at_temperature_1(server: LiveServer) -> None:
    def check(name: str, fields: dict[str, Any]) -> int:
        schema = FOLLOWED[name]
        answer = chat(server, response_format=json_schema(schema), max_tokens=400, **fields)
        for text in texts(answer):
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["stop"], name
        return 1

    ways: list[dict[str, Any]] = [{"temperature": 0}, *({"temperature": 1, "seed": seed} for seed in SEEDS)]
    assert len(FOLLOWED) >= 30
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(check, *zip(*((name, way) for name in FOLLOWED for way in ways), strict=True)))
    assert sum(done) == len(FOLLOWED) * len(ways)


def test_each_of_several_choices_follows_the_schema_and_ends_by_itself(server: LiveServer) -> None:
    answer = chat(server, response_format=json_schema(PERSON), n=4, max_tokens=200, temperature=1.5, seed=1)
    for text in texts(answer):
        jsonschema.validate(json.loads(text), PERSON)
    assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"stop"}
    assert len(set(texts(answer))) > 1


def test_a_stream_says_what_the_whole_answer_says(server: LiveServer) -> None:
    body = {"messages": ASK, "response_format": json_schema(PERSON), "seed": 5, "max_tokens": 200, "logprobs": True}
    (whole,) = texts(chat(server, **body))
    stream = [event for event in server.stream("/v1/chat/completions", **body) if isinstance(event, dict)]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in stream) == whole
    assert stream[-1]["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(whole), PERSON)


def test_any_object_is_an_object(server: LiveServer) -> None:
    """As far as it goes: a small model may fill all its tokens."""
    for asked in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        answer = chat(server, **asked, n=4, temperature=1, seed=1, max_tokens=80)
        for text, choice in zip(texts(answer), answer.json()["choices"], strict=True):
            cut = choice["finish_reason"] == "length"
            assert isinstance(jiter.from_json(text.encode(), partial_mode="trailing-strings" if cut else "off"), dict)


def test_an_answer_that_is_cut_says_length(server: LiveServer) -> None:
    answer = chat(server, response_format=json_schema(PERSON), max_tokens=4)
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice["message"]["content"])


def test_text_is_no_constraint_and_free_requests_answer_as_ever(server: LiveServer) -> None:
    body = {"temperature": 0, "max_tokens": 12}
    free = texts(chat(server, **body))
    assert texts(chat(server, **body, response_format={"type": "text"})) == free
    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(chat, server, response_format=json_schema(PERSON), max_tokens=100) for _ in range(3)]
        assert texts(chat(server, **body)) == free
        for answer in beside:
            jsonschema.validate(json.loads(texts(answer.result())[0]), PERSON)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"choice": ["yes", "no", "perhaps, or not"]}, "yes|no|perhaps, or not"),
        ({"regex": "[0-9]{2}/[0-9]{2}"}, "[0-9]{2}/[0-9]{2}"),
        ({"json": {"enum": [1, 2]}}, "1|2"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_structured_outputs(server: LiveServer, path: str, asked: dict[str, Any], pattern: str) -> None:
    prompt = {"prompt": "Answer:"} if path == "/v1/completions" else {"messages": ASK}
    answer = server.http.post(path, json={**prompt, "structured_outputs": asked, "max_tokens": 30, "n": 2})
    for choice in answer.json()["choices"]:
        assert re.fullmatch(pattern, choice.get("text") or choice["message"]["content"])
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_followed_is_refused_with_its_reason(server: LiveServer, name: str) -> None:
    schema, words = REFUSED[name]
    error = refusal(chat(server, response_format=json_schema(schema)))
    assert (error["param"], error["code"]) == ("response_format", "invalid_grammar")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_a_malformed_wish_is_refused_by_name(server: LiveServer, body: dict[str, Any], param: str) -> None:
    assert refusal(chat(server, **body))["param"] == param


@pytest.mark.parametrize("pattern", [schema["pattern"] for schema in TOO_MUCH_FOR_A_STEP.values()])
def test_what_takes_too_long_between_steps_is_refused_by_the_name_it_came_with(
    server: LiveServer, pattern: str
) -> None:
    error = refusal(chat(server, structured_outputs={"regex": pattern}, max_tokens=20))
    assert (error["param"], error["code"]) == ("structured_outputs", "invalid_grammar")


def test_hostile_schemas_are_refused_and_stall_no_stream(server: LiveServer) -> None:
    """Compiled between two steps, the slowest of them would hold up the stream for ever."""
    stop, gaps = threading.Event(), list[float]()

    def watch() -> None:
        body = {"messages": ASK, "max_tokens": 3500, "stream": True, "ignore_eos": True}
        while not stop.is_set():
            with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
                last = time.monotonic()
                for _ in events(response):
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()
                    if stop.is_set():
                        break

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        eventually(lambda: len(gaps) > 50)
        usual = sorted(gaps)[len(gaps) // 2]
        for name, schema in (HOSTILE | TOO_MUCH_FOR_A_STEP).items():
            told, began = len(gaps), time.monotonic()
            error = refusal(chat(server, response_format=json_schema(schema), max_tokens=20))
            assert (error["param"], error["code"]) == ("response_format", "invalid_grammar")
            assert len(gaps) > told or time.monotonic() - began < 20 * usual, f"{name} stalls the stream"
        for schema in HARMLESS.values():
            assert chat(server, response_format=json_schema(schema), max_tokens=20).status_code == 200
    finally:
        stop.set()
        watching.join()
    print(f"gap of the stream: usually {usual:.3f} s, beside hostile schemas at most {max(gaps):.3f} s")
    assert texts(chat(server, structured_outputs={"choice": ["fine"]})) == ["fine"]


def test_dropped_clients_leave_no_constrained_request_behind(server: LiveServer) -> None:
    body = {"messages": ASK, "stream": True, "max_tokens": 2000, "response_format": json_schema({"type": "string"})}
    for _ in range(5):
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            next(events(response))
    eventually(lambda: server.level("vllm:num_requests_running") == 0)
    jsonschema.validate(json.loads(texts(chat(server, response_format=json_schema(PERSON), max_tokens=200))[0]), PERSON)


class Step(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    explanation: str = pydantic.Field(max_length=30)
    output: int = pydantic.Field(ge=0, le=100)


class Solution(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    steps: list[Step] = pydantic.Field(max_length=2)
    mood: Literal["good", "bad"]
    answer: int | None


def test_the_official_client_parses_into_its_model(client: openai.OpenAI) -> None:
    for seed in SEEDS:
        answer = client.chat.completions.parse(
            model=BUNDLED,
            messages=[{"role": "user", "content": "Solve 3 + 4."}],
            response_format=Solution,
            max_tokens=300,
            seed=seed,
        )
        assert isinstance(answer.choices[0].message.parsed, Solution)
