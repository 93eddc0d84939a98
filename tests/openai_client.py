# SPDX-License-Identifier: Apache-2.0
"""Calls tools with OpenAI's own client, whole and streamed, as chats and as responses.

usage: openai_client.py URL TOOLS
"""
import json
import sys

from openai import BadRequestError, OpenAI

url, tools = sys.argv[1], json.loads(sys.argv[2])
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Where is main?"}]
common = {"model": model, "messages": messages, "tools": tools, "max_tokens": 300, "seed": 4,
          "parallel_tool_calls": False, "reasoning_effort": "none", "metadata": {"a": "b"}, "store": False}

whole = client.chat.completions.create(tool_choice="required", **common).choices[0]
assert whole.finish_reason == "tool_calls", whole
call = whole.message.tool_calls[0]
arguments = json.loads(call.function.arguments)
assert call.function.name in ("find_symbol", "read_line") and arguments, whole

joined, finish = {}, None
for chunk in client.chat.completions.create(tool_choice="required", stream=True, **common):
    for part in chunk.choices[0].delta.tool_calls or []:
        entry = joined.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
        entry["arguments"] += part.function.arguments or ""
    finish = chunk.choices[0].finish_reason or finish
assert finish == "tool_calls" and joined[0]["arguments"] == call.function.arguments, joined

messages += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "line 3"}]
answer = client.chat.completions.create(**{**common, "max_tokens": 8}).choices[0]
assert isinstance(answer.message.content, str), answer

# The helpers for streams join the pieces themselves.
with client.chat.completions.stream(tool_choice="required", **{**common, "messages": messages[:1]}) as stream:
    for _ in stream:
        pass
    final = stream.get_final_completion().choices[0]
assert final.message.tool_calls[0].function.arguments == call.function.arguments, final

try:
    client.chat.completions.create(tool_choice={"type": "function", "function": {"name": "other"}}, **common)
    raise SystemExit("an unknown tool was accepted")
except BadRequestError as error:
    assert error.param == "tool_choice", error

flat = [{"type": "function", "strict": False, **tool["function"]} for tool in tools]
common = {"model": model, "tools": flat, "max_output_tokens": 300, "reasoning": {"effort": "none"},
          "parallel_tool_calls": False, "extra_body": {"seed": 4}}
first = client.responses.create(input="Where is main?", tool_choice="required", **common)
call = first.output[0]
assert first.status == "completed" and call.type == "function_call" and json.loads(call.arguments), first

with client.responses.stream(input="Where is main?", tool_choice="required", **common) as stream:
    for _ in stream:
        pass
    final = stream.get_final_response()
assert final.output[0].arguments == call.arguments, final
assert final.usage.output_tokens == first.usage.output_tokens, final

result = {"type": "function_call_output", "call_id": call.call_id, "output": "line 3"}
answer = client.responses.create(input=[result], previous_response_id=first.id,
                                 **{**common, "max_output_tokens": 8, "tools": []})
assert answer.output_text and answer.usage.input_tokens > 20, answer
assert client.responses.retrieve(answer.id).output_text == answer.output_text
client.responses.delete(answer.id)
