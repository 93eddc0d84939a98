# SPDX-License-Identifier: Apache-2.0
"""Between the types of this package and the generated messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from . import types
from ._generated import ballast_pb2 as pb
from .errors import IncompleteStreamError


def _set_prompt(wire: pb.GenerateRequest, prompt: types.Prompt) -> None:
    if isinstance(prompt, str):
        wire.text = prompt
        return
    messages = [item for item in prompt if isinstance(item, types.Message)]
    if messages:
        wire.chat.messages.extend(pb.ChatMessage(role=m.role, content=m.content) for m in messages)
    else:
        # Of an empty sequence, too, which the server refuses by name.
        wire.tokens.CopyFrom(pb.TokenIds(ids=[item for item in prompt if isinstance(item, int)]))


def _sampling(sampling: types.Sampling) -> pb.Sampling:
    given = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    given = {name: value for name, value in given.items() if value is not None}
    if "dry_sequence_breakers" in given:
        given["dry_sequence_breakers"] = pb.StringList(values=given["dry_sequence_breakers"])
    return pb.Sampling(**given)


def _grammar(grammar: types.Grammar | types.OneOf | types.AnyJsonObject | None) -> pb.Grammar | None:
    match grammar:
        case types.Grammar():
            wire = pb.Grammar(lenient=grammar.lenient)
            setattr(wire, grammar.kind.value, grammar.text)
            return wire
        case types.OneOf():
            return pb.Grammar(choice=pb.StringList(values=grammar.values))
        case types.AnyJsonObject():
            return pb.Grammar(json_object=pb.JsonObject())
    return None


def request_to_wire(request: types.GenerateRequest) -> pb.GenerateRequest:
    wire = pb.GenerateRequest(
        model=request.model,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        sampling=_sampling(request.sampling),
        stop=request.stop,
        stop_tokens=request.stop_tokens,
        ignore_eos=request.ignore_eos,
        n=request.n,
        top_logprobs=request.top_logprobs,
        grammar=_grammar(request.grammar),
        tenant=request.tenant,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    _set_prompt(wire, request.prompt)
    if (beams := request.beam_search) is not None:
        wire.beam_search.CopyFrom(
            pb.BeamSearch(
                width=beams.width,
                length_penalty=beams.length_penalty,
                early_stopping=beams.early_stopping,
            )
        )
    return wire


def _input(value: str | Sequence[int]) -> pb.EmbedInput:
    return pb.EmbedInput(text=value) if isinstance(value, str) else pb.EmbedInput(tokens=pb.TokenIds(ids=value))


def embed_to_wire(request: types.EmbeddingRequest) -> pb.EmbedRequest:
    return pb.EmbedRequest(
        model=request.model,
        inputs=[_input(value) for value in request.inputs],
        dimensions=request.dimensions,
        truncate_tokens=request.truncate_tokens,
        no_normalize=not request.normalize,
        tenant=request.tenant,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def embeddings_of(reply: pb.EmbedReply) -> types.Embeddings:
    return types.Embeddings(tuple(tuple(vector.values) for vector in reply.embeddings), reply.prompt_tokens)


def rerank_to_wire(request: types.RerankRequest) -> pb.RerankRequest:
    return pb.RerankRequest(**{field.name: getattr(request, field.name) for field in fields(request)})


def reranked_of(reply: pb.RerankReply) -> types.Reranked:
    results = (types.RerankedDocument(result.index, result.relevance_score) for result in reply.results)
    return types.Reranked(tuple(results), reply.prompt_tokens)


def _logprob(logprob: pb.TokenLogprob) -> types.TokenLogprob:
    top = tuple(zip(logprob.top_tokens, logprob.top_logprobs))
    return types.TokenLogprob(logprob=logprob.logprob, top=top)


def _finished(finished: pb.Finished) -> types.Finished:
    is_stop = finished.reason == pb.FINISH_REASON_STOP
    usage = finished.usage
    return types.Finished(
        choice=finished.choice,
        reason=types.FinishReason.STOP if is_stop else types.FinishReason.LENGTH,
        stop=finished.stop if finished.HasField("stop") else None,
        stop_token=finished.stop_token if finished.HasField("stop_token") else None,
        usage=types.Usage(**{field.name: getattr(usage, field.name) for field in fields(types.Usage)}),
    )


def event_of(frame: pb.GenerateFrame) -> types.Event | None:
    """None for a kind of frame that a later server may send."""
    match frame.WhichOneof("frame"):
        case "started":
            started = frame.started
            return types.Started(started.model, tuple(started.prompt_tokens), started.seed)
        case "delta":
            delta = frame.delta
            logprobs = tuple(_logprob(logprob) for logprob in delta.logprobs)
            return types.Delta(delta.choice, tuple(delta.tokens), delta.text, logprobs)
        case "finished":
            return _finished(frame.finished)
    return None


def models_of(reply: pb.ListModelsReply) -> list[types.Model]:
    """The models that new requests get; a swap shows two of one name."""
    return [
        types.Model(
            name=model.name,
            aliases=tuple(model.aliases),
            digest=model.digest,
            context_tokens=model.context_tokens,
            workers=model.workers,
            weight_bytes=model.weight_bytes,
        )
        for model in reply.models
        if model.is_current
    ]


class StreamProgress:
    """Counts how many choices of a stream have ended: an end before that is a loss."""

    def __init__(self, choices: int) -> None:
        self._unfinished = max(choices, 1)

    def see(self, event: types.Event) -> None:
        if isinstance(event, types.Finished):
            self._unfinished -= 1

    def check_end(self) -> None:
        if self._unfinished > 0:
            raise IncompleteStreamError(self._unfinished)


class CompletionBuilder:
    """Joins the events of a stream."""

    def __init__(self, choices: int) -> None:
        self._choices = [types.Choice() for _ in range(max(choices, 1))]
        self._started: types.Started | None = None

    def add(self, event: types.Event) -> None:
        match event:
            case types.Started():
                self._started = event
            case types.Delta():
                choice = self._choices[event.choice]
                choice.text += event.text
                choice.tokens.extend(event.tokens)
                choice.logprobs.extend(event.logprobs)
            case types.Finished():
                self._choices[event.choice].finished = event

    def build(self) -> types.Completion:
        if self._started is None:
            raise IncompleteStreamError(len(self._choices))
        return types.Completion(self._started, self._choices)
