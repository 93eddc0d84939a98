// SPDX-License-Identifier: Apache-2.0

//! `ballast.v1.Inference`, over TCP on the HTTP port and over `router.sock`.

use proto::v1::{self as wire, generate_frame, generate_request};
use tonic::Code;

use crate::fake_worker::{CONTEXT_TOKENS, FakeBehaviour, token_ids_of};
use crate::figures::{FIGURES, NO_NUMBERS};
use crate::harness::RouterHarness;

const TEXT: &str = "return 🙂 a + b\n";

fn request(prompt: generate_request::Prompt) -> wire::GenerateRequest {
    wire::GenerateRequest { prompt: Some(prompt), max_tokens: 99, ..Default::default() }
}

async fn frames(
    client: &mut proto::v1::inference_client::InferenceClient<tonic::transport::Channel>,
    request: wire::GenerateRequest,
) -> Vec<generate_frame::Frame> {
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let mut frames = Vec::new();
    while let Some(frame) = stream.message().await.unwrap() {
        frames.push(frame.frame.unwrap());
    }
    frames
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generation_has_token_ids_text_and_usage() {
    let script = token_ids_of(TEXT);
    let fleet =
        RouterHarness::start(&script, &[FakeBehaviour { frame_tokens: 2, ..FakeBehaviour::default() }]).await;
    for mut client in [fleet.grpc().await, fleet.grpc_on_socket().await] {
        let mut request = request(generate_request::Prompt::Text("def f(a, b):\n".into()));
        request.n = 2;
        request.sampling = Some(wire::Sampling { seed: Some(11), ..Default::default() });
        let frames = frames(&mut client, request).await;
        let generate_frame::Frame::Started(started) = &frames[0] else { panic!("{frames:?}") };
        assert_eq!((started.seed, started.model.as_str()), (11, "demo"));
        let call = fleet.workers[0].calls().pop().unwrap();
        assert_eq!(started.prompt_tokens, call.tokens);
        for choice in 0..2 {
            let mut tokens = Vec::new();
            let mut text = String::new();
            let mut finished = None;
            for frame in &frames {
                match frame {
                    generate_frame::Frame::Delta(delta) if delta.choice == choice => {
                        assert!(finished.is_none());
                        tokens.extend_from_slice(&delta.tokens);
                        text.push_str(&delta.text);
                    }
                    generate_frame::Frame::Finished(end) if end.choice == choice => {
                        finished = Some(end.clone())
                    }
                    _ => {}
                }
            }
            assert_eq!((tokens, text.as_str()), (script.clone(), TEXT));
            let finished = finished.unwrap();
            assert_eq!(finished.reason(), wire::FinishReason::Stop);
            let usage = finished.usage.unwrap();
            assert_eq!(usage.prompt_tokens as usize, call.tokens.len());
            assert_eq!((usage.completion_tokens as usize, usage.cached_tokens), (script.len(), 3));
            assert!(usage.total_ms >= usage.first_token_ms && usage.first_token_ms > 0.0);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokenize_and_detokenize_are_inverse() {
    let fleet = RouterHarness::start(&[], &[FakeBehaviour::default()]).await;
    let mut client = fleet.grpc().await;
    let text = "x = \"日本\"".to_owned();
    let request = wire::TokenizeRequest { model: "demo".into(), text: text.clone(), no_special: true };
    let tokens = client.tokenize(request).await.unwrap().into_inner().tokens;
    assert_eq!(tokens, token_ids_of(&text));
    let request = wire::DetokenizeRequest { model: String::new(), tokens };
    assert_eq!(client.detokenize(request).await.unwrap().into_inner().text, text);
    let models = client.list_models(wire::ListModelsRequest {}).await.unwrap().into_inner().models;
    assert_eq!((models[0].name.as_str(), models[0].workers), ("demo", 1));
    assert_eq!(models[0].digest, "07".repeat(32));
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_are_statuses_before_the_first_frame() {
    let full = FakeBehaviour { refuse: Some((Code::ResourceExhausted, "full")), ..FakeBehaviour::default() };
    let fleet = RouterHarness::start(&[], &[full]).await;
    let mut client = fleet.grpc().await;
    let prompt = || generate_request::Prompt::Text("x".into());
    let status = client.generate(request(prompt())).await.unwrap_err();
    assert_eq!(
        (status.code(), status.metadata().get("retry-after").unwrap().to_str().unwrap()),
        (Code::Unavailable, crate::fake_worker::RETRY_AFTER)
    );
    let unknown = wire::GenerateRequest { model: "no".into(), ..request(prompt()) };
    assert_eq!(client.generate(unknown).await.unwrap_err().code(), Code::NotFound);
    let status = client.generate(wire::GenerateRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let hot = wire::GenerateRequest {
        sampling: Some(wire::Sampling { temperature: Some(9.0), ..Default::default() }),
        ..request(prompt())
    };
    let status = client.generate(hot).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("temperature"), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn values_out_of_range_are_refused_by_name_before_a_worker_is_called() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    let mut client = fleet.grpc().await;
    for &(name, change) in FIGURES {
        for value in NO_NUMBERS.into_iter().chain([1e9, -1e9]) {
            let mut sampling = wire::Sampling::default();
            change(&mut sampling, value);
            let request = wire::GenerateRequest {
                sampling: Some(sampling),
                ..request(generate_request::Prompt::Text("x".into()))
            };
            let status = client.generate(request).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{name} {value}: {status}");
            let message = status.message();
            assert!(message.contains(name) && message.contains("allowed"), "{name} {value}: {message}");
        }
    }
    assert!(fleet.workers[0].calls().is_empty(), "no worker was called");
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_lengths_are_refused_with_the_numbers_before_a_worker_is_called() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    let mut client = fleet.grpc().await;
    let good = request(generate_request::Prompt::Text("x".into()));
    let tokens =
        |count: u32| generate_request::Prompt::Tokens(wire::TokenIds { ids: vec![1; count as usize] });
    let context = CONTEXT_TOKENS.to_string();
    for (words, request) in [
        (vec!["context", &context, "tokens of prompt"], request(tokens(CONTEXT_TOKENS))),
        (vec!["context", &context], request(tokens(CONTEXT_TOKENS + 1))),
        (
            vec!["context", &context, "of output"],
            wire::GenerateRequest { max_tokens: CONTEXT_TOKENS, ..good.clone() },
        ),
        (vec!["context", &context], wire::GenerateRequest { max_tokens: u32::MAX, ..good.clone() }),
        (
            vec!["min_tokens", "4", "allowed"],
            wire::GenerateRequest { max_tokens: 3, min_tokens: 4, ..good.clone() },
        ),
        (vec!["n", "17", "allowed", "16"], wire::GenerateRequest { n: 17, ..good.clone() }),
        (
            vec!["top_logprobs", "21", "allowed", "20"],
            wire::GenerateRequest { top_logprobs: Some(21), ..good.clone() },
        ),
        (vec!["empty"], request(tokens(0))),
    ] {
        let status = client.generate(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        for word in words {
            assert!(status.message().contains(word), "{status} lacks {word}");
        }
    }
    assert!(fleet.workers[0].calls().is_empty(), "no worker was called");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_in_metadata_or_message_reaches_the_worker() {
    let fleet = RouterHarness::start(&token_ids_of("x"), &[FakeBehaviour::default()]).await;
    let mut client = fleet.grpc().await;
    let request_with_deadline = |deadline_ms| wire::GenerateRequest {
        deadline_ms,
        ..request(generate_request::Prompt::Tokens(wire::TokenIds { ids: vec![1] }))
    };
    for (deadline_ms, timeout_s) in [(9_000, None), (0, Some(9)), (90_000, Some(9)), (9_000, Some(90))] {
        let mut call = tonic::Request::new(request_with_deadline(deadline_ms));
        if let Some(seconds) = timeout_s {
            call.set_timeout(std::time::Duration::from_secs(seconds));
        }
        client.generate(call).await.unwrap();
        let left = fleet.workers[0].calls().pop().unwrap().deadline_ms;
        assert!((1..=9_000).contains(&left), "{left} ms left of {deadline_ms} ms and {timeout_s:?} s");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn health_and_reflection_are_served() {
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    let fleet = RouterHarness::start(&[], &[FakeBehaviour::default()]).await;
    let channel =
        tonic::transport::Endpoint::from_shared(fleet.url.clone()).unwrap().connect().await.unwrap();
    let mut health = HealthClient::new(channel.clone());
    let request = || HealthCheckRequest { service: "ballast.v1.Inference".into() };
    assert_eq!(health.check(request()).await.unwrap().into_inner().status, 1);
    fleet.workers[0].kill();
    fleet.wait_for_workers(0).await;
    assert_eq!(health.check(request()).await.unwrap().into_inner().status, 2);

    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::{ServerReflectionRequest, server_reflection_request::MessageRequest};
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::FileContainingSymbol("ballast.v1.Inference".into())),
    };
    let mut reflection = ServerReflectionClient::new(channel);
    let mut answer =
        reflection.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
    let answer = answer.message().await.unwrap().unwrap().message_response.unwrap();
    assert!(format!("{answer:?}").contains("FileDescriptorResponse"), "{answer:?}");
}
