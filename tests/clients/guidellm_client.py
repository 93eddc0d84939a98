# SPDX-License-Identifier: Apache-2.0
"""guidellm's client: what its load generator sends and measures, in each format, whole and streamed.

`guidellm run` itself takes its requests from a loader of torch, so the requests are made here.
"""
import asyncio

import httpx
from guidellm.backends.openai.http import OpenAIHTTPBackend
from guidellm.schemas import GenerationRequest, RequestInfo, UsageMetrics
from guidellm.schemas.backends.openai_http import OpenAIHTTPBackendArgs

from common import raises, read_fleet

fleet = read_fleet()
# Each stream writes this many tokens, as `ignore_eos` in guidellm's requests asks.
TOKENS = 32
USERS = 4


def backend_of(route, streams, key=fleet.key):
    return OpenAIHTTPBackend(OpenAIHTTPBackendArgs(
        target=fleet.url, request_format=route, stream=streams, api_key=key,
        extras={"body": {"temperature": 0, "reasoning_effort": "none"}}))


async def send(backend, text):
    request = GenerationRequest(columns={"text_column": [text]}, output_metrics=UsageMetrics(text_tokens=TOKENS))
    info = RequestInfo(request_id=request.request_id)
    answers = [answer async for answer, _ in backend.resolve(request, info)]
    return answers[-1], info.timings


async def check_format(route, text):
    answers = []
    for streams in (False, True):
        backend = backend_of(route, streams)
        await backend.process_startup()
        await backend.validate()
        assert await backend.default_model() == fleet.model
        for answer, timings in await asyncio.gather(*(send(backend, text) for _ in range(USERS))):
            assert answer.output_metrics.text_tokens == TOKENS, answer
            assert answer.input_metrics.text_tokens > 0, answer
            if streams:
                assert timings.request_start < timings.first_token_iteration < timings.last_token_iteration
                # Every token is one of an event: guidellm divides by their number.
                assert 1 < timings.token_iterations <= TOKENS, timings
            answers.append(answer)
        await backend.process_shutdown()
    assert len({answer.text for answer in answers}) == 1, answers
    return answers[0].text


async def main():
    completion = await check_format("/v1/completions", fleet.prompt)
    assert completion.startswith(fleet.completion), completion
    chat = await check_format("/v1/chat/completions", fleet.question)
    assert chat.startswith(fleet.chat), chat

    stranger = backend_of("/v1/completions", True, key="sk-none")
    await stranger.process_startup()
    with raises(httpx.HTTPStatusError):
        await stranger.default_model()
    await stranger.process_shutdown()


asyncio.run(main())
