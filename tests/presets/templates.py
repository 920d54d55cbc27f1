"""Short chat templates, each with the marks of a family's own: what it shows of calls and of reasoning."""

from __future__ import annotations

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
_TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
_ASSISTANT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

HERMES_CALL = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
XML_CALL = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}"
)
GLM_CALL = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{% for key, value in c.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
)
MINIMAX_CALL = (
    '{% for c in m.tool_calls or [] %}<minimax:tool_call>\n<invoke name="{{ c.function.name }}">\n'
    "{% for key, value in c.function.arguments.items() %}"
    '<parameter name="{{ key }}">{{ value if value is string else value | tojson }}</parameter>\n'
    "{% endfor %}</invoke>\n</minimax:tool_call>{% endfor %}"
)
DEEPSEEK_CALL = (
    "{% for c in m.tool_calls or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{% endfor %}"
)
DSML_CALL = (
    '{% for c in m.tool_calls or [] %}<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ c.function.name }}">\n'
    "{% for key, value in c.function.arguments.items() %}"
    '<｜DSML｜parameter name="{{ key }}" string="{{ "true" if value is string else "false" }}">'
    "{{ value if value is string else value | tojson }}</｜DSML｜parameter>\n"
    "{% endfor %}</｜DSML｜invoke>\n</｜DSML｜function_calls>{% endfor %}"
)
MISTRAL_CALL = (
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}"
)
LLAMA_CALL = (
    "{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
)

_SWITCH_ON = (  # Qwen3: the model opens <think> itself
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_SWITCH_OPEN = (  # Qwen3.5: the prompt opens it
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
_SWITCH_OFF = (  # DeepSeek V3.1: off unless it is said, and called by another name
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)


def chatml(call: str = "", end: str = _ASSISTANT) -> str:
    """A template that renders tools, turns and calls, and `end` after them."""
    return f"{_TOOLS if call else ''}{_TURNS}{call}<|im_end|>\n{{% endfor %}}{end}"


QWEN3 = chatml(HERMES_CALL, _SWITCH_ON)
QWEN3_INSTRUCT = chatml(HERMES_CALL)
QWEN3_THINKING = chatml(HERMES_CALL, "<|im_start|>assistant\n<think>\n{# </think> #}")
QWEN35 = chatml(XML_CALL, _SWITCH_OPEN)
QWEN36 = chatml(XML_CALL, "{% if preserve_thinking %}{% endif %}" + _SWITCH_OPEN)
QWEN25 = "{# You are Qwen, created by Alibaba Cloud #}" + chatml(HERMES_CALL)
DEEPSEEK_V31 = chatml(DEEPSEEK_CALL, _SWITCH_OFF)
R1_DISTILL = (
    "{% for m in messages %}<｜User｜>{{ (m.content or '').split('</think>')[-1] }}"
    "{% if m.content is none %}{% for c in m.tool_calls or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
    "{{ '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA31 = f"{_TOOLS}{LLAMA3.replace('<|eot_id|>', LLAMA_CALL + '<|eot_id|>')}"
SMOLLM2 = "{# You are a helpful AI assistant named SmolLM, trained by Hugging Face #}" + chatml()
GEMMA3 = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA4 = "{{ tools }}{# <|tool_call>call:name{} <|channel>thought #}" + chatml()
