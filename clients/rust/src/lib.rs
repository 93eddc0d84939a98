// SPDX-License-Identifier: Apache-2.0

//! A typed client of Ballast's public gRPC API, `ballast.v1`.
//!
//! ```no_run
//! use ballast_client::{BallastClient, ClientError, GenerateEvent, GenerateRequest};
//! use futures::TryStreamExt;
//!
//! # async fn print() -> Result<(), ClientError> {
//! let client = BallastClient::builder("http://127.0.0.1:8080").connect().await?;
//! let request = GenerateRequest::text("def fibonacci(n):\n").max_tokens(64).temperature(0.0);
//! let mut events = client.generate(request).await?;
//! while let Some(event) = events.try_next().await? {
//!     if let GenerateEvent::Delta(delta) = event {
//!         print!("{}", delta.text);
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! 1. Dropping an [`GenerateStream`] cancels its request in the worker.
//! 2. A stream that ends without an error has the end of each choice.
//! 3. No call is repeated: [`ClientError::retry_after`] says when the server can take it.

#![forbid(unsafe_code)]

mod client;
mod completion;
mod connect;
mod error;
mod generate_stream;
mod pooling;
mod request;

pub use client::{BallastClient, ServingHealth};
pub use completion::{CompletedChoice, Completion};
pub use connect::{ClientBuilder, ClientTls};
pub use error::ClientError;
pub use generate_stream::{GenerateEvent, GenerateStream};
pub use pooling::{EmbeddingRequest, Embeddings, RerankRequest, Reranked, RerankedDocument};
pub use proto::v1::{FinishReason, Finished, Model, OutputDelta, Sampling, Started, TokenLogprob, Usage};
pub use request::{GenerateRequest, OutputGrammar};
