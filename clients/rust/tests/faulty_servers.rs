// SPDX-License-Identifier: Apache-2.0

//! Streams of servers that break the protocol or hang.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do: at once, saying where")]

use std::pin::Pin;
use std::time::{Duration, Instant};

use ballast_client::{BallastClient, ClientError, Finished, GenerateEvent, GenerateRequest, Started};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use proto::v1::generate_frame::Frame;
use proto::v1::inference_server::{Inference, InferenceServer};
use proto::v1::{self as wire, GenerateFrame};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

type FaultyFrames = Pin<Box<dyn Stream<Item = Result<GenerateFrame, Status>> + Send>>;

/// Sends `started`, `finished` for the first choice only, and then ends, or says no more.
struct FaultyServer {
    hangs: bool,
}

#[tonic::async_trait]
impl Inference for FaultyServer {
    type GenerateStream = FaultyFrames;

    async fn generate(
        &self,
        _: Request<wire::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let frames = [
            Some(Frame::Started(Started::default())),
            // What a later version may send.
            None,
            Some(Frame::Finished(Finished::default())),
        ];
        let frames = stream::iter(frames.map(|frame| Ok(GenerateFrame { frame })));
        Ok(Response::new(match self.hangs {
            true => Box::pin(frames.chain(stream::pending())),
            false => Box::pin(frames),
        }))
    }

    async fn tokenize(
        &self,
        _: Request<wire::TokenizeRequest>,
    ) -> Result<Response<wire::TokenizeReply>, Status> {
        Err(Status::data_loss("no tokens"))
    }

    async fn detokenize(
        &self,
        _: Request<wire::DetokenizeRequest>,
    ) -> Result<Response<wire::DetokenizeReply>, Status> {
        let mut status = Status::unavailable("later");
        status.metadata_mut().insert("retry-after", "7".parse().unwrap());
        Err(status)
    }

    async fn embed(&self, _: Request<wire::EmbedRequest>) -> Result<Response<wire::EmbedReply>, Status> {
        Err(Status::unimplemented("no vectors"))
    }

    async fn rerank(&self, _: Request<wire::RerankRequest>) -> Result<Response<wire::RerankReply>, Status> {
        Err(Status::unimplemented("no scores"))
    }

    async fn list_models(
        &self,
        _: Request<wire::ListModelsRequest>,
    ) -> Result<Response<wire::ListModelsReply>, Status> {
        std::future::pending().await
    }
}

async fn client_of(server: FaultyServer) -> BallastClient {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = Server::builder().add_service(InferenceServer::new(server));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    BallastClient::builder(url).connect().await.unwrap()
}

#[tokio::test]
async fn a_stream_without_the_end_of_each_choice_is_an_error() {
    let client = client_of(FaultyServer { hangs: false }).await;
    let whole = client.complete(GenerateRequest::text("x")).await.unwrap();
    assert_eq!(whole.choices.len(), 1);
    let mut events = client.generate(GenerateRequest::text("x").choices(3)).await.unwrap();
    assert!(matches!(events.try_next().await, Ok(Some(GenerateEvent::Started(_)))));
    assert!(matches!(events.try_next().await, Ok(Some(GenerateEvent::Finished(_)))));
    assert!(matches!(events.try_next().await, Err(ClientError::Incomplete { unfinished: 2 })));
    assert!(events.next().await.is_none(), "an error is the last item");
}

#[tokio::test]
async fn the_deadline_ends_the_stream_of_a_server_that_hangs() {
    let client = client_of(FaultyServer { hangs: true }).await;
    let begun = Instant::now();
    let request = GenerateRequest::text("x").choices(2).deadline(Duration::from_millis(200));
    let error = client.complete(request).await.unwrap_err();
    assert!(matches!(error, ClientError::DeadlineExceeded { .. }), "{error:?}");
    assert!(begun.elapsed() >= Duration::from_millis(200), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn statuses_become_errors_with_their_fields() {
    let client = client_of(FaultyServer { hangs: false }).await;
    let error = client.detokenize("", [1]).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(Duration::from_secs(7)));
    assert!(matches!(&error, ClientError::Unavailable { message, .. } if message == "later"), "{error:?}");
    let error = client.tokenize("", "x").await.unwrap_err();
    assert!(matches!(error, ClientError::Server { code: tonic::Code::DataLoss, .. }), "{error:?}");
}
