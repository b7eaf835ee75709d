import json
from typing import Any

import pytest

from busload_runtime.server.errors import ApiError
from busload_runtime.server.protocol import ChatRequest, CompletionRequest, decode_request


def completion(**fields: Any) -> CompletionRequest:
    return decode_request(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2, 3], [[1, 2], [3]]])
def test_all_kinds_of_prompt_are_taken(prompt: Any) -> None:
    assert completion(prompt=prompt).prompt == prompt


def test_unknown_fields_and_nulls_are_ignored() -> None:
    request = completion(user="me", store=True, metadata={"a": 1}, max_tokens=None, stop=None, logprobs=None, n=None)
    assert request.max_tokens is None
    assert request.stop_strings() == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": -101}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {"the": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"99999999999999999999": 5}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"length_penalty": 1.2}, "length_penalty"),
        ({"length_penalty": True}, "length_penalty"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"n_predict": 5}, "n_predict"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_wrong_or_unsupported_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


def test_token_ids_of_a_bias_are_keys_and_numbers() -> None:
    request = completion(logit_bias={"7": -100, "50256": 1.5}, presence_penalty=1, repetition_penalty=1.1, min_p=0.1)
    assert request.logit_bias == {7: -100.0, 50256: 1.5}
    assert (request.presence_penalty, request.repetition_penalty, request.min_p) == (1.0, 1.1, 0.1)
    assert completion(logit_bias=None, min_p=None, repetition_penalty=None).logit_bias is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "best_of": 1},
        {"response_format": {"type": "text"}, "prompt_logprobs": None, "tool_choice": "none"},
        {"n": 3, "best_of": 3},
        {
            "length_penalty": 1.0,
            "skip_special_tokens": True,
            "bad_words": [],
            "chat_template_kwargs": {},
            "n_predict": -1,
        },
    ],
)
def test_neutral_values_of_unsupported_fields_pass(fields: dict[str, Any]) -> None:
    completion(**fields)


NOT_OBJECTS = [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"prompt": "\\ud800"', b"[" * 100_000, b'{"n": NaN}']


@pytest.mark.parametrize("body", NOT_OBJECTS)
def test_anything_that_is_not_a_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_request(body, CompletionRequest)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [], "response_format": {}}, "messages"),
        ({"messages": [{"role": "user"}], "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ],
)
def test_missing_fields_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode_request(json.dumps(body).encode(), ChatRequest)
    assert caught.value.param == param
    assert (caught.value.code == "missing_required_parameter") == (body.get("messages") != [])
    with pytest.raises(ApiError, match="prompt is required"):
        decode_request(b"{}", CompletionRequest)


@pytest.mark.parametrize("lost", ["function_call", "refusal", "audio"])
def test_parts_of_messages_that_would_be_lost_are_refused(lost: str) -> None:
    def chat(value: Any) -> ChatRequest:
        message = {"role": "assistant", "content": "x", lost: value}
        return decode_request(json.dumps({"messages": [message]}).encode(), ChatRequest)

    assert chat(None).messages[0].content == "x"
    with pytest.raises(ApiError) as caught:
        chat({"name": "f", "arguments": "{}"})
    assert caught.value.param == f"messages[0].{lost}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "it is empty"),
        ('{"prompt": "x"}'.encode("utf-16"), "send UTF-8"),
        ('{"prompt": "x"}'.encode("utf-16-be"), "send UTF-8"),
        ('{"prompt": "x"}'.encode("utf-32-le"), "send UTF-8"),
        (rb'{"prompt": "\ud800"}', "half of a surrogate pair"),
        (rb'{"prompt": "x\uDC00y"}', "half of a surrogate pair"),
        (b'{"prompt": NaN}', "invalid character (byte 11)"),
        (b'{"prompt": "x"} {}', "trailing characters"),
    ],
)
def test_a_body_that_is_no_json_hears_why(body: bytes, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode_request(body, CompletionRequest)
    assert caught.value.code == "invalid_json"
    assert words in caught.value.message


def test_a_byte_order_mark_is_skipped_and_the_last_of_two_keys_counts() -> None:
    request = decode_request(b'\xef\xbb\xbf{"prompt": "a", "prompt": "b", "n": 1, "n": 2}', CompletionRequest)
    assert (request.prompt, request.n) == ("b", 2)


NUMBERS = ["1e999", "-1e999", "1" * 400, "true", '"1"', "[1]", "{}", "1.5e0"]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("param", ["n", "seed", "max_tokens", "top_k", "stop_token_ids", "logprobs"])
def test_what_is_no_integer_is_refused(param: str, number: str) -> None:
    value = f"[{number}]" if param == "stop_token_ids" else number
    with pytest.raises(ApiError) as caught:
        decode_request(f'{{"prompt": "x", "{param}": {value}}}'.encode(), CompletionRequest)
    assert (caught.value.status, (caught.value.param or "").partition("[")[0]) == (400, param)


def test_integers_may_be_written_as_minus_zero_and_floats_as_integers() -> None:
    request = decode_request(b'{"prompt": "x", "seed": -0, "temperature": -0, "top_p": 1}', CompletionRequest)
    assert (request.seed, request.temperature, request.top_p) == (0, 0.0, 1.0)


def test_max_completion_tokens_is_the_newer_name() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "max_completion_tokens": 3}
    assert decode_request(json.dumps(body).encode(), ChatRequest).token_limit() == 3


def test_an_error_does_not_send_the_whole_value_back() -> None:
    with pytest.raises(ApiError) as caught:
        completion(best_of="x" * 100_000)
    assert len(caught.value.message) < 300
