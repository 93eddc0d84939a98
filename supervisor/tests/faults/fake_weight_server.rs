// SPDX-License-Identifier: Apache-2.0

//! The part of the weight-server's admin service that the supervisor calls: tokens and loads,
//! without any weights.

use std::pin::Pin;
use std::sync::Mutex;

use anyhow::Result;
use proto::weights::v1::weight_server_server::{WeightServer, WeightServerServer};
use proto::weights::v1::*;
use service::RuntimeDir;
use tokio_stream::Stream;
use tonic::{Request, Response, Status as Refusal};

struct FakeWeightServer {
    refuses: bool,
    /// Models and devices.
    resident: Mutex<Vec<(String, String)>>,
}

pub(crate) fn serve(
    directory: &RuntimeDir,
    behaviour: &str,
) -> Result<impl Future<Output = ()> + Send + use<>> {
    let listener = service::grpc::bind(&directory.weights_admin_socket())?;
    let fake = FakeWeightServer { refuses: behaviour == "refuses-to-load", resident: Mutex::default() };
    let router = service::grpc::server().add_service(WeightServerServer::new(fake));
    Ok(async move {
        service::grpc::serve(router, listener, std::future::pending()).await.expect("admin service");
    })
}

fn generation(model: &str, device: &str) -> Generation {
    Generation {
        model: model.to_owned(),
        device: device.to_owned(),
        state: GenerationState::Ready.into(),
        ..Generation::default()
    }
}

type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Refusal>> + Send>>;

#[tonic::async_trait]
impl WeightServer for FakeWeightServer {
    type LoadStream = ResponseStream<LoadEvent>;

    async fn load(&self, request: Request<LoadRequest>) -> Result<Response<Self::LoadStream>, Refusal> {
        if self.refuses {
            return Err(Refusal::failed_precondition("tensor 3 lies outside the file"));
        }
        let LoadRequest { model, device, device_memory, .. } = request.into_inner();
        if device.starts_with("GPU-") && device_memory.is_none() {
            return Err(Refusal::unimplemented(format!("there is no device {device}")));
        }
        let generation = Some(generation(&model, &device));
        self.resident.lock().expect("lock").push((model, device));
        let waiting = load_event::Kind::Waiting(Waiting { done_bytes: 1, total_bytes: 2, jobs_ahead: 0 });
        let events = [waiting, load_event::Kind::Loaded(Loaded { generation, ..Loaded::default() })];
        let events = events.map(|kind| Ok(LoadEvent { kind: Some(kind) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(events))))
    }

    async fn unload(&self, request: Request<UnloadRequest>) -> Result<Response<UnloadResponse>, Refusal> {
        let name = request.into_inner().model;
        self.resident.lock().expect("lock").retain(|(model, _)| *model != name);
        Ok(Response::new(UnloadResponse::default()))
    }

    async fn get_status(&self, _: Request<GetStatusRequest>) -> Result<Response<Status>, Refusal> {
        let resident = self.resident.lock().expect("lock");
        let generations = resident.iter().map(|(model, device)| generation(model, device)).collect();
        Ok(Response::new(Status { generations, ..Status::default() }))
    }

    async fn forget_token(
        &self,
        _: Request<ForgetTokenRequest>,
    ) -> Result<Response<ForgetTokenResponse>, Refusal> {
        Ok(Response::new(ForgetTokenResponse {}))
    }

    async fn allow_token(
        &self,
        request: Request<AllowTokenRequest>,
    ) -> Result<Response<AllowTokenResponse>, Refusal> {
        match request.into_inner().token.len() {
            32 => Ok(Response::new(AllowTokenResponse {})),
            bytes => Err(Refusal::invalid_argument(format!("a token of {bytes} bytes"))),
        }
    }

    async fn verify(&self, request: Request<VerifyRequest>) -> Result<Response<VerifyResponse>, Refusal> {
        Err(Refusal::not_found(format!("{} is on no GPU", request.into_inner().model)))
    }

    type WatchEventsStream = ResponseStream<Event>;

    async fn watch_events(
        &self,
        _: Request<WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Refusal> {
        Ok(Response::new(Box::pin(tokio_stream::pending())))
    }
}
