# SPDX-License-Identifier: Apache-2.0
"""Talks with Anthropic's own client: tools, streams, thinking, counts and errors.

usage: anthropic_client.py URL TOOLS
"""
import json
import sys

from anthropic import Anthropic, BadRequestError, NotFoundError

url, tools = sys.argv[1], json.loads(sys.argv[2])
tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in tools]
client = Anthropic(base_url=url, api_key="none", max_retries=0)
model = "chat"
question = [{"role": "user", "content": "Where is main?"}]
common = {"model": model, "messages": question, "tools": tools, "max_tokens": 300,
          "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "extra_body": {"seed": 4}}

whole = client.messages.create(**common)
assert whole.stop_reason == "tool_use", whole
call = whole.content[0]
assert call.type == "tool_use" and call.name in ("find_symbol", "read_line") and call.input, whole

with client.messages.stream(**common) as stream:
    for _ in stream:
        pass
    final = stream.get_final_message()
assert final.content[0].input == call.input and final.stop_reason == "tool_use", final
assert final.usage.output_tokens == whole.usage.output_tokens, final

turns = question + [
    {"role": "assistant", "content": whole.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "line 3"}]},
]
answer = client.messages.create(model=model, messages=turns, tools=tools, max_tokens=8, system="Be brief.")
assert answer.content[0].type in ("text", "tool_use"), answer
counted = client.messages.count_tokens(model=model, messages=turns, tools=tools, system="Be brief.")
usage = answer.usage
assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage)

thinking = client.messages.create(model=model, messages=question, max_tokens=1100,
                                  thinking={"type": "enabled", "budget_tokens": 1024},
                                  extra_body={"deadline_ms": 60000, "max_tokens": 6, "ignore_eos": True})
assert thinking.content[0].type == "thinking" and thinking.content[0].thinking, thinking

for error_type, change in ((NotFoundError, {"model": "none"}), (BadRequestError, {"max_tokens": -1})):
    try:
        client.messages.create(**{**common, **change})
        raise SystemExit(f"{change} was accepted")
    except error_type as error:
        assert error.body["type"] == "error", error.body
