// SPDX-License-Identifier: Apache-2.0

//! Memory of the router with many open streams.

use proto::v1::inference_client::InferenceClient;
use tonic::transport::Channel;

use crate::harness::api::runtime;
use crate::harness::lone_router::{LoneRouter, ReadStream};
use crate::harness::stepped_worker::IDLE_SALT;
use crate::harness::{proc, report_skipped};

const IDLE_STREAMS: usize = 2000;
const ACTIVE_STREAMS: usize = 512;
/// Half of the active streams are calls of gRPC, this many on each connection.
const CALLS_PER_CONNECTION: usize = 64;
const STEPS: usize = 16;
const MEMORY_MAX: u64 = 256 << 20;
/// All clients have the same address. The defaults are for 1,024 streams, half of them of one
/// address.
const LIMITS: &str = "streams-max = 4096\nconnections-max = 4096\naddress-connections-max = 4096\n";

/// Opens streams of server-sent events with a connection each.
async fn open_http(router: &LoneRouter, count: usize, salt: &str) -> Vec<ReadStream> {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let mut open = Vec::new();
    for number in 0..count {
        let path = if number % 2 == 0 { "/v1/completions" } else { "/v1/chat/completions" };
        open.push(ReadStream::Http(router.post(&client, path, 1 + STEPS as u32, salt).await));
    }
    open
}

/// Opens calls of gRPC on shared connections.
async fn open_grpc(router: &LoneRouter, count: usize) -> Vec<ReadStream> {
    let mut open = Vec::new();
    for _ in 0..count / CALLS_PER_CONNECTION {
        let mut client: InferenceClient<Channel> =
            InferenceClient::connect(router.url.clone()).await.unwrap();
        for _ in 0..CALLS_PER_CONNECTION {
            open.push(ReadStream::Grpc(router.generate(&mut client, 1 + STEPS as u32, "").await));
        }
    }
    open
}

#[test]
fn i7_two_thousand_idle_and_512_active_streams_fit_in_256_mib_of_the_router() {
    if !proc::allow_descriptors(8192) {
        return report_skipped(format_args!("this process may not open {IDLE_STREAMS} connections"));
    }
    let router = LoneRouter::start(LIMITS, |_| None);
    let empty = proc::resident_bytes(router.pid());
    runtime().block_on(async {
        let idle = open_http(&router, IDLE_STREAMS, IDLE_SALT).await;
        let with_idle = proc::resident_bytes(router.pid());
        let mut active = open_http(&router, ACTIVE_STREAMS / 2, "").await;
        active.extend(open_grpc(&router, ACTIVE_STREAMS / 2).await);
        for stream in &mut active {
            stream.token().await;
        }
        for _ in 0..STEPS {
            router.worker.step();
            for stream in &mut active {
                stream.token().await;
            }
        }
        let with_all = proc::resident_bytes(router.pid());
        let peak = proc::peak_resident_bytes(router.pid());
        let each = |bytes: u64, streams: usize| (bytes.saturating_sub(empty) / streams as u64) >> 10;
        eprintln!(
            "measured: the router has {} MiB without streams, {} MiB with {IDLE_STREAMS} idle ones ({} KiB each), \
             {} MiB with {ACTIVE_STREAMS} active ones too, peak {} MiB",
            empty >> 20,
            with_idle >> 20,
            each(with_idle, idle.len()),
            with_all >> 20,
            peak >> 20,
        );
        assert_eq!((idle.len(), active.len()), (IDLE_STREAMS, ACTIVE_STREAMS));
        assert!(peak <= MEMORY_MAX, "{} MiB", peak >> 20);
    });
}
