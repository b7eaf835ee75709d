"""Small chat templates that take tools, one for each way in which model families write calls."""

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

HERMES = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Answer with <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}" + _TURN + "{% if m.tool_calls %}{% for call in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}" + _OPEN
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% else %}" + _TURN + "{% endif %}<|im_end|>\n{% endfor %}" + _OPEN
)
LLAMA3 = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% if tools %}Environment: ipython\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Respond with {"name": function name, "parameters": dictionary}\n{% endif %}'
    "{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}" + _TURN + "{% endif %}<|im_end|>\n{% endfor %}" + _OPEN
)
UNKNOWN = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}" + _TURN + "{% endfor %}" + _OPEN
TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama3": LLAMA3}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/point"}},
            "required": ["to"],
            "additionalProperties": False,
            "$defs": {
                "point": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2}
            },
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, MOVE, NOW]
