"""The official client in all its ways: asynchronous, streaming, with helpers that take streams apart."""

import asyncio
from typing import Any, Literal

import openai
import pydantic
import pytest
from live_server import BUNDLED, LiveServer

ASK: list[Any] = [{"role": "user", "content": "Name three colours."}]


class Colour(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: Literal["red", "green"]
    bright: bool


def asynchronously(server: LiveServer, work: Any) -> Any:
    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            return await work(client)

    return asyncio.run(run())


def test_the_asynchronous_client_says_what_the_other_one_says(server: LiveServer, client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": BUNDLED, "messages": ASK, "temperature": 0, "max_tokens": 12}

    async def work(client: openai.AsyncOpenAI) -> tuple[str, str, str, list[str]]:
        whole = client.chat.completions.create(**request)
        stream = await client.chat.completions.create(**request, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        prompts = client.completions.create(model=BUNDLED, prompt=["One", "Two"], max_tokens=3, temperature=0)
        models = [model.id async for model in client.models.list()]
        return (await whole).choices[0].message.content or "", text, (await prompts).choices[1].text, models

    whole, streamed, second, models = asynchronously(server, work)
    assert whole == streamed == client.chat.completions.create(**request).choices[0].message.content
    assert second == client.completions.create(model=BUNDLED, prompt="Two", max_tokens=3, temperature=0).choices[0].text
    assert models == [BUNDLED]


def test_a_cancelled_task_and_a_closed_stream_free_their_seats(server: LiveServer) -> None:
    request: dict[str, Any] = {
        "model": BUNDLED,
        "messages": ASK,
        "max_tokens": 4000,
        "extra_body": {"ignore_eos": True},
    }

    async def work(client: openai.AsyncOpenAI) -> None:
        task = asyncio.create_task(client.chat.completions.create(**request))
        stream = await client.chat.completions.create(**request, stream=True)
        await anext(aiter(stream))
        await stream.close()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(600):
            if server.level("vllm:num_requests_running") + server.level("vllm:num_requests_waiting") == 0:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the requests still run")

    asynchronously(server, work)


def test_helpers_take_streams_apart(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=BUNDLED, messages=ASK, max_tokens=60, temperature=0, response_format=Colour
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Colour)
    assert final.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        model=BUNDLED,
        messages=ASK,
        logprobs=True,
        stream_options={"include_usage": True},
        extra_body={"structured_outputs": {"choice": ["Red, green and blue."]}},
    ) as stream:
        kinds = {event.type for event in stream}
        told = stream.get_final_completion()
    (choice,) = told.choices
    assert "logprobs.content.delta" in kinds
    assert (choice.message.content, choice.finish_reason) == ("Red, green and blue.", "stop")
    assert choice.logprobs is not None
    assert "".join(token.token for token in choice.logprobs.content or ()) == choice.message.content
    assert told.usage is not None
    assert told.usage.completion_tokens >= len(choice.logprobs.content or ())


def test_a_cut_answer_is_no_parsed_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=BUNDLED, messages=ASK, max_tokens=2, response_format=Colour)


def test_an_answer_goes_back_as_it_came(client: openai.OpenAI) -> None:
    """With all the fields that the client's own type has, null where the answer had none."""
    message = client.chat.completions.create(model=BUNDLED, messages=ASK, max_tokens=4).choices[0].message
    for turn in (message, message.model_dump(), message.model_dump(exclude_unset=True)):
        messages: list[Any] = [*ASK, turn, {"role": "user", "content": "More."}]
        answer = client.chat.completions.create(model=BUNDLED, messages=messages, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 10


def test_raw_answers_have_the_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=BUNDLED, messages=ASK, max_tokens=1)
    assert raw.http_response.headers["x-request-id"] in raw.parse().id
    assert raw.parse()._request_id == raw.http_response.headers["x-request-id"]
