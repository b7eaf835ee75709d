"""Each parameter of the API as the official client sends it: what it does, or why it is refused."""

from collections import Counter
from typing import Any

import openai
import pytest
from live_server import BUNDLED, LiveServer

PROMPT = "Once upon a time there was a"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "Name three colours."}]


def complete(client: openai.OpenAI, **more: Any) -> Any:
    return client.completions.create(**{"model": BUNDLED, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more})


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": BUNDLED, "messages": ASK, "temperature": 0, **more})


def test_models_say_their_limit(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == BUNDLED
    assert model.model_extra == {"max_model_len": 4096}
    assert client.models.retrieve(BUNDLED) == model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_max_completion_tokens_is_the_newer_name_and_goes_first(client: openai.OpenAI) -> None:
    answer = chat(client, max_completion_tokens=3, max_tokens=7)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")
    assert chat(client, max_tokens=5).usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_are_told_apart_and_each_ends_once(client: openai.OpenAI, stream: bool) -> None:
    request: dict[str, Any] = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 12}
    whole = chat(client, **request)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    if not stream:
        assert whole.usage.completion_tokens <= 36
        return
    texts, ends, roles = Counter[int](), Counter[int](), Counter[int]()
    joined = {0: "", 1: "", 2: ""}
    for chunk in chat(client, **request, stream=True):
        (choice,) = chunk.choices
        assert not ends[choice.index]
        joined[choice.index] += choice.delta.content or ""
        texts[choice.index] += 1
        roles[choice.index] += choice.delta.role == "assistant"
        ends[choice.index] += choice.finish_reason is not None
    assert set(roles.values()) == set(ends.values()) == {1}
    assert joined == {choice.index: choice.message.content for choice in whole.choices}


def test_n_counts_the_prompt_once(client: openai.OpenAI) -> None:
    one, three = complete(client, n=1), complete(client, n=3, temperature=1)
    assert one.usage.prompt_tokens == three.usage.prompt_tokens
    assert three.usage.completion_tokens <= 24


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front_of_each_choice(client: openai.OpenAI, stream: bool) -> None:
    plain = complete(client).choices[0].text
    request: dict[str, Any] = {"echo": True, "n": 2}
    if stream:
        texts = {0: "", 1: ""}
        for chunk in complete(client, **request, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        texts = {choice.index: choice.text for choice in complete(client, **request).choices}
    assert texts == {0: PROMPT + plain, 1: PROMPT + plain}


def test_a_seed_repeats_and_its_choices_are_the_next_seeds(client: openai.OpenAI) -> None:
    def texts(seed: int | None, n: int = 1) -> list[str]:
        return [choice.text for choice in complete(client, seed=seed, n=n, temperature=1).choices]

    assert texts(5) == texts(5)
    assert texts(5, n=2) == [*texts(5), *texts(6)]
    assert texts(None, n=4) != texts(None, n=4)
    assert texts(-1) == texts(-1)


def test_stop_texts_that_span_tokens(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=40).choices[0].text
    for begin in (3, 11, 24):
        for length in (1, 4, 12):
            stop = text[begin : begin + length]
            (choice,) = complete(client, max_tokens=40, stop=stop).choices
            assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    several = complete(client, max_tokens=40, stop=["not in it", text[5:9], text[20:24]]).choices[0]
    assert several.text == text[: text.index(text[5:9])]
    assert complete(client, max_tokens=40, stop=[]).choices[0].text == text


def test_a_bias_forces_and_forbids_tokens(client: openai.OpenAI, server: LiveServer) -> None:
    (token,) = server.http.post("/tokenize", json={"prompt": " blue"}).json()["tokens"]
    assert complete(client, logit_bias={str(token): 100}, max_tokens=3).choices[0].text == " blue blue blue"
    first = server.http.post("/tokenize", json={"prompt": complete(client, max_tokens=1).choices[0].text}).json()
    without = complete(client, max_tokens=1, logit_bias={str(first["tokens"][0]): -100})
    assert without.choices[0].text != complete(client, max_tokens=1).choices[0].text


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_a_penalty_is_taken_off_the_logit_of_what_was_drawn(
    client: openai.OpenAI, server: LiveServer, name: str
) -> None:
    """A bias puts `second` behind `first` at both places, at the second one by 1: a penalty of 0.5 leaves it there, one
    of 1.5 lets it pass. Differences of logits are differences of log-probabilities, which are those without bias."""
    prompt = server.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    first, second = (server.http.post("/tokenize", json={"prompt": w}).json()["tokens"][0] for w in (" little", " man"))

    def logprob(tokens: list[int], token: int) -> float:
        forced = complete(client, prompt=tokens, max_tokens=1, logprobs=0, logit_bias={str(token): 100})
        value: float = forced.choices[0].logprobs.token_logprobs[0]
        return value

    leads = [logprob(tokens, first) - logprob(tokens, second) for tokens in (prompt, [*prompt, first])]
    behind = leads[1] - 1
    assert leads[0] > behind + 1, "choose other words: the first must win at the first place"

    def text(penalty: float) -> str:
        bias = {str(first): 50, str(second): 50 + behind}
        drawn: str = complete(client, prompt=prompt, max_tokens=2, logit_bias=bias, **{name: penalty}).choices[0].text
        return drawn

    assert text(0) == text(0.5) == text(-2) == " little little"
    assert text(1.5) == text(2) == " little man"


def test_a_frequency_penalty_counts_and_a_presence_penalty_does_not(client: openai.OpenAI, server: LiveServer) -> None:
    """`second` is behind `first` by a margin at the second place and by another at the third, where `first` was drawn
    twice: a penalty below both margins, and above half of the later one, passes it only if it counts. Behind a prompt
    that repeats itself the margins hardly change."""
    first, second = (server.http.post("/tokenize", json={"prompt": w}).json()["tokens"][0] for w in (" little", " man"))
    prompt = server.http.post("/tokenize", json={"prompt": PROMPT + " little" * 12}).json()["tokens"]

    def lead(tokens: list[int]) -> float:
        def logprob(token: int) -> float:
            forced = complete(client, prompt=tokens, max_tokens=1, logprobs=0, logit_bias={str(token): 100})
            value: float = forced.choices[0].logprobs.token_logprobs[0]
            return value

        return logprob(first) - logprob(second)

    leads = [lead([*prompt, *[first] * drawn]) for drawn in range(3)]
    growth = leads[2] - leads[1]
    margin = 2.0
    penalty = 0.9 * min(margin, margin + growth)
    print(f"leads {leads}, penalty {penalty}")
    assert 2 * penalty > 1.1 * (margin + growth) > 0, "choose other words: the lead grows too fast"
    assert leads[0] > leads[1] - margin + 0.1, "choose other words: the first must win at the first place"
    bias = {str(first): 50, str(second): 50 + leads[1] - margin}

    def text(**penalties: float) -> str:
        drawn: str = complete(client, prompt=prompt, max_tokens=3, logit_bias=bias, **penalties).choices[0].text
        return drawn

    assert text() == text(presence_penalty=penalty) == " little little little"
    assert text(frequency_penalty=penalty) == " little little man"


NARROW: dict[str, Any] = {
    "top_k": 1,
    "top_p": 1e-9,
    "min_p": 1,
    "temperature": 1e-12,
    "a temperature whose inverse is no float": {"temperature": 1e-40},
    "the least temperature": {"temperature": 5e-324},
}


@pytest.mark.parametrize("name", NARROW)
def test_a_draw_from_one_token_is_greedy(client: openai.OpenAI, name: str) -> None:
    narrow = NARROW[name] if isinstance(NARROW[name], dict) else {name: NARROW[name]}
    greedy = complete(client).choices[0].text
    for seed in range(4):
        sampling: dict[str, Any] = {"temperature": 1.5, "seed": seed, **narrow}
        assert complete(client, extra_body=sampling).choices[0].text == greedy
    assert {complete(client, temperature=1.5, seed=seed).choices[0].text for seed in range(4)} != {greedy}


def test_a_stop_token_ends_the_text_and_is_not_in_it(client: openai.OpenAI, server: LiveServer) -> None:
    (token,) = server.http.post("/tokenize", json={"prompt": " blue"}).json()["tokens"]
    bias = {str(token): 100}
    (choice,) = complete(client, logit_bias=bias, extra_body={"stop_token_ids": [token]}).choices
    assert (choice.text, choice.finish_reason) == ("", "stop")
    assert complete(client, logit_bias=bias, max_tokens=2).choices[0].text == " blue blue"


IGNORED: dict[str, Any] = {
    "user": "somebody",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "verbosity": "low",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_says_nothing_about_the_text_is_ignored(client: openai.OpenAI, name: str) -> None:
    plain, same = chat(client, max_tokens=4), chat(client, max_tokens=4, **{name: IGNORED[name]})
    assert same.choices[0].message.content == plain.choices[0].message.content


REFUSED: dict[str, Any] = {
    "functions": [{"name": "f", "parameters": {}}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "mp3"},
    "web_search_options": {},
    "prediction": {"type": "content", "content": "x"},
    "best_of": 2,
    "suffix": "x",
    "continue_final_message": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "allowed_token_ids": [5],
    "n_predict": 5,
    "grammar": "root ::= [a-z]",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, max_tokens=1, extra_body={name: REFUSED[name]})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_errors_reach_the_client_with_code_and_parameter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as too_long:
        complete(client, prompt="word " * 5000)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as wrong:
        complete(client, temperature=3)
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.NotFoundError) as absent:
        complete(client, model="gpt-5")
    assert (absent.value.code, absent.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as other:
        client.embeddings.create(model=BUNDLED, input="x")
    assert other.value.code == "unsupported_endpoint"
