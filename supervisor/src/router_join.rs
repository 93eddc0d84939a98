// SPDX-License-Identifier: Apache-2.0

//! The supervisor's questions to the router: do you use all workers of a model, and does a request
//! still hold its old file?

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use proto::v1::inference_client::InferenceClient;
use proto::v1::{ListModelsRequest, Model};
use tonic::transport::Channel;

/// How long a started worker may take until the router uses it. Loading kernels and capturing
/// graphs of a large model takes seconds.
const JOIN_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Returns true when the router uses so many workers of the model, false if it does not in time.
pub(crate) async fn wait_until_used(router: &Path, name: &str, workers: usize) -> bool {
    let uses = |models: &[Model]| models.iter().map(|model| model.workers as usize).sum::<usize>() >= workers;
    wait_until(router, name, uses, JOIN_TIMEOUT).await
}

/// Returns true when the router uses so many workers with this content under the name, false if it
/// does not in time.
pub(crate) async fn wait_until_serves(router: &Path, name: &str, digest: &Bytes, workers: usize) -> bool {
    let digest = hex(digest);
    let serves = |models: &[Model]| {
        let of_content = models.iter().filter(|model| model.digest == digest);
        of_content.map(|model| model.workers as usize).sum::<usize>() >= workers
    };
    wait_until(router, name, serves, JOIN_TIMEOUT).await
}

/// Returns when new requests for the name go to this content and none holds another one, or after
/// `grace`.
pub(crate) async fn wait_until_moved(router: &Path, name: &str, digest: &Bytes, grace: Duration) {
    let digest = hex(digest);
    let is_free = |model: &Model| model.digest == digest || (model.requests == 0 && !model.is_current);
    wait_until(router, name, |models| models.iter().all(is_free), grace).await;
}

async fn wait_until(router: &Path, name: &str, is_so: impl Fn(&[Model]) -> bool, timeout: Duration) -> bool {
    let asked = async {
        let mut client = InferenceClient::new(service::grpc::connect_lazy(router).ok()?);
        loop {
            if let Some(mut models) = list(&mut client).await {
                models.retain(|model| model.name == name);
                if is_so(&models) {
                    return Some(());
                }
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::time::timeout(timeout, asked).await.is_ok_and(|so| so.is_some())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `None` while the router does not answer.
async fn list(client: &mut InferenceClient<Channel>) -> Option<Vec<Model>> {
    Some(client.list_models(ListModelsRequest {}).await.ok()?.into_inner().models)
}
