// SPDX-License-Identifier: Apache-2.0

//! The administrative sockets of a fleet: the weight-server's status and the workers' statistics.

use proto::fleet::v1::fleet_client::FleetClient;
use proto::fleet::v1::{DeviceReport, ReportDevicesRequest};
use proto::weights::v1::weight_server_client::WeightServerClient;
use proto::weights::v1::{GetStatusRequest, Status};
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{GetMetadataRequest, StatsReply, StatsRequest, metadata_frame::Frame};

use super::ServedFleet;

pub(crate) async fn weight_server_status(fleet: &ServedFleet) -> Status {
    try_weight_server_status(fleet).await.unwrap()
}

/// `None` while the weight-server restarts.
pub(crate) async fn try_weight_server_status(fleet: &ServedFleet) -> Option<Status> {
    let channel = service::grpc::connect(&fleet.runtime_dir().join("weights-admin.sock")).await.ok()?;
    Some(WeightServerClient::new(channel).get_status(GetStatusRequest {}).await.ok()?.into_inner())
}

/// Tells the supervisor what a device monitor would.
pub(crate) async fn report_device(fleet: &ServedFleet, report: DeviceReport) {
    let channel = service::grpc::connect(&fleet.runtime_dir().join("supervisor.sock")).await.unwrap();
    let request = ReportDevicesRequest { devices: vec![report] };
    FleetClient::new(channel).report_devices(request).await.unwrap();
}

/// Statistics of the fleet's first worker.
pub(crate) async fn worker_stats(fleet: &ServedFleet) -> StatsReply {
    let socket = service::RuntimeDir::at(fleet.runtime_dir()).worker_socket(0);
    let channel = service::grpc::connect(&socket).await.unwrap();
    WorkerClient::new(channel).stats(StatsRequest {}).await.unwrap().into_inner()
}

/// What requests to the fleet's first worker must name.
pub(crate) async fn worker_fingerprint(fleet: &ServedFleet) -> bytes::Bytes {
    let socket = service::RuntimeDir::at(fleet.runtime_dir()).worker_socket(0);
    let mut client = WorkerClient::new(service::grpc::connect(&socket).await.unwrap());
    let mut frames = client.get_metadata(GetMetadataRequest {}).await.unwrap().into_inner();
    match frames.message().await.unwrap().unwrap().frame.unwrap() {
        Frame::Description(description) => description.fingerprint,
        Frame::Gguf(_) => panic!("the first frame is the description"),
    }
}
