// SPDX-License-Identifier: Apache-2.0

//! A client of the public gRPC API, with helpers for tests.

use proto::v1::generate_frame::Frame;
use proto::v1::generate_request::Prompt;
use proto::v1::grammar::Kind;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{GenerateFrame, GenerateRequest, Grammar, Sampling, TokenIds};
use tonic::transport::Channel;

use super::{STREAM_TIMEOUT, ServedFleet, TIMEOUT};

/// The output of one request, with its choices concatenated. Log probabilities are stored as bits,
/// so that comparison is exact.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Continuation {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprob_bits: Vec<u32>,
    pub(crate) text: String,
    pub(crate) resumes: u32,
}

/// One request of a test.
#[derive(Debug, Clone, Default)]
pub(crate) struct TestRequest {
    /// May be empty if the fleet serves one model.
    pub(crate) model: String,
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_tokens: u32,
    pub(crate) temperature: f32,
    pub(crate) seed: u64,
    /// Further sampling parameters.
    pub(crate) sampling: Sampling,
    /// Do not request log probabilities.
    pub(crate) without_logprobs: bool,
    /// Log probabilities of other tokens at each position.
    pub(crate) top_logprobs: u32,
    pub(crate) cache_salt: String,
    /// Number of choices; 0 means 1.
    pub(crate) choices: u32,
    /// Grammar of the output. With a grammar, the output may end early; without, it has
    /// `max_tokens` tokens.
    pub(crate) grammar: Option<Kind>,
    pub(crate) priority: i32,
}

impl TestRequest {
    pub(crate) fn request(&self) -> GenerateRequest {
        GenerateRequest {
            model: self.model.clone(),
            prompt: Some(Prompt::Tokens(TokenIds { ids: self.prompt.clone() })),
            max_tokens: self.max_tokens,
            sampling: Some(Sampling {
                temperature: Some(self.temperature),
                seed: Some(self.seed),
                ..self.sampling.clone()
            }),
            ignore_eos: self.grammar.is_none(),
            grammar: self.grammar.clone().map(|kind| Grammar { kind: Some(kind), ..Grammar::default() }),
            n: self.choices,
            priority: self.priority,
            top_logprobs: (!self.without_logprobs).then_some(self.top_logprobs),
            cache_salt: self.cache_salt.clone(),
            ..GenerateRequest::default()
        }
    }
}

pub(crate) async fn connect(url: &str) -> InferenceClient<Channel> {
    InferenceClient::connect(url.to_owned()).await.unwrap()
}

/// Runs one request to its end. Calls `on_token` with the number of tokens so far, over all
/// choices.
pub(crate) async fn generate(
    client: &mut InferenceClient<Channel>,
    request: &TestRequest,
    on_token: impl FnMut(usize),
) -> Result<Continuation, tonic::Status> {
    let stream = client.generate(request.request()).await?.into_inner();
    read(stream, request, on_token).await
}

/// Reads a stream of this request to its end.
pub(crate) async fn read(
    mut stream: tonic::Streaming<GenerateFrame>,
    request: &TestRequest,
    mut on_token: impl FnMut(usize),
) -> Result<Continuation, tonic::Status> {
    let mut choices = vec![Continuation::default(); request.choices.max(1) as usize];
    let (mut tokens, mut finished) = (0, 0);
    while let Some(frame) = stream.message().await? {
        match frame.frame {
            Some(Frame::Delta(piece)) => {
                let done = &mut choices[piece.choice as usize];
                tokens += piece.tokens.len();
                done.tokens.extend(piece.tokens);
                done.logprob_bits.extend(piece.logprobs.iter().map(|l| l.logprob.to_bits()));
                done.text.push_str(&piece.text);
                on_token(tokens);
            }
            Some(Frame::Finished(end)) => {
                choices[end.choice as usize].resumes = end.usage.map_or(0, |usage| usage.resumes);
                finished += 1;
            }
            Some(Frame::Started(_)) | None => {}
        }
    }
    // Invariant I6: no stream ends without a final frame or an error.
    if finished < choices.len() {
        return Err(tonic::Status::data_loss("the stream ended without a finished frame"));
    }
    Ok(choices.into_iter().fold(Continuation::default(), |mut all, choice| {
        all.tokens.extend(choice.tokens);
        all.logprob_bits.extend(choice.logprob_bits);
        all.text.push_str(&choice.text);
        all.resumes += choice.resumes;
        all
    }))
}

/// Runs all requests concurrently. The results have the order of the requests.
pub(crate) async fn generate_all(
    url: &str,
    requests: &[TestRequest],
) -> Vec<Result<Continuation, tonic::Status>> {
    let client = connect(url).await;
    let tasks: Vec<_> = requests
        .iter()
        .map(|request| {
            let (mut client, request) = (client.clone(), request.clone());
            tokio::spawn(async move { generate(&mut client, &request, |_| {}).await })
        })
        .collect();
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.unwrap());
    }
    results
}

impl ServedFleet {
    /// Runs the requests concurrently, and calls `inject_fault` after the first tokens of some
    /// stream. The results have the order of the requests.
    pub(crate) async fn generate_during_fault(
        &self,
        requests: &[TestRequest],
        inject_fault: impl FnOnce() + Send,
    ) -> Vec<Result<Continuation, tonic::Status>> {
        let (started, mut any_started) = tokio::sync::mpsc::unbounded_channel();
        let client = connect(&self.grpc).await;
        let tasks: Vec<_> = requests
            .iter()
            .map(|request| {
                let (mut client, request, started) = (client.clone(), request.clone(), started.clone());
                tokio::spawn(async move {
                    generate(&mut client, &request, |tokens| {
                        if tokens >= 3 {
                            let _ = started.send(());
                        }
                    })
                    .await
                })
            })
            .collect();
        tokio::time::timeout(TIMEOUT, any_started.recv()).await.expect("a stream starts in time");
        tokio::task::block_in_place(inject_fault);
        let mut results = Vec::new();
        for task in tasks {
            let result = tokio::time::timeout(STREAM_TIMEOUT, task).await;
            results.push(result.expect("the stream ends in time").unwrap());
        }
        results
    }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}
