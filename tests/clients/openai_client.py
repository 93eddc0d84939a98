# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client: texts, streams, typed answers, tools, responses, errors and retries."""
import asyncio
import json
from typing import Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from common import LONG_OUTPUT, Cancellation, check_retries, failing_proxy, raises, read_fleet

fleet = read_fleet()
connection = {"base_url": f"{fleet.url}/v1", "api_key": fleet.key, "max_retries": 0}
client = OpenAI(**connection)
question = [{"role": "user", "content": fleet.question}]
plain = {"model": fleet.model, "messages": question, "reasoning_effort": "none"}
short = {**plain, "temperature": 0, "max_tokens": fleet.max_tokens}
calling = {**plain, "tools": fleet.tools, "tool_choice": "required", "max_tokens": 300, "seed": 4,
           "parallel_tool_calls": False, "metadata": {"a": "b"}, "store": False}


class Symbol(BaseModel):
    name: str = Field(max_length=12)
    kind: Literal["function", "class"]


def check_texts():
    assert client.models.list().data[0].id == fleet.model
    assert client.models.retrieve(fleet.model).id == fleet.model
    completion = {"model": fleet.model, "prompt": fleet.prompt, "temperature": 0,
                  "max_tokens": fleet.max_tokens}
    whole = client.completions.create(**completion)
    assert whole.choices[0].text == fleet.completion, whole
    streamed = client.completions.create(stream=True, **completion)
    assert "".join(chunk.choices[0].text for chunk in streamed) == fleet.completion

    whole = client.chat.completions.create(**short)
    assert whole.choices[0].message.content == fleet.chat, whole
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **short))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == fleet.chat
    assert all(chunk.usage is None for chunk in chunks[:-1]) and chunks[-1].choices == [], chunks[-1]
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens, (usage, whole.usage)
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 0, (usage, whole.usage)

    logprobs = client.chat.completions.create(logprobs=True, top_logprobs=2, **short).choices[0].logprobs
    assert "".join(token.token for token in logprobs.content) == fleet.chat
    # At temperature 0, each token is the most probable one.
    assert all(token.top_logprobs[0].logprob == token.logprob for token in logprobs.content)


def check_typed_answers():
    typed = {**plain, "max_tokens": 300, "seed": 4}
    choice = client.chat.completions.parse(response_format=Symbol, **typed).choices[0]
    assert isinstance(choice.message.parsed, Symbol) and choice.finish_reason == "stop", choice
    with client.chat.completions.stream(response_format=Symbol, **typed) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == choice.message.parsed, final
    assert "content.delta" in kinds and "content.done" in kinds, kinds
    answer = client.responses.parse(model=fleet.model, input=fleet.question, text_format=Symbol,
                                    max_output_tokens=300, reasoning={"effort": "none"}, extra_body={"seed": 4})
    assert isinstance(answer.output_parsed, Symbol), answer


def check_tools():
    whole = client.chat.completions.create(**calling).choices[0]
    assert whole.finish_reason == "tool_calls", whole
    call = whole.message.tool_calls[0]
    assert call.function.name in ("find_symbol", "read_line") and json.loads(call.function.arguments), whole

    joined, finish = {}, None
    for chunk in client.chat.completions.create(stream=True, **calling):
        for part in chunk.choices[0].delta.tool_calls or []:
            entry = joined.setdefault(part.index, {"name": part.function.name, "arguments": ""})
            entry["arguments"] += part.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    assert finish == "tool_calls" and joined[0]["arguments"] == call.function.arguments, joined

    turns = question + [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "line 3"}]
    answer = client.chat.completions.create(
        **{**calling, "messages": turns, "tool_choice": "auto", "max_tokens": 8}).choices[0]
    assert isinstance(answer.message.content, str), answer

    # The helpers for streams join the pieces themselves.
    with client.chat.completions.stream(**calling) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments, final
    # A tool of the client, made from a type.
    tool = openai.pydantic_function_tool(Symbol)
    parsed = client.chat.completions.parse(**{**calling, "tools": [tool]}).choices[0].message
    assert isinstance(parsed.tool_calls[0].function.parsed_arguments, Symbol), parsed


def check_responses():
    flat = [{"type": "function", "strict": False, **tool["function"]} for tool in fleet.tools]
    common = {"model": fleet.model, "tools": flat, "max_output_tokens": 300, "reasoning": {"effort": "none"},
              "parallel_tool_calls": False, "extra_body": {"seed": 4}}
    asking = {**common, "input": fleet.question, "tool_choice": "required"}
    first = client.responses.create(**asking)
    call = first.output[0]
    assert first.status == "completed" and call.type == "function_call" and json.loads(call.arguments), first
    with client.responses.stream(**asking) as stream:
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
    with raises(openai.NotFoundError, code="response_not_found"):
        client.responses.retrieve(answer.id)


def check_errors():
    ask = client.chat.completions.create
    with raises(openai.NotFoundError, code="model_not_found", param="model"):
        ask(**{**short, "model": "none"})
    with raises(openai.BadRequestError, param="temperature"):
        ask(**{**short, "temperature": 3})
    with raises(openai.BadRequestError, code="context_length_exceeded"):
        ask(**{**short, "messages": [{"role": "user", "content": "x " * 9000}]})
    with raises(openai.BadRequestError, param="tool_choice"):
        ask(**{**calling, "tool_choice": {"type": "function", "function": {"name": "other"}}})
    with raises(openai.InternalServerError, code="deadline_exceeded", status_code=504):
        ask(**{**short, "max_tokens": LONG_OUTPUT}, extra_body={"deadline_ms": 1, "ignore_eos": True})
    with raises(openai.AuthenticationError, code="invalid_api_key"):
        client.with_options(api_key="sk-none").models.list()
    limited = client.with_options(api_key=fleet.limited_key)
    limited.chat.completions.create(**short)
    with raises(openai.RateLimitError, code="rate_limit_exceeded"):
        limited.chat.completions.create(**short)
    with raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(
            **{**short, "max_tokens": LONG_OUTPUT}, extra_body={"ignore_eos": True})


def check_repeated_requests():
    with failing_proxy(fleet, [503, 429]) as (url, arrivals):
        patient = client.with_options(base_url=f"{url}/v1", max_retries=2)
        assert patient.chat.completions.create(**short).choices[0].message.content == fleet.chat
    check_retries(arrivals, 3)
    with failing_proxy(fleet, [503, 503]) as (url, arrivals):
        with raises(openai.InternalServerError, status_code=503, code="overloaded"):
            client.with_options(base_url=f"{url}/v1", max_retries=1).chat.completions.create(**short)
    check_retries(arrivals, 2)
    # What is wrong with a request stays wrong: a client must not repeat it.
    with failing_proxy(fleet, []) as (url, arrivals), raises(openai.BadRequestError, param="temperature"):
        client.with_options(base_url=f"{url}/v1", max_retries=2).chat.completions.create(
            **{**short, "temperature": 3})
    check_retries(arrivals, 1)


async def check_async():
    async with AsyncOpenAI(**connection) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**short) for _ in range(4)))
        assert {answer.choices[0].message.content for answer in answers} == {fleet.chat}, answers
        stream = await client.chat.completions.create(stream=True, **short)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == fleet.chat, texts
        typed = await client.chat.completions.parse(
            response_format=Symbol, **{**plain, "max_tokens": 300, "seed": 4})
        assert isinstance(typed.choices[0].message.parsed, Symbol), typed

        cancellation = Cancellation(fleet)
        started = asyncio.Event()

        async def read_long():
            stream = await client.chat.completions.create(
                **{**short, "max_tokens": LONG_OUTPUT}, stream=True, extra_body={"ignore_eos": True})
            async for _ in stream:
                started.set()

        task = asyncio.create_task(read_long())
        await started.wait()
        await asyncio.to_thread(cancellation.check_running)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await asyncio.to_thread(cancellation.check_stopped)


check_texts()
check_typed_answers()
check_tools()
check_responses()
check_errors()
check_repeated_requests()
asyncio.run(check_async())
