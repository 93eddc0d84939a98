// SPDX-License-Identifier: Apache-2.0

//! Attaching to weight-servers that close the connection early or send inconsistent frames.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use handoff::AttachModelError;
use handoff::attach::{AttachRequest, attach};
use handoff::fd_batches::FdBatchError;
use handoff::lease::LeaseStatus;
use handoff::manifest::{DecodeManifestError, SplitHandoffError};
use handoff::seqpacket::{Connection, FrameError, Listener};
use memory::host_import::ImportHostError;
use memory::manifest::{
    Allocation, DeviceKind, LAYOUT_GGML, Manifest, ManifestDevice, ManifestError, TensorEntry,
};
use memory::memfd::{MemfdError, SealedMemfd};
use proto::weights::v1::{self as wire, RefusalReason, ServerFrame, WorkerFrame, server_frame, worker_frame};

const PATIENCE: Duration = Duration::from_secs(60);

/// The descriptors of a model with two tensors: the manifest, then one allocation for each tensor.
fn model(change: impl FnOnce(&mut Manifest)) -> Vec<OwnedFd> {
    let allocations = [vec![1u8; 4096], vec![2u8; 8192]]
        .map(|contents| SealedMemfd::from_bytes("ballast-test", &contents).unwrap());
    let tensor = |index: usize| TensorEntry {
        name: format!("tensor.{index}"),
        dtype: 0,
        layout: LAYOUT_GGML,
        shape: vec![1024],
        shard: None,
        allocation: index,
        offset: 0,
        bytes: 4096,
        raw_checksum: [0; 16],
        checksum: [0; 16],
    };
    let mut manifest = Manifest {
        model: "m".to_owned(),
        digest: [1; 32],
        generation: 1,
        files: Vec::new(),
        devices: vec![ManifestDevice::host()],
        layout: LAYOUT_GGML,
        one_per_tensor: false,
        allocations: allocations
            .iter()
            .map(|memfd| Allocation { device: 0, bytes: memfd.bytes(), inode: memfd.inode() })
            .collect(),
        tensors: vec![tensor(0), tensor(1)],
        gguf_metadata: Bytes::new(),
        created_unix_seconds: 0,
    };
    change(&mut manifest);
    let owned = |memfd: &SealedMemfd| memfd.as_fd().try_clone_to_owned().unwrap();
    let manifest = owned(&handoff::manifest::seal_manifest(&manifest).unwrap());
    std::iter::once(manifest).chain(allocations.iter().map(owned)).collect()
}

fn request() -> AttachRequest {
    AttachRequest {
        model: "m".to_owned(),
        device: "host".to_owned(),
        layout: LAYOUT_GGML,
        token: None,
        kv_bytes: 1,
        workspace_bytes: 2,
    }
}

/// Waits for the one client of a test, since the listener does not block.
fn accept(listener: &Listener) -> Connection {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Ok(connection) => {
                connection.set_timeouts(Some(PATIENCE), Some(PATIENCE)).unwrap();
                return connection;
            }
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
        assert!(Instant::now() < deadline, "no worker connects");
    }
}

fn send(connection: &Connection, kind: server_frame::Kind, fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    connection.send(&ServerFrame { kind: Some(kind) }, &fds).unwrap();
}

fn receive(connection: &Connection) -> worker_frame::Kind {
    connection.receive::<WorkerFrame>().unwrap().0.kind.unwrap()
}

fn grant(fds: u32) -> server_frame::Kind {
    server_frame::Kind::Grant(wire::Grant { lease: 3, generation: 1, fds })
}

fn batch(batch: u32, first: u32, count: u32) -> server_frame::Kind {
    server_frame::Kind::Fds(wire::FdBatch { batch, first, count })
}

struct Server {
    path: PathBuf,
    thread: JoinHandle<()>,
    _directory: tempfile::TempDir,
}

/// Starts a server that answers one connection, after its Attach frame, with `conversation`.
fn server(conversation: impl FnOnce(&Connection, &Listener) + Send + 'static) -> Server {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("weights.sock");
    let listener = Listener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let connection = accept(&listener);
        assert!(matches!(receive(&connection), worker_frame::Kind::Attach(_)));
        conversation(&connection, &listener);
    });
    Server { path, thread, _directory: directory }
}

/// The error of attaching to such a server.
fn failure(conversation: impl FnOnce(&Connection) + Send + 'static) -> AttachModelError {
    let server = server(move |connection, _| conversation(connection));
    let error = attach(&server.path, &request(), |_| {}).unwrap_err();
    server.thread.join().unwrap();
    error
}

#[test]
fn tensors_are_mapped_and_descriptors_closed() {
    let server = server(|connection, _| {
        let waiting = wire::Waiting { done_bytes: 1, total_bytes: 2, jobs_ahead: 3 };
        send(connection, server_frame::Kind::Waiting(waiting), &[]);
        send(connection, grant(3), &[]);
        let fds = model(|_| {});
        send(connection, batch(0, 0, 2), &fds[..2]);
        assert!(matches!(receive(connection), worker_frame::Kind::BatchReceived(r) if r.batch == 0));
        send(connection, batch(1, 2, 1), &fds[2..]);
        assert!(matches!(receive(connection), worker_frame::Kind::BatchReceived(r) if r.batch == 1));
        assert!(matches!(receive(connection), worker_frame::Kind::Detach(_)));
    });
    let mut waits = 0;
    let attached = attach(&server.path, &request(), |progress| {
        waits += 1;
        assert_eq!((progress.done_bytes, progress.total_bytes, progress.jobs_ahead), (1, 2, 3));
    })
    .unwrap();
    assert_eq!(waits, 1);
    assert_eq!(attached.tensors[0].bytes, &[1; 4096][..]);
    assert_eq!(attached.tensors[1].bytes, &[2; 4096][..]);
    assert_eq!((attached.lease.id(), attached.lease.generation()), (3, 1));
    assert_eq!(attached.lease.status(), LeaseStatus::Held);
    let handoff::attach::AttachedModel { tensors, lease, .. } = attached;
    drop(tensors);
    drop(lease);
    server.thread.join().unwrap();
}

#[test]
fn lease_dropped_before_its_tensors_sends_no_detach() {
    let server = server(|connection, _| {
        send(connection, grant(3), &[]);
        send(connection, batch(0, 0, 3), &model(|_| {}));
        receive(connection);
        assert!(matches!(connection.receive::<WorkerFrame>(), Err(FrameError::Closed)), "a detach came");
    });
    let handoff::attach::AttachedModel { tensors, lease, .. } =
        attach(&server.path, &request(), |_| {}).unwrap();
    drop(lease);
    server.thread.join().unwrap();
    assert_eq!(tensors[0].bytes[0], 1);
}

#[test]
fn broken_lease_is_claimed_again_and_an_unknown_one_is_lost() {
    let (see_broken, broken) = std::sync::mpsc::channel();
    let server = server(move |connection, listener| {
        send(connection, grant(3), &[]);
        send(connection, batch(0, 0, 3), &model(|_| {}));
        receive(connection);
        connection.shutdown();
        // The first successor is not ready, the second accepts the claim, the third does not know
        // the lease.
        let claim = |connection: &Connection| match receive(connection) {
            worker_frame::Kind::Reclaim(claim) => assert_eq!((claim.lease, claim.generation), (3, 1)),
            other => panic!("{other:?}"),
        };
        let refuse = |connection: &Connection, reason: RefusalReason| {
            claim(connection);
            let refused =
                wire::AttachRefused { reason: reason.into(), text: reason.as_str_name().to_owned() };
            send(connection, server_frame::Kind::Refused(refused), &[]);
        };
        refuse(&accept(listener), RefusalReason::Busy);
        let successor = accept(listener);
        claim(&successor);
        send(&successor, server_frame::Kind::Reclaimed(wire::Reclaimed { lease: 3, generation: 1 }), &[]);
        successor.shutdown();
        broken.recv_timeout(PATIENCE).unwrap();
        refuse(&accept(listener), RefusalReason::UnknownLease);
    });
    let attached = attach(&server.path, &request(), |_| {}).unwrap();
    let mut seen = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while !matches!(seen.last(), Some(LeaseStatus::Lost { .. })) {
        let status = attached.lease.status();
        if seen.last() != Some(&status) {
            if matches!(status, LeaseStatus::Broken { .. }) {
                see_broken.send(()).unwrap_or_default();
            }
            seen.push(status);
        }
        assert!(Instant::now() < deadline, "{seen:?}");
        assert_eq!(attached.tensors[1].bytes[4095], 2, "readable in every state");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(seen.iter().any(|status| matches!(status, LeaseStatus::Broken { .. })), "{seen:?}");
    let Some(LeaseStatus::Lost { reason, .. }) = seen.last() else { panic!("{seen:?}") };
    assert_eq!(*reason, RefusalReason::UnknownLease);
    server.thread.join().unwrap();
}

#[test]
fn inconsistent_batches_are_refused() {
    let out_of_order = failure(|connection| {
        send(connection, grant(3), &[]);
        send(connection, batch(1, 0, 3), &model(|_| {}));
    });
    assert!(matches!(
        out_of_order,
        AttachModelError::Batch(FdBatchError::OutOfOrder { expected: 0, found: 1 })
    ));
    let short = failure(|connection| {
        send(connection, grant(3), &[]);
        send(connection, batch(0, 0, 3), &model(|_| {})[..2]);
    });
    assert!(matches!(short, AttachModelError::Batch(FdBatchError::Count { announced: 3, carried: 2 })));
    let excess = failure(|connection| {
        send(connection, grant(2), &[]);
        send(connection, batch(0, 0, 3), &model(|_| {}));
    });
    assert!(matches!(excess, AttachModelError::Batch(FdBatchError::Excess { .. })));
    let absurd = failure(|connection| send(connection, grant(u32::MAX), &[]));
    assert!(matches!(absurd, AttachModelError::Batch(FdBatchError::TooMany { .. })));
    let nothing = failure(|connection| send(connection, grant(0), &[]));
    assert!(matches!(nothing, AttachModelError::Split(SplitHandoffError::NoManifest)));
}

#[test]
fn early_close_and_unexpected_frames_are_errors() {
    let broken = failure(|connection| {
        send(connection, grant(3), &[]);
        send(connection, batch(0, 0, 2), &model(|_| {})[..2]);
        receive(connection);
    });
    assert!(matches!(broken, AttachModelError::Connection(FrameError::Closed)));
    let out_of_turn = failure(|connection| send(connection, batch(0, 0, 3), &model(|_| {})));
    assert!(matches!(out_of_turn, AttachModelError::Unexpected { expected: "a grant", .. }));
    let twice = failure(|connection| {
        send(connection, grant(3), &[]);
        send(connection, grant(3), &[]);
    });
    assert!(matches!(twice, AttachModelError::Unexpected { expected: "descriptors", .. }));
}

#[test]
fn descriptors_that_do_not_fit_the_manifest_are_refused() {
    fn import_failure(make: fn() -> Vec<OwnedFd>) -> AttachModelError {
        failure(move |connection| {
            let fds = make();
            send(connection, grant(fds.len() as u32), &[]);
            send(connection, batch(0, 0, fds.len() as u32), &fds);
            receive(connection);
        })
    }
    let exchanged = import_failure(|| {
        let mut fds = model(|_| {});
        fds.swap(1, 2);
        fds
    });
    assert!(matches!(
        exchanged,
        AttachModelError::ImportHost(ImportHostError::Allocation {
            index: 0,
            source: MemfdError::WrongSize { .. }
        })
    ));
    let foreign = import_failure(|| {
        let mut fds = model(|_| {});
        fds[1] = model(|_| {}).swap_remove(1);
        fds
    });
    assert!(matches!(
        foreign,
        AttachModelError::ImportHost(ImportHostError::Allocation {
            index: 0,
            source: MemfdError::WrongInode { .. }
        })
    ));
    let unsealed = import_failure(|| {
        let mut fds = model(|_| {});
        fds[2] = std::fs::File::open("/dev/null").unwrap().into();
        fds
    });
    assert!(matches!(
        unsealed,
        AttachModelError::ImportHost(ImportHostError::Allocation {
            index: 1,
            source: MemfdError::NotMemfd { .. }
        })
    ));
    let missing = import_failure(|| {
        let mut fds = model(|_| {});
        fds.truncate(2);
        fds
    });
    assert!(matches!(missing, AttachModelError::Split(SplitHandoffError::Count { expected: 2, found: 1 })));
    let elsewhere = import_failure(|| {
        model(|manifest| {
            manifest.devices[0] =
                ManifestDevice { kind: DeviceKind::Cuda, id: "GPU-7".to_owned(), compute_capability: 90 };
        })
    });
    assert!(matches!(elsewhere, AttachModelError::ImportHost(ImportHostError::Device { .. })));
    let outside = import_failure(|| model(|manifest| manifest.tensors[1].bytes = 9000));
    assert!(matches!(
        outside,
        AttachModelError::Split(SplitHandoffError::Manifest(DecodeManifestError::Invalid(
            ManifestError::OutOfAllocation { allocation: 1, bytes: 9000, .. }
        )))
    ));
}

#[test]
fn refusal_keeps_its_reason_and_text() {
    let error = failure(|connection| {
        let refused =
            wire::AttachRefused { reason: RefusalReason::Ledger.into(), text: "no room for you".to_owned() };
        send(connection, server_frame::Kind::Refused(refused), &[]);
    });
    assert!(matches!(&error, AttachModelError::Refused { reason: RefusalReason::Ledger, .. }));
    assert!(error.to_string().contains("no room for you"));
}

#[test]
fn socket_that_appears_late_is_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let path: &Path = &directory.path().join("weights.sock");
    std::thread::scope(|scope| {
        let late = scope.spawn(|| attach(path, &request(), |_| {}));
        std::thread::sleep(Duration::from_millis(60));
        let listener = Listener::bind(path).unwrap();
        drop(accept(&listener));
        assert!(matches!(late.join().unwrap(), Err(AttachModelError::Connection(FrameError::Closed))));
    });
}
