//! The public gRPC API, as a client of another team would use it, with blocking calls for tests.

use proto::v1::generate_frame::Frame;
use proto::v1::generate_request::Prompt;
use proto::v1::grammar::Kind;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{GenerateRequest, Grammar, Sampling, TokenIds};
use tonic::transport::Channel;

use super::{TIMEOUT, TestFleet};

/// What one request produced, its choices one behind the other. Log probabilities as bits: equal means equal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Continuation {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprob_bits: Vec<u32>,
    pub(crate) text: String,
    pub(crate) resumes: u32,
}

/// What is asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct TestRequest {
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_tokens: u32,
    pub(crate) temperature: f32,
    pub(crate) seed: u64,
    /// What else is said about drawing tokens.
    pub(crate) sampling: Sampling,
    /// Log probabilities are not wanted.
    pub(crate) without_logprobs: bool,
    /// Continuations of the prompt; 0 means 1.
    pub(crate) choices: u32,
    /// What the output must be. It ends there, or at `max_tokens`; any other goes on to `max_tokens`.
    pub(crate) grammar: Option<Kind>,
    pub(crate) priority: i32,
}

impl TestRequest {
    fn request(&self) -> GenerateRequest {
        GenerateRequest {
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
            top_logprobs: (!self.without_logprobs).then_some(0),
            ..GenerateRequest::default()
        }
    }
}

pub(crate) async fn connect(url: &str) -> InferenceClient<Channel> {
    InferenceClient::connect(url.to_owned()).await.unwrap()
}

/// Runs one request to its end. `on_token` sees the number of tokens so far, of all choices together.
pub(crate) async fn generate(
    client: &mut InferenceClient<Channel>,
    ask: &TestRequest,
    mut on_token: impl FnMut(usize),
) -> Result<Continuation, tonic::Status> {
    let mut stream = client.generate(ask.request()).await?.into_inner();
    let mut choices = vec![Continuation::default(); ask.choices.max(1) as usize];
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
    // Invariant I6: no stream ends without saying so.
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

/// All requests at once, results in the order of the requests.
pub(crate) async fn generate_all(
    url: &str,
    asks: &[TestRequest],
) -> Vec<Result<Continuation, tonic::Status>> {
    let client = connect(url).await;
    let tasks: Vec<_> = asks
        .iter()
        .map(|ask| {
            let (mut client, ask) = (client.clone(), ask.clone());
            tokio::spawn(async move { generate(&mut client, &ask, |_| {}).await })
        })
        .collect();
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.unwrap());
    }
    results
}

impl TestFleet {
    /// Runs the asks, and does `inject_fault` when some stream has had its first tokens. Results in the order of the asks.
    pub(crate) async fn generate_during_fault(
        &self,
        asks: &[TestRequest],
        inject_fault: impl FnOnce() + Send,
    ) -> Vec<Result<Continuation, tonic::Status>> {
        let (started, mut any_started) = tokio::sync::mpsc::unbounded_channel();
        let client = connect(&self.grpc).await;
        let tasks: Vec<_> = asks
            .iter()
            .map(|ask| {
                let (mut client, ask, started) = (client.clone(), ask.clone(), started.clone());
                tokio::spawn(async move {
                    generate(&mut client, &ask, |tokens| {
                        if tokens >= 3 {
                            let _ = started.send(());
                        }
                    })
                    .await
                })
            })
            .collect();
        tokio::time::timeout(TIMEOUT, any_started.recv()).await.expect("no stream started");
        tokio::task::block_in_place(inject_fault);
        let mut results = Vec::new();
        for task in tasks {
            results.push(tokio::time::timeout(TIMEOUT, task).await.expect("a stream hangs").unwrap());
        }
        results
    }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}
