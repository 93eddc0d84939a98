# SPDX-License-Identifier: Apache-2.0
"""langchain-openai: texts, streams, tools, typed answers, batches and completions."""
import asyncio

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from common import LONG_OUTPUT, Cancellation, check_retries, failing_proxy, raises, read_fleet


class Place(BaseModel):
    """A place in a file."""

    line: int = Field(ge=1, le=999)


fleet = read_fleet()
common = {"model": fleet.model, "base_url": f"{fleet.url}/v1", "api_key": fleet.key, "max_retries": 0}
no_reasoning = {"reasoning_effort": "none"}
chat = ChatOpenAI(temperature=0, max_tokens=fleet.max_tokens, extra_body=no_reasoning, stream_usage=True, **common)
drawn = ChatOpenAI(seed=4, max_tokens=300, extra_body=no_reasoning, **common)


def check_texts():
    whole = chat.invoke(fleet.question)
    assert whole.content == fleet.chat, whole
    chunks = list(chat.stream(fleet.question))
    joined = sum(chunks[1:], chunks[0])
    assert joined.content == fleet.chat, joined
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"], joined
    answers = chat.batch([fleet.question] * 4)
    assert {answer.content for answer in answers} == {fleet.chat}, answers
    completion = OpenAI(temperature=0, max_tokens=fleet.max_tokens, **common)
    assert completion.invoke(fleet.prompt) == fleet.completion
    assert "".join(completion.stream(fleet.prompt)) == fleet.completion


def check_tools():
    bound = drawn.bind_tools(fleet.tools, tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(fleet.question)
    (call,) = answer.tool_calls
    assert call["name"] in ("find_symbol", "read_line") and call["args"], answer
    chunks = list(bound.stream(fleet.question))
    streamed = sum(chunks[1:], chunks[0])
    assert streamed.tool_calls[0]["args"] == call["args"], streamed
    turns = [HumanMessage(fleet.question), answer, ToolMessage("line 3", tool_call_id=call["id"])]
    assert isinstance(chat.bind_tools(fleet.tools).invoke(turns).content, str)


def check_typed_answers():
    for method in ("json_schema", "function_calling"):
        answer = drawn.with_structured_output(Place, method=method).invoke(fleet.question)
        assert isinstance(answer, Place), (method, answer)


def check_errors():
    with raises(openai.NotFoundError):
        chat.model_copy(update={"model_name": "none"}).invoke(fleet.question)
    with raises(openai.AuthenticationError):
        ChatOpenAI(**{**common, "api_key": "sk-none"}).invoke(fleet.question)
    with failing_proxy(fleet, [503]) as (url, arrivals):
        patient = ChatOpenAI(temperature=0, max_tokens=fleet.max_tokens, extra_body=no_reasoning,
                             **{**common, "base_url": f"{url}/v1", "max_retries": 1})
        assert patient.invoke(fleet.question).content == fleet.chat
    check_retries(arrivals, 2)


async def check_async():
    assert (await chat.ainvoke(fleet.question)).content == fleet.chat
    long = ChatOpenAI(temperature=0, max_tokens=LONG_OUTPUT, extra_body={"ignore_eos": True}, **common)
    cancellation, started = Cancellation(fleet), asyncio.Event()

    async def read_long():
        async for _ in long.astream(fleet.question):
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
check_typed_answers()
check_errors()
asyncio.run(check_async())
