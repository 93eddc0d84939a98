# SPDX-License-Identifier: Apache-2.0
"""llama-index's client of OpenAI-like servers: chats, completions, streams, tools and errors."""
import asyncio

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from common import raises, read_fleet

fleet = read_fleet()
common = {"model": fleet.model, "api_base": f"{fleet.url}/v1", "api_key": fleet.key, "max_retries": 0,
          "is_function_calling_model": True, "context_window": 4096}
no_reasoning = {"reasoning_effort": "none"}
short = {"temperature": 0, "max_tokens": fleet.max_tokens}
chat = OpenAILike(is_chat_model=True, additional_kwargs={"extra_body": no_reasoning}, **short, **common)
question = [ChatMessage(role="user", content=fleet.question)]


def read_line(line: int) -> str:
    """Reads a line of the file."""
    return f"line {line}"


def check_texts():
    assert chat.chat(question).message.content == fleet.chat
    assert "".join(part.delta or "" for part in chat.stream_chat(question)) == fleet.chat
    completion = OpenAILike(is_chat_model=False, **short, **common)
    assert completion.complete(fleet.prompt).text == fleet.completion
    assert "".join(part.delta or "" for part in completion.stream_complete(fleet.prompt)) == fleet.completion


def check_tools():
    drawn = OpenAILike(is_chat_model=True, max_tokens=300, temperature=1, **common,
                       additional_kwargs={"seed": 4, "extra_body": no_reasoning})
    answer = drawn.chat_with_tools([FunctionTool.from_defaults(read_line)], user_msg=fleet.question,
                                   tool_required=True)
    call = drawn.get_tool_calls_from_response(answer)[0]
    assert call.tool_name == "read_line" and isinstance(call.tool_kwargs["line"], int), answer


def check_errors():
    with raises(openai.NotFoundError):
        OpenAILike(is_chat_model=True, **{**common, "model": "none"}).chat(question)
    with raises(openai.AuthenticationError):
        OpenAILike(is_chat_model=True, **{**common, "api_key": "sk-none"}).chat(question)


async def check_async():
    answers = await asyncio.gather(*(chat.achat(question) for _ in range(4)))
    assert {answer.message.content for answer in answers} == {fleet.chat}, answers
    parts = [part.delta or "" async for part in await chat.astream_chat(question)]
    assert "".join(parts) == fleet.chat, parts


check_texts()
check_tools()
check_errors()
asyncio.run(check_async())
