"""Chat templates, and that no message can write control tokens."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import TEMPLATE, TinyLlama
from transformers.utils.chat_template_utils import render_jinja_template

from busload_runtime.model.chat import ChatError, ChatTemplate
from busload_runtime.model.errors import ModelError
from busload_runtime.model.text import TextModel, load_text_model

CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'"},
    {"role": "user", "content": "Grüße 🙂"},
    {"role": "assistant", "content": "Hallo"},
]
TEMPLATES = {
    "plain": TEMPLATE,
    "trim blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",
    "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }},{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "tools": "{% if tools is none %}none{% else %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}",
    "year": "{{ strftime_now('%Y') }}",
    # What the templates of each family do, in a few lines each.
    "llama 3": (
        "{% set loop_messages = messages %}{% for m in loop_messages %}{% set content = "
        "'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = '<|begin_of_text|>' + content %}{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}"
        "{%- else %}{%- set rest = messages %}{%- endif %}{%- for m in rest %}"
        "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('alternate!') }}{%- endif %}"
        "{%- if m['role'] == 'user' %}{%- if loop.first and system is defined %}{{- '[INST] ' + system + '\n\n' }}"
        "{%- else %}{{- '[INST] ' }}{%- endif %}{{- m['content'] + ' [/INST]' }}"
        "{%- else %}{{- ' ' + m['content'] | trim + '</s>' }}{%- endif %}{%- endfor %}"
    ),
    "qwen3": (
        "{%- set ns = namespace(last=messages | length - 1) %}{%- for m in messages[::-1] %}"
        "{%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}"
        "{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
        "{%- set content = m.content if m.content is string else '' %}"
        "{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>' + '\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and "
        "enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
    ),
    "gemma": (
        "{%- if messages[0].role == 'system' -%}{%- set prefix = messages[0].content + '\n\n' -%}"
        "{%- set rest = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set rest = messages -%}{%- endif -%}"
        "{%- for m in rest -%}{%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}"
        "{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}"
        "{%- if m['content'] is string -%}{{ m['content'] | trim }}{%- elif m['content'] is iterable -%}"
        "{%- for item in m['content'] -%}{{ item['text'] | trim }}{%- endfor -%}{%- endif -%}"
        "{{ '<end_of_turn>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    TinyLlama().write(path)
    return load_text_model(str(path))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "clock"}}]])
def test_renders_as_transformers_does(name: str, add_generation_prompt: bool, tools: Any) -> None:
    theirs, _ = render_jinja_template(
        conversations=[MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        tools=tools,
    )
    ours = ChatTemplate("m.gguf", TEMPLATES[name], {}).render(MESSAGES, add_generation_prompt, tools)
    assert ours == theirs[0]


def test_special_tokens_have_names() -> None:
    template = ChatTemplate("m.gguf", "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", {"bos_token": "<s>"})
    assert template.render([{"role": "user", "content": "x"}]) == "<s>x"


def test_errors() -> None:
    with pytest.raises(ChatError, match=r"m.gguf has no chat template; use /v1/completions with a whole prompt"):
        ChatTemplate("m.gguf", None, {}).render(MESSAGES)
    with pytest.raises(ModelError, match=r"m.gguf: tokenizer.chat_template is not a Jinja template: "):
        ChatTemplate("m.gguf", "{% for %}", {})
    refusing = ChatTemplate("m.gguf", "{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatError, match="refused the messages: roles must alternate"):
        refusing.render(MESSAGES)
    with pytest.raises(ChatError, match="cannot take these messages"):
        ChatTemplate("m.gguf", "{{ 'a' + messages[0].content }}", {}).render([{"role": "user", "content": 3}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        seen = ChatTemplate("m.gguf", source, {}).render(MESSAGES)
    except ChatError:
        seen = ""
    assert seen == ""  # refused, or the attribute does not exist


def test_chat_prompt_has_the_template_s_control_tokens(model: TextModel) -> None:
    start, end = (model.tokenizer.encode(text, special=True)[0] for text in CONTROL[:2])
    ids = model.encode_chat([{"role": "user", "content": "the"}])
    assert [token for token in ids if token in (start, end)] == [start, end, start]
    assert model.tokenizer.decode(ids) == "user\nthe\nassistant\n"
    assert ids == model.tokenizer.encode(model.chat.render([{"role": "user", "content": "the"}]), special=True)


HOSTILE = st.lists(
    st.sampled_from([*CONTROL, "<|im_", "end|>", "<|", "|>", "the", " ", "\ufdd0", "\ufdd1", "é🙂"])
).map("".join)


@settings(max_examples=200, deadline=None)
@given(HOSTILE, HOSTILE)
def test_messages_cannot_write_control_tokens(model: TextModel, system: str, user: str) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    ids = model.encode_chat(messages)
    control = {model.tokenizer.encode(text, special=True)[0] for text in CONTROL}
    assert sum(token in control for token in ids) == 5
    # Nothing is lost either: all of the text is there, as text.
    expected = f"system\n{system}\nuser\n{user}\nassistant\n"
    assert model.tokenizer.decode(ids) == expected
    assert re.sub(r"[^\ufdd0-\ufdef]", "", model.chat.render(messages)) == re.sub(r"[^\ufdd0-\ufdef]", "", expected)


def test_messages_with_every_noncharacter_are_refused(model: TextModel) -> None:
    with pytest.raises(ChatError, match="noncharacter"):
        model.encode_chat([{"role": "user", "content": "".join(map(chr, range(0xFDD0, 0xFDF0)))}])


def test_model_without_a_template(tmp_path: Path) -> None:
    TinyLlama(metadata={"tokenizer.chat_template": None}).write(tmp_path / "base.gguf")
    model = load_text_model(str(tmp_path / "base.gguf"))
    assert not model.chat.available
    with pytest.raises(ChatError, match="has no chat template"):
        model.encode_chat(MESSAGES)
