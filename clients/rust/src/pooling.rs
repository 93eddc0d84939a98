// SPDX-License-Identifier: Apache-2.0

//! Embeddings and reranking: requests, built field by field.

use proto::v1 as wire;

/// A request of [`crate::BallastClient::embed`].
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct EmbeddingRequest {
    pub(crate) wire: wire::EmbedRequest,
}

/// A request of [`crate::BallastClient::rerank`].
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct RerankRequest {
    pub(crate) wire: wire::RerankRequest,
}

/// One vector for each input.
#[derive(Clone, Debug, PartialEq)]
pub struct Embeddings {
    pub vectors: Vec<Vec<f32>>,
    pub prompt_tokens: u32,
}

/// Documents, the best first.
#[derive(Clone, Debug, PartialEq)]
pub struct Reranked {
    pub results: Vec<RerankedDocument>,
    pub prompt_tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RerankedDocument {
    /// Among the documents of the request.
    pub index: usize,
    /// From a classifier 0 to 1, from embeddings the cosine of the angle between them.
    pub score: f64,
}

impl EmbeddingRequest {
    pub fn texts<T: Into<String>>(texts: impl IntoIterator<Item = T>) -> Self {
        Self::new(texts.into_iter().map(|text| wire::embed_input::Input::Text(text.into())))
    }

    /// Token ids, which are used without change.
    pub fn tokens<T: Into<Vec<u32>>>(inputs: impl IntoIterator<Item = T>) -> Self {
        let tokens = |ids: T| wire::embed_input::Input::Tokens(wire::TokenIds { ids: ids.into() });
        Self::new(inputs.into_iter().map(tokens))
    }

    fn new(inputs: impl Iterator<Item = wire::embed_input::Input>) -> Self {
        let inputs = inputs.map(|input| wire::EmbedInput { input: Some(input) }).collect();
        Self { wire: wire::EmbedRequest { inputs, ..wire::EmbedRequest::default() } }
    }

    /// Needed if the fleet serves several models.
    pub fn model(mut self, name: impl Into<String>) -> Self {
        self.wire.model = name.into();
        self
    }

    /// Shorter vectors: the first values, normalized.
    pub fn dimensions(mut self, values: u32) -> Self {
        self.wire.dimensions = Some(values);
        self
    }

    /// Cuts longer inputs to this many tokens.
    pub fn truncate_tokens(mut self, tokens: u32) -> Self {
        self.wire.truncate_tokens = Some(tokens);
        self
    }

    /// Leaves the vectors as the model gives them.
    pub fn without_normalization(mut self) -> Self {
        self.wire.no_normalize = true;
        self
    }
}

impl RerankRequest {
    pub fn new<T: Into<String>>(query: impl Into<String>, documents: impl IntoIterator<Item = T>) -> Self {
        let documents = documents.into_iter().map(Into::into).collect();
        Self {
            wire: wire::RerankRequest { query: query.into(), documents, ..wire::RerankRequest::default() },
        }
    }

    /// Needed if the fleet serves several models.
    pub fn model(mut self, name: impl Into<String>) -> Self {
        self.wire.model = name.into();
        self
    }

    /// Asks for the best documents only.
    pub fn top_n(mut self, documents: u32) -> Self {
        self.wire.top_n = documents;
        self
    }

    /// Cuts longer texts to this many tokens.
    pub fn truncate_tokens(mut self, tokens: u32) -> Self {
        self.wire.truncate_tokens = Some(tokens);
        self
    }
}

impl From<wire::EmbedReply> for Embeddings {
    fn from(reply: wire::EmbedReply) -> Self {
        let vectors = reply.embeddings.into_iter().map(|embedding| embedding.values).collect();
        Self { vectors, prompt_tokens: reply.prompt_tokens }
    }
}

impl From<wire::RerankReply> for Reranked {
    fn from(reply: wire::RerankReply) -> Self {
        let document = |result: wire::RerankResult| RerankedDocument {
            index: result.index as usize,
            score: result.relevance_score,
        };
        Self {
            results: reply.results.into_iter().map(document).collect(),
            prompt_tokens: reply.prompt_tokens,
        }
    }
}
