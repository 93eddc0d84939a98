# SPDX-License-Identifier: Apache-2.0
"""litellm: texts and tools by the routes of OpenAI and of Anthropic, streams, errors and retries."""
import asyncio
import json
import os

# Without it, the import fetches a table of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

from common import LONG_OUTPUT, Cancellation, check_retries, failing_proxy, raises, read_fleet

fleet = read_fleet()
question = [{"role": "user", "content": fleet.question}]
openai = {"model": f"openai/{fleet.model}", "api_base": f"{fleet.url}/v1", "api_key": fleet.key,
          "messages": question, "max_retries": 0, "max_tokens": fleet.max_tokens}
short = {**openai, "temperature": 0, "extra_body": {"reasoning_effort": "none"}}
text = {"model": f"text-completion-openai/{fleet.model}", "api_base": f"{fleet.url}/v1", "api_key": fleet.key,
        "temperature": 0, "max_tokens": fleet.max_tokens}
messages = {"model": f"anthropic/{fleet.model}", "api_base": fleet.url, "api_key": fleet.key,
            "messages": question, "max_tokens": fleet.max_tokens, "temperature": 0}
calling = {"tools": fleet.tools, "tool_choice": "required", "max_tokens": 300, "parallel_tool_calls": False,
           "extra_body": {"reasoning_effort": "none", "seed": 4}}


def check_texts():
    whole = litellm.completion(**short)
    assert whole.choices[0].message.content == fleet.chat, whole
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **short))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == fleet.chat
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
    answer = litellm.text_completion(prompt=fleet.prompt, **text)
    assert answer.choices[0].text == fleet.completion, answer
    # The same model by the messages API.
    answer = litellm.completion(**messages)
    assert answer.choices[0].message.content == fleet.chat, answer
    chunks = list(litellm.completion(stream=True, **messages))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == fleet.chat


def check_tools():
    calls = []
    for own in (openai, messages):
        choice = litellm.completion(**{**own, **calling}).choices[0]
        assert choice.finish_reason == "tool_calls", choice
        (call,) = choice.message.tool_calls[:1]
        assert call.function.name in ("find_symbol", "read_line"), choice
        calls.append(json.loads(call.function.arguments))
    assert all(calls), calls


def check_errors():
    with raises(litellm.NotFoundError):
        litellm.completion(**{**short, "model": "openai/none"})
    with raises(litellm.BadRequestError):
        litellm.completion(**{**short, "temperature": 3})
    with raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**short, "messages": [{"role": "user", "content": "x " * 9000}]})
    with raises(litellm.AuthenticationError):
        litellm.completion(**{**short, "api_key": "sk-none"})
    limited = {**short, "api_key": fleet.limited_key}
    litellm.completion(**limited)
    with raises(litellm.RateLimitError):
        litellm.completion(**limited)


def check_repeated_requests():
    with failing_proxy(fleet, [503, 429]) as (url, arrivals):
        answer = litellm.completion(**{**short, "api_base": f"{url}/v1", "max_retries": 2})
        assert answer.choices[0].message.content == fleet.chat, answer
    check_retries(arrivals, 3)


async def check_async():
    answers = await asyncio.gather(*(litellm.acompletion(**short) for _ in range(4)))
    assert {answer.choices[0].message.content for answer in answers} == {fleet.chat}, answers
    cancellation, started = Cancellation(fleet), asyncio.Event()

    async def read_long():
        long = {**short, "max_tokens": LONG_OUTPUT, "extra_body": {"ignore_eos": True}}
        async for _ in await litellm.acompletion(stream=True, **long):
            started.set()

    task = asyncio.create_task(read_long())
    await started.wait()
    await asyncio.to_thread(cancellation.check_running)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    await asyncio.to_thread(cancellation.check_stopped)


check_texts()
check_tools()
check_errors()
check_repeated_requests()
asyncio.run(check_async())
