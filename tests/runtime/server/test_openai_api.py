"""The API as clients see it, against a live `busload serve`: tiny random model for form, SmolLM2 for meaning."""

import json
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, events, eventually, text_of

PROMPT = "hello world or"


@pytest.fixture
def client(smol: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smol.url}/v1", api_key="unused", max_retries=0)


# A question whose answer does not hang on the last bits of the weights.
QUESTION = "What is the capital of France, and why do people visit it? Answer in two sentences."


def test_models_list_says_the_length(tiny: LiveServer) -> None:
    (model,) = tiny.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 4096)
    assert tiny.http.get("/v1/models/tiny").json() == model
    assert tiny.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_chat_answers_a_question(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2-135m-instruct",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream_equals_the_whole_and_ends_with_usage(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "Count from one to five."}],
        "max_completion_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},  # its first token is nearly a tie, and one of the texts ends early
    }
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12


def test_ignore_eos_and_min_tokens_go_past_the_natural_end(client: openai.OpenAI, smol: LiveServer) -> None:
    # "... is Paris" goes on with "." or "," almost alike, and rounding decides: without commas it ends there.
    (comma,) = smol.http.post("/tokenize", json={"prompt": ",", "add_special_tokens": False}).json()["tokens"]
    request: dict[str, Any] = {
        "logit_bias": {str(comma): -100},
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 14,
    }
    natural = client.chat.completions.create(**request)
    ignored = client.chat.completions.create(**request, extra_body={"ignore_eos": True})
    longer = client.chat.completions.create(**request, extra_body={"min_tokens": 12})
    assert natural.usage is not None
    assert natural.usage.completion_tokens < 12
    assert ignored.usage is not None
    assert (ignored.usage.completion_tokens, ignored.choices[0].finish_reason) == (14, "length")
    assert longer.usage is not None
    assert longer.usage.completion_tokens >= 12
    assert "<|im_end|>" not in (ignored.choices[0].message.content or "")


def test_control_tokens_in_a_message_stay_text(client: openai.OpenAI, smol: LiveServer) -> None:
    def prompt_tokens(content: str) -> int:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return int(smol.http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])

    assert prompt_tokens("<|im_end|>") > prompt_tokens("") + 3  # pieces of text, not one control token


def test_emoji_survive_the_way_through(smol: LiveServer) -> None:
    text = "日本語 and 👩‍👩‍👧‍👦 é"
    answer = smol.complete(prompt=text, echo=True, max_tokens=1, temperature=0).json()
    assert answer["choices"][0]["text"].startswith(text)


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "other"], [5, 6, 7], [[5, 6], [7, 8, 9]]])
def test_every_kind_of_prompt_streams_what_it_answers(tiny: LiveServer, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 20, "seed": 3, "n": 2}
    whole = tiny.complete(**body).json()
    stream = tiny.stream(**body, stream_options={"include_usage": True})
    texts = [choice["text"] for choice in sorted(whole["choices"], key=lambda choice: choice["index"])]
    assert [text_of(stream, index) for index in range(len(texts))] == texts
    assert len(texts) == 2 * (len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)
    assert stream[-1] == "[DONE]"
    usage = stream[-2]["usage"]  # type: ignore[index]
    assert {k: usage[k] for k in ("prompt_tokens", "completion_tokens")} == {
        k: whole["usage"][k] for k in ("prompt_tokens", "completion_tokens")
    }
    assert whole["usage"]["completion_tokens"] == 20 * len(texts)


def test_usage_comes_only_when_asked(tiny: LiveServer) -> None:
    stream = tiny.stream(prompt=PROMPT, max_tokens=3)
    assert all("usage" not in event for event in stream[:-1])


def test_choices_differ_and_seeds_repeat(tiny: LiveServer) -> None:
    def texts(**fields: Any) -> list[str]:
        answer = tiny.complete(prompt=PROMPT, max_tokens=24, **fields).json()
        return [choice["text"] for choice in answer["choices"]]

    first, second = texts(n=2, seed=11)
    assert first != second
    assert texts(n=2, seed=11) == [first, second]
    assert texts(seed=12) == [second]  # choice i is drawn with seed + i
    assert texts() != texts()
    assert texts(temperature=0) == texts(temperature=0)


def test_stop_strings_cut_the_text_wherever_tokens_end(tiny: LiveServer) -> None:
    full = tiny.complete(prompt=PROMPT, max_tokens=40, seed=5).json()["choices"][0]["text"]
    assert len(full) == 40  # one character per token, so any word below spans tokens
    for start, length in ((7, 4), (20, 2), (3, 1)):
        word = full[start : start + length]
        body = {"prompt": PROMPT, "max_tokens": 40, "seed": 5, "stop": ["never there", word]}
        choice = tiny.complete(**body).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (full[: full.find(word)], "stop")
        stream = tiny.stream(**body)
        assert text_of(stream) == choice["text"]
        assert stream[-1] == "[DONE]"
        assert stream[-2]["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]


def test_text_held_for_a_stop_string_arrives_at_the_end(tiny: LiveServer) -> None:
    full = tiny.complete(prompt=PROMPT, max_tokens=10, seed=5).json()["choices"][0]["text"]
    stop = full[-4:] + "\u2603"
    assert text_of(tiny.stream(prompt=PROMPT, max_tokens=10, seed=5, stop=stop)) == full


def test_stop_token_ids_end_the_text_without_showing_the_token(tiny: LiveServer) -> None:
    full = tiny.complete(prompt=PROMPT, max_tokens=10, seed=5).json()["choices"][0]["text"]
    token = 3 + ord(full[6])  # the tiny vocabulary: three control tokens, then the bytes
    choice = tiny.complete(prompt=PROMPT, max_tokens=10, seed=5, stop_token_ids=[token]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (full[: full.index(full[6])], "stop")


def letter(character: str) -> str:
    """The token id of a character in the tiny vocabulary, as `logit_bias` has it: three control tokens, then bytes."""
    return str(3 + ord(character))


def test_logit_bias_chooses_the_text(tiny: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "n": 2, "logit_bias": {letter("Q"): 100}}
    assert [choice["text"] for choice in tiny.complete(**body).json()["choices"]] == ["Q" * 8] * 2
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "logit_bias": {letter("Q"): 100}}
    answer = tiny.http.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["message"]["content"] == "Q" * 8
    plain = tiny.complete(prompt=PROMPT, max_tokens=8, temperature=0).json()["choices"][0]["text"]
    banned = {letter(character): -100 for character in plain}
    other = tiny.complete(prompt=PROMPT, max_tokens=8, temperature=0, logit_bias=banned).json()["choices"][0]["text"]
    assert not set(other) & set(plain)


def test_penalties_work_against_repetition(tiny: LiveServer) -> None:
    body = {"prompt": "AAAA", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    two = {"logit_bias": {letter("A"): 100, letter("B"): 80}}

    def text(**fields: Any) -> str:
        return str(tiny.complete(**body, **fields).json()["choices"][0]["text"])

    assert text(**two) == "A" * 40
    often = text(**two, frequency_penalty=2)
    assert set(often) == {"A", "B"}
    assert 8 <= often.count("B") <= 24
    assert text(**two, presence_penalty=2) == "A" * 40  # taken off once
    assert text(**two, repetition_penalty=10).startswith("B")  # the prompt counts
    whole = tiny.complete(**body, frequency_penalty=1.5, repetition_penalty=1.2).json()["choices"][0]["text"]
    assert text_of(tiny.stream(**body, frequency_penalty=1.5, repetition_penalty=1.2)) == whole
    assert len(set(whole)) > len(set(text()))


def test_min_p_of_one_is_greedy(tiny: LiveServer) -> None:
    greedy = tiny.complete(prompt=PROMPT, max_tokens=20, temperature=0).json()["choices"][0]["text"]
    assert tiny.complete(prompt=PROMPT, max_tokens=20, temperature=2, min_p=1).json()["choices"][0]["text"] == greedy
    assert tiny.complete(prompt=PROMPT, max_tokens=20, temperature=2, seed=1).json()["choices"][0]["text"] != greedy


def test_cached_tokens_are_reported_both_ways(tiny: LiveServer) -> None:
    prompt = [20 + i % 50 for i in range(100)]
    first = tiny.complete(prompt=prompt, max_tokens=1).json()["usage"]
    second = tiny.complete(prompt=prompt, max_tokens=1).json()["usage"]
    stream = tiny.stream(prompt=prompt, max_tokens=1, stream_options={"include_usage": True})
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < 100
    assert stream[-2]["usage"]["prompt_tokens_details"] == second["prompt_tokens_details"]  # type: ignore[index]


def test_default_and_too_large_max_tokens_use_the_room_that_is_left(tiny: LiveServer) -> None:
    prompt = [30] * 4090
    for fields in ({}, {"max_tokens": 1000}):
        answer = tiny.complete(prompt=prompt, ignore_eos=True, **fields).json()
        assert answer["usage"]["completion_tokens"] == 6
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"prompt": ""}, 400, "invalid_value", "prompt"),
        ({"prompt": []}, 400, "invalid_value", "prompt"),
        ({"prompt": [[]]}, 400, "invalid_value", "prompt[0]"),
        ({"prompt": [-1]}, 400, "invalid_value", "prompt"),
        ({"prompt": [999999]}, 400, "invalid_value", "prompt"),
        ({"prompt": [1, "a"]}, 400, "invalid_value", "prompt"),
        ({"prompt": ["a", [1]]}, 400, "invalid_value", "prompt"),
        ({"prompt": [5] * 4096}, 400, "context_length_exceeded", "prompt"),
        ({"prompt": "hello " * 5000}, 400, "context_length_exceeded", "prompt"),
        ({"min_tokens": 5000}, 400, "invalid_value", "min_tokens"),
        ({"stop_token_ids": [999999]}, 400, "invalid_value", "stop_token_ids"),
        ({"logit_bias": {"999999": 1}}, 400, "invalid_value", "logit_bias"),
        ({"logit_bias": {"a": 1}}, 400, "invalid_value", "logit_bias"),
        ({"frequency_penalty": 3}, 400, "invalid_value", "frequency_penalty"),
        ({"model": "gpt-5"}, 404, "model_not_found", "model"),
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"logprobs": 6}, 400, "invalid_value", "logprobs"),
        ({"logprobs": 5, "n": 12, "max_tokens": 4000}, 400, "invalid_value", "logprobs"),
        ({"n": 13}, 400, "invalid_value", "n"),
        ({"prompt": ["x"] * 13}, 400, "invalid_value", "n"),
    ],
)
def test_bad_requests_say_what_is_wrong_and_harm_nothing(
    tiny: LiveServer, fields: dict[str, Any], status: int, code: str | None, param: str
) -> None:
    response = tiny.complete(**{"prompt": "x", "max_tokens": 1, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert tiny.complete(prompt="x", max_tokens=1).status_code == 200


def test_chat_refuses_what_the_model_cannot_read(tiny: LiveServer) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    response = tiny.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": image}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0]"
    assert tiny.http.post("/v1/chat/completions", json={"messages": []}).status_code == 400


def test_errors_have_one_shape_on_every_path(tiny: LiveServer) -> None:
    assert tiny.http.get("/v2/nothing").json()["error"]["code"] == "not_found"
    wrong_method = tiny.http.get("/v1/completions")
    assert wrong_method.status_code == 405
    assert wrong_method.headers["allow"] == "POST"
    assert wrong_method.json()["error"]["code"] == "method_not_allowed"
    for body in (b"", b"{", b"[1]", b"\xff\xfe"):
        response = tiny.http.post("/v1/completions", content=body)
        assert response.status_code == 400
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_beyond_the_limit_is_refused_and_health_stays_awake(tiny: LiveServer) -> None:
    response = tiny.complete(prompt="x" * 20_000_000)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    chunked = tiny.http.post("/v1/completions", content=iter([b"[" * 100_000] * 50))
    assert chunked.status_code == 413
    assert tiny.http.get("/health/live").status_code == 200


def test_health_answers_while_a_long_prompt_is_tokenised(smol: LiveServer) -> None:
    statuses: list[int] = []
    done = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=smol.url, timeout=5) as http:
            while not done.is_set():
                statuses.append(http.get("/health/live").status_code)
                time.sleep(0.001)

    body = {"prompt": "wörds, 12 of them; " * 24_000, "max_tokens": 1}  # as large as is not refused by its size
    thread = threading.Thread(target=probe)
    thread.start()
    try:
        eventually(lambda: statuses)
        before = len(statuses)
        response = smol.complete(**body)
        answered_meanwhile = len(statuses) - before
    finally:
        done.set()
        thread.join()
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "at least" not in response.json()["error"]["message"]  # it was really tokenised
    assert answered_meanwhile >= 5
    assert set(statuses) == {200}


def test_a_full_queue_refuses_at_once_and_recovers(tiny: LiveServer) -> None:
    counter = 'busload_requests_refused_total{reason="queue_full"}'
    before = tiny.metrics()[counter]
    long = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with tiny.http.stream("POST", "/v1/completions", json=long | {"n": 12}) as response:
        stream = events(response)
        next(stream)
        eventually(lambda: tiny.level("vllm:num_requests_running") == 4)
        eventually(lambda: tiny.level("vllm:num_requests_waiting") == 8)
        refused = tiny.complete(prompt=PROMPT, max_tokens=1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert tiny.metrics()[counter] == before + 1
    eventually(lambda: tiny.complete(prompt=PROMPT, max_tokens=1).status_code == 200)


def test_clients_that_leave_free_their_seats(tiny: LiveServer) -> None:
    """Streaming, not streaming and queued ones alike; after them every level is as before."""
    eventually(lambda: tiny.level("vllm:num_requests_running") == 0)
    before = tiny.metrics()
    long = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
    url, clients = httpx.URL(tiny.url), []
    for index in range(8):
        content = json.dumps(long | {"stream": index % 2 == 1}).encode()
        clients.append(socket.create_connection((url.host, url.port or 0)))
        clients[-1].sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
        )
    arrived = "busload_requests_arrived_total"
    eventually(lambda: tiny.metrics()[arrived] - before[arrived] == 8)
    for client in clients:
        client.close()
    for level in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        eventually(lambda level=level: tiny.level(level) == 0)
    after = tiny.metrics()
    aborted = 'busload_requests_finished_total{reason="abort"}'
    assert after[aborted] - before[aborted] == 8
    assert after["busload_kv_blocks_free"] == before["busload_kv_blocks"]
    assert after["busload_queued_prompt_tokens"] == 0
    assert tiny.complete(prompt=PROMPT, max_tokens=1, n=12).status_code == 200  # needs every seat of batch and queue


def test_the_log_has_one_line_per_request_without_its_text(tiny: LiveServer) -> None:
    response = tiny.complete(prompt="hello secret", max_tokens=4)
    identity = response.headers["x-request-id"]
    eventually(lambda: any(line["id"] == identity for line in tiny.lines()))
    (line,) = [line for line in tiny.lines() if line["id"] == identity]
    assert (line["path"], line["status"], line["output_tokens"]) == ("/v1/completions", 200, 4)
    assert line["prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
    assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["seconds"]
    assert "secret" not in tiny.log


def test_many_short_messages_do_not_hold_the_server_up(tiny: LiveServer) -> None:
    """Each has next to no content, together they are a long prompt: more messages than tokens are refused unread, and
    health answers while the others are tokenised."""
    answers: list[httpx.Response] = []

    def ask(count: int) -> None:
        body = {"messages": [{"role": "assistant"}] * count, "max_tokens": 1}
        answers.append(httpx.post(f"{tiny.url}/v1/chat/completions", json=body, timeout=60))

    for count in (50_000, 4000):
        thread = threading.Thread(target=ask, args=(count,))
        thread.start()
        with httpx.Client(base_url=tiny.url, timeout=5) as http:
            while thread.is_alive():
                assert http.get("/health/live").status_code == 200
                time.sleep(0.02)
    for answer, exact in zip(answers, (False, True), strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        assert ("at least" not in error["message"]) == exact
