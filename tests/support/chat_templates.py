"""Chat templates in the forms of three families, for the special tokens of the model `tinker-sync/tiny`."""

from __future__ import annotations

# Calls as JSON between tags; nothing of an earlier turn is changed.
TAGGED = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }}\
({{ tool.function.parameters.properties | join(', ') }}){% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Reasoning before the answer, which is left out of all turns before the last message of the user.
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content and loop.index0 > ns.last %}<think>
{{ message.reasoning_content.strip('\\n') }}
</think>

{% endif %}{{ message.content.lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# No line break after a turn, texts without the spaces around them, and calls that are the whole answer.
HEADED = """\
<|endoftext|>
{%- for message in messages %}
{%- if message.tool_calls %}<|im_start|>assistant

{"name": "{{ message.tool_calls[0].function.name }}", "parameters": \
{{ message.tool_calls[0].function.arguments | tojson }}}<|im_end|>
{%- else %}<|im_start|>{{ 'ipython' if message.role == 'tool' else message.role }}

{{ message.content | trim }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if tools %}{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""

FAMILIES = {"tagged": TAGGED, "thinking": THINKING, "headed": HEADED}

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
