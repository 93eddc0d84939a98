# SPDX-License-Identifier: Apache-2.0
"""Gets embeddings with OpenAI's own client, whose default encoding is base64.

usage: openai_embeddings.py URL
"""
import sys

from openai import BadRequestError, OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
texts = ["def f():", "import os"]
reply = client.embeddings.create(model=model, input=texts)
assert [entry.index for entry in reply.data] == [0, 1] and reply.usage.total_tokens > 4, reply
width = len(reply.data[0].embedding)
assert abs(sum(value * value for value in reply.data[1].embedding) - 1) < 1e-5
floats = client.embeddings.create(model=model, input=texts, encoding_format="float")
for decoded, plain in zip(reply.data, floats.data):
    assert max(abs(a - b) for a, b in zip(decoded.embedding, plain.embedding)) < 1e-7
short = client.embeddings.create(model=model, input=[[5, 6, 7]], dimensions=8, user="u")
assert len(short.data[0].embedding) == 8 and short.usage.prompt_tokens == 3, short
try:
    client.embeddings.create(model=model, input="x", dimensions=width + 1)
    raise SystemExit("too many dimensions were accepted")
except BadRequestError as error:
    assert error.param == "dimensions", error
