# SPDX-License-Identifier: Apache-2.0
"""gRPC by reflection only: services, messages and methods come from the server, not from the .proto file."""
import threading
import time

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from common import LONG_OUTPUT, PATIENCE_S, Cancellation, read_fleet

SERVICES = {"ballast.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection"}

fleet = read_fleet()
key = (("authorization", f"Bearer {fleet.key}"),)


class WithKey(grpc.StreamStreamClientInterceptor):
    """Reflection needs a key too, which the library's client of it cannot give."""

    def intercept_stream_stream(self, continuation, details, requests):
        return continuation(details._replace(metadata=key), requests)


plain_channel = grpc.insecure_channel(fleet.grpc)
database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(plain_channel, WithKey()))
pool = DescriptorPool(database)
inference = pool.FindServiceByName("ballast.v1.Inference")


def call(name, fields, metadata=key, service=inference, **options):
    """Calls a method with a request of these fields. A stream is returned as the call."""
    method = service.FindMethodByName(name)
    request = GetMessageClass(method.input_type)(**fields)
    reply = GetMessageClass(method.output_type)
    kind = plain_channel.unary_stream if method.server_streaming else plain_channel.unary_unary
    stub = kind(f"/{service.full_name}/{name}", request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=reply.FromString)
    return stub(request, metadata=metadata, **{"timeout": PATIENCE_S, **options})


def fails(code, **arguments):
    try:
        list(call(**arguments))
    except grpc.RpcError as error:
        assert error.code() == code, error
        return {entry.key: entry.value for entry in error.trailing_metadata()}
    raise AssertionError(f"no {code}")


def check_services():
    assert set(database.get_services()) == SERVICES, database.get_services()
    health = pool.FindServiceByName("grpc.health.v1.Health")
    reply = call("Check", {"service": inference.full_name}, metadata=(), service=health)
    assert reply.status == 1, reply
    streaming = {method.name for method in inference.methods if method.server_streaming}
    assert streaming == {"Generate"}, streaming


def check_texts():
    models = call("ListModels", {}).models
    assert [model.name for model in models] == [fleet.model], models
    tokens = call("Tokenize", {"text": fleet.prompt}).tokens
    plain = call("Tokenize", {"text": fleet.prompt, "no_special": True}).tokens
    assert call("Detokenize", {"tokens": plain}).text == fleet.prompt
    request = {"text": fleet.prompt, "max_tokens": fleet.max_tokens, "sampling": {"temperature": 0}}
    frames = list(call("Generate", request))
    assert frames[0].started.prompt_tokens == tokens, frames[0]
    assert "".join(frame.delta.text for frame in frames) == fleet.completion, frames
    usage = frames[-1].finished.usage
    written = sum(len(frame.delta.tokens) for frame in frames)
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(tokens), written), frames[-1]
    # Enums have their names too.
    reasons = pool.FindEnumTypeByName("ballast.v1.FinishReason").values_by_number
    assert reasons[frames[-1].finished.reason].name == "FINISH_REASON_LENGTH", frames[-1]

    schema = {"json_schema": '{"type": "integer", "minimum": 10, "maximum": 99}'}
    frames = list(call("Generate", {"text": "x = ", "grammar": schema, "max_tokens": 20}))
    assert 10 <= int("".join(frame.delta.text for frame in frames)) <= 99, frames


def check_errors():
    long = {"text": fleet.prompt, "max_tokens": LONG_OUTPUT, "ignore_eos": True}
    fails(grpc.StatusCode.UNAUTHENTICATED, name="Generate", fields=long, metadata=())
    fails(grpc.StatusCode.NOT_FOUND, name="Generate", fields={**long, "model": "none"})
    fails(grpc.StatusCode.INVALID_ARGUMENT, name="Generate", fields={**long, "sampling": {"temperature": 3}})
    fails(grpc.StatusCode.INVALID_ARGUMENT, name="Generate", fields={"max_tokens": 1})
    fails(grpc.StatusCode.DEADLINE_EXCEEDED, name="Generate", fields=long, timeout=0.05)
    fails(grpc.StatusCode.DEADLINE_EXCEEDED, name="Generate", fields={**long, "deadline_ms": 50})
    limited = (("authorization", f"Bearer {fleet.limited_key}"),)
    list(call("Generate", {"text": "x", "max_tokens": 1}, metadata=limited))
    trailers = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, name="Generate", fields=long, metadata=limited)
    assert 1 <= int(trailers["retry-after"]) <= 60, trailers


def check_cancellation():
    cancellation = Cancellation(fleet)
    stream = call("Generate", {"text": fleet.prompt, "max_tokens": LONG_OUTPUT, "ignore_eos": True})
    next(stream), next(stream)
    cancellation.check_running()
    threading.Timer(0.05, stream.cancel).start()
    begun = time.monotonic()
    try:
        list(stream)
        raise AssertionError("the stream ended by itself")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.CANCELLED, error
    assert time.monotonic() - begun < 5
    cancellation.check_stopped()


check_services()
check_texts()
check_errors()
check_cancellation()
