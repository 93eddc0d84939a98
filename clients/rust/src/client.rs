// SPDX-License-Identifier: Apache-2.0

//! The calls.

use proto::v1::inference_client::InferenceClient;
use proto::v1::{DetokenizeRequest, ListModelsRequest, Model, TokenizeRequest};
use tokio::time::Instant;
use tonic::Request;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::completion::Completion;
use crate::connect::{ClientBuilder, KeyedChannel};
use crate::error::ClientError;
use crate::generate_stream::GenerateStream;
use crate::pooling::{EmbeddingRequest, Embeddings, RerankRequest, Reranked};
use crate::request::GenerateRequest;

/// The first frame repeats the tokens of the prompt, and a reply has 4,194,304 values of
/// embeddings. Both may exceed tonic's 4 MiB.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// The name under which the router reports its health.
const HEALTH_SERVICE: &str = "ballast.v1.Inference";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServingHealth {
    /// A worker of some model is ready.
    Serving,
    NotServing,
}

/// A connection to one server. Clones share it.
#[derive(Clone, Debug)]
pub struct BallastClient {
    inference: InferenceClient<KeyedChannel>,
    health: HealthClient<KeyedChannel>,
}

impl BallastClient {
    /// `url`: `http://HOST:PORT`, `https://HOST:PORT` with [`ClientBuilder::tls`], or `unix:PATH`.
    pub fn builder(url: impl Into<String>) -> ClientBuilder {
        ClientBuilder::new(url.into())
    }

    pub(crate) fn new(channel: KeyedChannel) -> Self {
        let inference = InferenceClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        Self { inference, health: HealthClient::new(channel) }
    }

    /// Starts a request. It has left the queue when this returns.
    pub async fn generate(&self, request: GenerateRequest) -> Result<GenerateStream, ClientError> {
        let GenerateRequest { wire, deadline } = request;
        let choices = wire.n.max(1);
        let mut call = Request::new(wire);
        let ends = deadline.map(|deadline| {
            call.set_timeout(deadline);
            Instant::now() + deadline
        });
        let frames = self.inference.clone().generate(call).await?.into_inner();
        Ok(GenerateStream::new(frames, choices, ends))
    }

    /// Reads a request to its end.
    pub async fn complete(&self, request: GenerateRequest) -> Result<Completion, ClientError> {
        let choices = request.wire.n.max(1);
        Completion::read(self.generate(request).await?, choices).await
    }

    /// One vector for each input, in their order. [`ClientError::InvalidRequest`] if the model
    /// makes no embeddings.
    pub async fn embed(&self, request: EmbeddingRequest) -> Result<Embeddings, ClientError> {
        Ok(self.inference.clone().embed(request.wire).await?.into_inner().into())
    }

    /// Scores documents by how well they answer a query.
    pub async fn rerank(&self, request: RerankRequest) -> Result<Reranked, ClientError> {
        Ok(self.inference.clone().rerank(request.wire).await?.into_inner().into())
    }

    /// The token ids of a text, with the special tokens that the model puts around a text. `model`
    /// may be empty if the fleet serves one model.
    pub async fn tokenize(
        &self,
        model: impl Into<String>,
        text: impl Into<String>,
    ) -> Result<Vec<u32>, ClientError> {
        let request = TokenizeRequest { model: model.into(), text: text.into(), no_special: false };
        Ok(self.inference.clone().tokenize(request).await?.into_inner().tokens)
    }

    pub async fn detokenize(
        &self,
        model: impl Into<String>,
        tokens: impl Into<Vec<u32>>,
    ) -> Result<String, ClientError> {
        let request = DetokenizeRequest { model: model.into(), tokens: tokens.into() };
        Ok(self.inference.clone().detokenize(request).await?.into_inner().text)
    }

    pub async fn models(&self) -> Result<Vec<Model>, ClientError> {
        Ok(self.inference.clone().list_models(ListModelsRequest {}).await?.into_inner().models)
    }

    pub async fn health(&self) -> Result<ServingHealth, ClientError> {
        let request = HealthCheckRequest { service: HEALTH_SERVICE.to_owned() };
        let reply = self.health.clone().check(request).await?.into_inner();
        Ok(match reply.status() {
            ServingStatus::Serving => ServingHealth::Serving,
            _ => ServingHealth::NotServing,
        })
    }
}
