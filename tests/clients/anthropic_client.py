# SPDX-License-Identifier: Apache-2.0
"""Anthropic's own client: texts, streams, tools, thinking, counts, errors and retries."""
import asyncio

import anthropic
from anthropic import Anthropic, AsyncAnthropic

from common import LONG_OUTPUT, Cancellation, check_retries, failing_proxy, raises, read_fleet

fleet = read_fleet()
tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
         for tool in fleet.tools]
connection = {"base_url": fleet.url, "api_key": fleet.key, "max_retries": 0}
client = Anthropic(**connection)
question = [{"role": "user", "content": fleet.question}]
short = {"model": fleet.model, "messages": question, "max_tokens": fleet.max_tokens,
         "extra_body": {"temperature": 0}}
long = {**short, "max_tokens": LONG_OUTPUT, "extra_body": {"temperature": 0, "ignore_eos": True}}
calling = {"model": fleet.model, "messages": question, "tools": tools, "max_tokens": 300,
           "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "extra_body": {"seed": 4}}


def check_texts():
    whole = client.messages.create(**short)
    assert whole.content[0].text == fleet.chat, whole
    with client.messages.stream(**short) as stream:
        assert "".join(stream.text_stream) == fleet.chat
        final = stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens > 0, (final, whole)
    assert final.stop_reason == whole.stop_reason, (final, whole)


def check_tools():
    whole = client.messages.create(**calling)
    assert whole.stop_reason == "tool_use", whole
    call = whole.content[0]
    assert call.type == "tool_use" and call.name in ("find_symbol", "read_line") and call.input, whole
    with client.messages.stream(**calling) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    assert final.content[0].input == call.input and final.stop_reason == "tool_use", final
    assert final.usage.output_tokens == whole.usage.output_tokens, final

    turns = question + [
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "line 3"}]},
    ]
    turn = {"model": fleet.model, "messages": turns, "tools": tools, "system": "Be brief."}
    answer = client.messages.create(max_tokens=8, **turn)
    assert answer.content[0].type in ("text", "tool_use"), answer
    counted, usage = client.messages.count_tokens(**turn), answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage)


def check_thinking():
    answer = client.messages.create(
        model=fleet.model, messages=question, max_tokens=1100,
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body={"deadline_ms": 60000, "max_tokens": 6, "ignore_eos": True})
    assert answer.content[0].type == "thinking" and answer.content[0].thinking, answer


def check_errors():
    for error_type, change in ((anthropic.NotFoundError, {"model": "none"}),
                               (anthropic.BadRequestError, {"max_tokens": -1})):
        with raises(error_type):
            client.messages.create(**{**short, **change})
    try:
        client.messages.create(**{**short, "max_tokens": -1})
    except anthropic.BadRequestError as error:
        assert error.body["type"] == "error", error.body
        assert error.body["error"]["type"] == "invalid_request_error", error.body
    with raises(anthropic.AuthenticationError):
        client.with_options(api_key="sk-none").messages.create(**short)
    limited = client.with_options(api_key=fleet.limited_key)
    limited.messages.create(**short)
    with raises(anthropic.RateLimitError):
        limited.messages.create(**short)
    with raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.05).messages.create(**long)


def check_repeated_requests():
    with failing_proxy(fleet, [503, 429]) as (url, arrivals):
        patient = client.with_options(base_url=url, max_retries=2)
        assert patient.messages.create(**short).content[0].text == fleet.chat
    check_retries(arrivals, 3)
    with failing_proxy(fleet, [429]) as (url, arrivals), raises(anthropic.RateLimitError):
        client.with_options(base_url=url, max_retries=0).messages.create(**short)
    check_retries(arrivals, 1)


async def check_async():
    async with AsyncAnthropic(**connection) as client:
        answers = await asyncio.gather(*(client.messages.create(**short) for _ in range(4)))
        assert {answer.content[0].text for answer in answers} == {fleet.chat}, answers
        cancellation = Cancellation(fleet)
        async with client.messages.stream(**long) as stream:
            async for _ in stream.text_stream:
                await asyncio.to_thread(cancellation.check_running)
                break
        await asyncio.to_thread(cancellation.check_stopped)


check_texts()
check_tools()
check_thinking()
check_errors()
check_repeated_requests()
asyncio.run(check_async())
