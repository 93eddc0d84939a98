// SPDX-License-Identifier: Apache-2.0

//! The supervisor's question to the router: do you use all workers of a model?

use std::path::Path;
use std::time::Duration;

use proto::v1::ListModelsRequest;
use proto::v1::inference_client::InferenceClient;
use tonic::transport::Channel;

/// How long a started worker may take until the router uses it. Loading kernels and capturing
/// graphs of a large model takes seconds.
const JOIN_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Returns true when the router uses so many workers of the model, false if it does not in time.
pub(crate) async fn wait_until_used(router: &Path, model: &str, workers: usize) -> bool {
    let asked = async {
        let mut client = InferenceClient::new(service::grpc::connect_lazy(router).ok()?);
        loop {
            if count_used(&mut client, model).await.is_some_and(|used| used >= workers) {
                return Some(());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::time::timeout(JOIN_TIMEOUT, asked).await.is_ok_and(|used| used.is_some())
}

/// `None` while the router does not answer.
async fn count_used(client: &mut InferenceClient<Channel>, model: &str) -> Option<usize> {
    let models = client.list_models(ListModelsRequest {}).await.ok()?.into_inner().models;
    Some(models.iter().filter(|found| found.name == model).map(|found| found.workers as usize).sum())
}
