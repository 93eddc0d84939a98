# SPDX-License-Identifier: Apache-2.0
"""What clients send and get. Fields have the names, units and defaults of proto/proto/ballast/v1/ballast.proto."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Union


@dataclass(frozen=True)
class Message:
    """A turn of a chat. The model's chat template knows the roles: system, user, assistant."""

    role: str
    content: str


# Text, token ids that are used without change, or a chat.
Prompt = Union[str, Sequence[int], Sequence[Message]]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. None leaves a parameter to the model's defaults."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Sequence[str] | None = None


class GrammarKind(enum.Enum):
    """How a grammar is written. The values are fields of the message `Grammar`."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    GBNF = "gbnf"


@dataclass(frozen=True)
class Grammar:
    """The output matches this text."""

    kind: GrammarKind
    text: str
    # A keyword of a JSON schema that cannot be enforced is then no error.
    lenient: bool = False


@dataclass(frozen=True)
class OneOf:
    """The output is one of these texts."""

    values: Sequence[str]


@dataclass(frozen=True)
class AnyJsonObject:
    """The output is a JSON object."""


@dataclass(frozen=True)
class BeamSearch:
    """The choices are the most probable outputs, the best first, instead of random ones."""

    # Outputs that the search follows at once, at least `n`. 0: `n`.
    width: int = 0
    # An output's sum of log probabilities is divided by its length to the power of this. None: 1.
    length_penalty: float | None = None
    # The search ends as soon as `width` outputs have ended with a stop token.
    early_stopping: bool = False


@dataclass(frozen=True)
class GenerateRequest:
    prompt: Prompt
    # May be empty if the fleet serves one model.
    model: str = ""
    # 0: as many as the context allows.
    max_tokens: int = 0
    min_tokens: int = 0
    sampling: Sampling = Sampling()
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    # Number of choices.
    n: int = 1
    # Log probabilities of the output, with so many alternatives (0 to 20).
    top_logprobs: int | None = None
    grammar: Grammar | OneOf | AnyJsonObject | None = None
    tenant: str = ""
    # Lower is more urgent.
    priority: int = 0
    # Prompts share cached blocks only with requests of the same salt.
    cache_salt: str = ""
    beam_search: BeamSearch | None = None


@dataclass(frozen=True)
class EmbeddingRequest:
    # Texts, or token ids that are used without change.
    inputs: Sequence[str | Sequence[int]]
    # May be empty if the fleet serves one model.
    model: str = ""
    # Shorter vectors: the first values, normalized. None: the model's.
    dimensions: int | None = None
    # Longer inputs are cut to this many tokens. None: they are refused if they exceed the context.
    truncate_tokens: int | None = None
    # Give each vector the length 1.
    normalize: bool = True
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class RerankRequest:
    query: str
    documents: Sequence[str]
    model: str = ""
    # Results in the reply. 0: all.
    top_n: int = 0
    # Longer texts are cut to this many tokens.
    truncate_tokens: int | None = None
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class TokenLogprob:
    logprob: float
    # The most likely tokens with their log probabilities.
    top: Sequence[tuple[int, float]]


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    first_token_ms: float
    total_ms: float
    resumes: int


@dataclass(frozen=True)
class Started:
    """The first event of a stream: a worker has admitted the request."""

    model: str
    prompt_tokens: Sequence[int]
    # A request that names this seed reproduces the output.
    seed: int


@dataclass(frozen=True)
class Delta:
    """Tokens of a choice, and the text that they made certain."""

    choice: int
    tokens: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprob]


@dataclass(frozen=True)
class Finished:
    """The last event of a choice."""

    choice: int
    reason: FinishReason
    stop: str | None
    stop_token: int | None
    usage: Usage


Event = Union[Started, Delta, Finished]


@dataclass
class Choice:
    """A whole choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None


@dataclass
class Completion:
    """All choices of a request."""

    started: Started
    choices: list[Choice]


@dataclass(frozen=True)
class Embeddings:
    """One vector for each input, in their order."""

    vectors: Sequence[Sequence[float]]
    prompt_tokens: int


@dataclass(frozen=True)
class RerankedDocument:
    # Among the documents of the request.
    index: int
    # From a classifier 0 to 1, from embeddings the cosine of the angle between them.
    score: float


@dataclass(frozen=True)
class Reranked:
    """Documents, the best first."""

    results: Sequence[RerankedDocument]
    prompt_tokens: int


@dataclass(frozen=True)
class Model:
    name: str
    aliases: Sequence[str]
    digest: str
    context_tokens: int
    workers: int
    weight_bytes: int


class Health(enum.Enum):
    """SERVING: a worker of some model is ready."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
