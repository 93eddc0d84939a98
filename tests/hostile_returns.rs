// SPDX-License-Identifier: Apache-2.0

//! Claims of leases that the weight-server has lost, from peers that return something else than
//! weights, nothing, or too much.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use bytes::Bytes;
use handoff::manifest::seal_manifest;
use handoff::seqpacket::{Connection, FrameError};
use memory::manifest::{Allocation, LAYOUT_GGML, Manifest, ManifestDevice, TensorEntry};
use memory::memfd::SealedMemfd;
use proto::weights::v1::weight_server_client::WeightServerClient;
use proto::weights::v1::{
    FdBatch, GenerationIntegrity, GetStatusRequest, Reclaim, RefusalReason, ServerFrame, Status, WorkerFrame,
    server_frame, worker_frame,
};

use crate::harness::api::runtime;
use crate::harness::{ballast, eventually, proc};

/// The weight-server gives a silent peer 10 s.
const PATIENCE: Duration = Duration::from_secs(25);

/// A weight-server without a supervisor, which requires no tokens.
struct LoneWeightServer {
    process: Child,
    directory: tempfile::TempDir,
}

impl LoneWeightServer {
    fn start() -> Self {
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        let config = directory.path().join("weight-server.toml");
        std::fs::write(&config, format!("runtime-dir = {:?}\n", directory.path())).unwrap();
        let process = ballast().args(["weight-server", "--config"]).arg(&config).spawn().unwrap();
        let socket = directory.path().join("weights-admin.sock");
        eventually("the weight-server serves", || socket.exists().then_some(()));
        Self { process, directory }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn status(&self) -> Status {
        runtime().block_on(async {
            let channel = service::grpc::connect(&self.path().join("weights-admin.sock")).await.unwrap();
            WeightServerClient::new(channel).get_status(GetStatusRequest {}).await.unwrap().into_inner()
        })
    }

    /// Claims lease 7 of generation 3.
    fn claim(&self, fds: u32) -> Connection {
        self.claim_of(fds, 0)
    }

    fn claim_of(&self, fds: u32, manifest_inode: u64) -> Connection {
        let connection = Connection::connect(&self.path().join("weights.sock")).unwrap();
        connection.set_timeouts(Some(PATIENCE), Some(PATIENCE)).unwrap();
        let claim = Reclaim {
            protocol: handoff::PROTOCOL_VERSION,
            generation: 3,
            lease: 7,
            token: Bytes::new(),
            digest: Bytes::from_static(&[9; 32]),
            device: "host".to_owned(),
            kv_bytes: 1 << 20,
            workspace_bytes: 1 << 20,
            fds,
            manifest_inode,
        };
        connection.send(&WorkerFrame { kind: Some(worker_frame::Kind::Reclaim(claim)) }, &[]).unwrap();
        connection
    }

    /// A claim that is asked for its descriptors. It is repeated until the server has noticed that
    /// the claimant before has gone.
    fn requested_claim(&self, fds: u32, manifest_inode: u64) -> Connection {
        eventually("the claim is asked for its descriptors", || {
            let connection = self.claim_of(fds, manifest_inode);
            match receive(&connection).unwrap() {
                server_frame::Kind::Refused(refused) if refused.reason() == RefusalReason::Busy => None,
                server_frame::Kind::ReturnRequested(_) => Some(connection),
                other => panic!("{other:?}"),
            }
        })
    }

    fn open_files(&self) -> usize {
        proc::open_files(self.process.id()).len()
    }
}

impl Drop for LoneWeightServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn receive(connection: &Connection) -> Result<server_frame::Kind, FrameError> {
    connection.receive::<ServerFrame>().map(|(frame, _)| frame.kind.unwrap())
}

#[track_caller]
fn expect_request(connection: &Connection) {
    let answer = receive(connection).unwrap();
    assert!(matches!(answer, server_frame::Kind::ReturnRequested(_)), "{answer:?}");
}

#[track_caller]
fn expect_refusal(connection: &Connection, expected: RefusalReason) {
    match receive(connection).unwrap() {
        server_frame::Kind::Refused(refused) => assert_eq!(refused.reason(), expected, "{}", refused.text),
        other => panic!("{other:?} instead of a refusal"),
    }
}

/// Sends descriptors as one batch that announces `count` of them.
fn send(connection: &Connection, fds: &[OwnedFd], batch: u32, count: u32) {
    let frame = WorkerFrame { kind: Some(worker_frame::Kind::Fds(FdBatch { batch, first: 0, count })) };
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    // The weight-server may have closed the connection.
    let _ = connection.send(&frame, &fds);
}

/// A generation of one allocation, manifest first. Its checksum is wrong.
fn generation(id: u64, digest: u8) -> Vec<OwnedFd> {
    let memfd = SealedMemfd::from_bytes("ballast-weights", &[1; 4096]).unwrap();
    let tensor = TensorEntry {
        name: "tensor".to_owned(),
        dtype: 0,
        layout: LAYOUT_GGML,
        shape: vec![1024],
        shard: None,
        allocation: 0,
        offset: 0,
        bytes: 4096,
        raw_checksum: [0; 16],
        checksum: [0; 16],
    };
    let manifest = Manifest {
        model: "forged".to_owned(),
        digest: [digest; 32],
        generation: id,
        files: Vec::new(),
        devices: vec![ManifestDevice::host()],
        layout: LAYOUT_GGML,
        one_per_tensor: false,
        allocations: vec![Allocation { device: 0, bytes: memfd.bytes(), inode: memfd.inode() }],
        tensors: vec![tensor],
        gguf_metadata: Bytes::new(),
        created_unix_seconds: 0,
    };
    vec![seal_manifest(&manifest).unwrap().into(), memfd.into()]
}

fn inode(fd: &OwnedFd) -> u64 {
    std::fs::File::from(fd.try_clone().unwrap()).metadata().unwrap().ino()
}

fn null() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

#[test]
fn i8_foreign_descriptors_are_refused_and_closed() {
    let server = LoneWeightServer::start();
    let before = server.open_files();
    let unsealed = || {
        let mut fds = generation(3, 9);
        fds[1] = tempfile::tempfile().unwrap().into();
        fds
    };
    let exchanged = || vec![generation(3, 9).swap_remove(0), generation(3, 9).swap_remove(1)];
    let cases: [(&str, Vec<OwnedFd>); 6] = [
        ("devices", vec![null(), null()]),
        ("an unsealed allocation", unsealed()),
        ("an allocation of another manifest", exchanged()),
        ("another generation", generation(4, 9)),
        ("another digest", generation(3, 8)),
        ("no manifest", {
            let mut fds = generation(3, 9);
            fds.reverse();
            fds
        }),
    ];
    let rounds = cases.len() as u64;
    for (what, fds) in cases {
        let connection = server.requested_claim(2, inode(&fds[0]));
        send(&connection, &fds, 0, 2);
        let answer = receive(&connection).unwrap();
        assert!(matches!(answer, server_frame::Kind::BatchReceived(_)), "{what}: {answer:?}");
        expect_refusal(&connection, RefusalReason::Violation);
    }
    for (what, count, batch) in [("fewer than announced", 3, 0), ("out of order", 2, 1)] {
        let fds = generation(3, 9);
        let connection = server.requested_claim(2, inode(&fds[0]));
        send(&connection, &fds, batch, count);
        expect_refusal(&connection, RefusalReason::Violation);
        drop((what, connection));
    }
    let status = server.status();
    assert!(status.generations.is_empty() && status.leases.is_empty(), "{status:?}");
    assert!(status.violations >= rounds, "{}", status.violations);
    assert_eq!(status.ledger.unwrap().reserved_bytes, 0);
    eventually("all descriptors are closed", || (server.open_files() <= before + 1).then_some(()));
}

#[test]
fn i7_a_silent_claimant_delays_the_next_one_for_a_bounded_time() {
    let server = LoneWeightServer::start();
    let silent = server.claim(2);
    expect_request(&silent);
    expect_refusal(&server.claim(2), RefusalReason::Busy);
    let started = std::time::Instant::now();
    let next = eventually("another claimant is asked", || {
        let next = server.claim(2);
        matches!(receive(&next), Ok(server_frame::Kind::ReturnRequested(_))).then_some(next)
    });
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
    drop(next);
    // Claims of many generations at once are bounded, and none is answered with silence.
    for fds in [0, 1 << 20, u32::MAX] {
        expect_refusal(&server.claim(fds), RefusalReason::UnknownLease);
    }
}

#[test]
fn i2_returned_weights_with_other_bytes_are_quarantined() {
    let server = LoneWeightServer::start();
    let fds = generation(3, 9);
    let connection = server.requested_claim(2, inode(&fds[0]));
    send(&connection, &fds, 0, 2);
    assert!(matches!(receive(&connection).unwrap(), server_frame::Kind::BatchReceived(_)));
    // Seals, sizes and inodes are right, the checksum is not.
    assert!(matches!(receive(&connection).unwrap(), server_frame::Kind::Reclaimed(_)));
    expect_refusal(&connection, RefusalReason::Quarantined);
    let status = server.status();
    let returned = status.generations.iter().find(|generation| generation.generation == 3);
    let is_damaged = returned.is_none_or(|g| g.integrity() == GenerationIntegrity::Quarantined);
    assert!(is_damaged, "{status:?}");
}
