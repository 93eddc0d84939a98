# SPDX-License-Identifier: Apache-2.0
"""Typed answers with instructor, whole and partial, in the modes that constrain the output by a schema."""
from typing import Literal, Optional

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

from common import read_fleet


class Place(BaseModel):
    line: int = Field(ge=1, le=999)
    column: Optional[int] = Field(None, ge=0, le=9)


class Symbol(BaseModel):
    """A symbol of a program."""

    name: str = Field(max_length=12, description="its name")
    kind: Literal["function", "class"]
    places: list[Place] = Field(max_length=2)


fleet = read_fleet()
openai = OpenAI(base_url=f"{fleet.url}/v1", api_key=fleet.key, max_retries=0)
common = {"model": fleet.model, "messages": [{"role": "user", "content": fleet.question}],
          "max_retries": 0, "max_tokens": 400, "seed": 4, "reasoning_effort": "none"}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai, mode=mode)
    # An answer of another type is an exception.
    whole = client.chat.completions.create(response_model=Symbol, **common)
    *_, streamed = client.chat.completions.create_partial(response_model=Symbol, **common)
    streamed = Symbol.model_validate(streamed.model_dump()).model_dump()
    # In the other modes, the stream is of a tool with another name.
    assert streamed == whole.model_dump() or mode != instructor.Mode.JSON_SCHEMA, (whole, streamed)
