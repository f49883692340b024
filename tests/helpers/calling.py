"""A target that calls two tools, in the form of Hermes and Qwen, and the tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from served import Says
from tiny_chat import byte_tokenizer

from draftheads.infer.rows import Step

HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("look_up", "count")
]
LOOK_UP = '<tool_call>\n{"name": "look_up", "arguments": {"word": "heron"}}\n</tool_call>'
COUNT = '<tool_call>\n{"name": "count", "arguments": {"n": 2}}\n</tool_call>'
CALLS = [("look_up", {"word": "heron"}), ("count", {"n": 2})]
QUESTION = {"role": "user", "content": "What is a heron? Count."}
FIRST = f"<think>\nBoth tools.\n</think>\n\nI look.\n{LOOK_UP}\n{COUNT}"
LAST = "<think>\nDone.\n</think>\n\nA bird; 2."
HISTORY = (
    f"assistant\nI look.\n{LOOK_UP}\n{COUNT}<|im_end|>\n<|im_start|>tool\nA heron is a bird."
    "<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
)
"""What the target sees when both results are there."""


class Calls(Says):
    """It says `text`; if it was asked what a heron is, it calls both tools, and then answers."""

    def __init__(self, template: str = HERMES) -> None:
        super().__init__()
        self.target.tokenizer = byte_tokenizer(template)
        self.target.context = 4096

    def generate(self, prompt: Sequence[int], **options: Any) -> Iterator[Step]:
        asked = self.target.tokenizer.decode(prompt)
        if str(QUESTION["content"]) in asked:
            self.text = LAST if "<|im_start|>tool" in asked else FIRST
        return super().generate(prompt, **options)


def use(name: str, arguments: dict[str, Any]) -> str:
    """The result of a tool."""
    return f"A {arguments['word']} is a bird." if name == "look_up" else str(arguments["n"])
