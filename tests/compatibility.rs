// SPDX-License-Identifier: Apache-2.0

//! What a release leaves for its successor: `tests/data/compat/0.1/` has the bytes of manifest,
//! lease record, hand-off frames, names in the FD store and files of the runtime directory, as
//! version 0.1 writes them. The present code has to read them, and has to refuse later versions
//! with a sentence that says what to do (docs/decisions/0039).
//!
//! The files of a release are never written again. `write_the_files_of_this_release` makes those of
//! the next one, in a folder of its own.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use handoff::lease_record::{LEASE_RECORD_FORMAT, LeaseRecord};
use handoff::manifest::{MANIFEST_FORMAT, decode_manifest, encode_manifest};
use memory::manifest::{Allocation, FileIdentity, LAYOUT_GGML, Manifest, ManifestDevice, Shard, TensorEntry};
use memory::memfd::SealedMemfd;
use prost::Message;
use proto::weights::v1 as wire;
use proto::weights::v1::server_frame::Kind as ServerKind;
use proto::weights::v1::worker_frame::Kind as WorkerKind;
use service::RuntimeDir;
use supervisor::{RecordedModel, recorded_models};
use weight_server::stored_fds::{names_to_store_generation, names_to_store_lease, sort_stored};

use crate::harness::in_tree;

const RELEASE: &str = "tests/data/compat/0.1";

fn manifest() -> Manifest {
    let tensor = |name: &str, allocation, offset, bytes, shard| TensorEntry {
        name: name.to_owned(),
        dtype: 8,
        layout: LAYOUT_GGML,
        shape: vec![64, 2],
        shard,
        allocation,
        offset,
        bytes,
        raw_checksum: [1; 16],
        checksum: [2; 16],
    };
    Manifest {
        model: "pycoder".to_owned(),
        digest: [7; 32],
        generation: 3,
        files: vec![FileIdentity {
            path: "/models/pycoder.gguf".into(),
            device: 2049,
            inode: 1234,
            bytes: 8 << 20,
            modified_seconds: 1_700_000_000,
            modified_nanoseconds: 5,
            head_digest: Some([9; 32]),
        }],
        devices: vec![ManifestDevice::host()],
        layout: LAYOUT_GGML,
        one_per_tensor: true,
        allocations: vec![
            Allocation { device: 0, bytes: 2 << 20, inode: 11 },
            Allocation { device: 0, bytes: 4 << 20, inode: 12 },
        ],
        tensors: vec![
            tensor("token_embd.weight", 1, 0, 4 << 20, None),
            tensor("output_norm.weight", 0, 256, 512, Some(Shard { axis: 1, index: 2, count: 4 })),
        ],
        gguf_metadata: Bytes::from_static(b"GGUF..."),
        created_unix_seconds: 1_700_000_100,
    }
}

fn lease_record() -> LeaseRecord {
    LeaseRecord {
        lease: 4,
        generation: 3,
        device: "host".to_owned(),
        kv_bytes: 1 << 30,
        workspace_bytes: 1 << 20,
        uid: 1000,
        pid: 4711,
        pid_start_ticks: 99,
        token_name: "worker-0".to_owned(),
        token_digest: Some([5; 32]),
    }
}

fn worker_frames() -> Vec<WorkerKind> {
    vec![
        WorkerKind::Attach(wire::Attach {
            protocol: 1,
            layout: LAYOUT_GGML,
            manifest_format: 1,
            device: "host".to_owned(),
            model: "pycoder".to_owned(),
            token: Bytes::from_static(&[3; 32]),
            kv_bytes: 1 << 30,
            workspace_bytes: 1 << 20,
        }),
        WorkerKind::Reclaim(wire::Reclaim {
            protocol: 1,
            generation: 3,
            lease: 4,
            token: Bytes::from_static(&[3; 32]),
            digest: Bytes::from_static(&[7; 32]),
            device: "host".to_owned(),
            kv_bytes: 1 << 30,
            workspace_bytes: 1 << 20,
            fds: 3,
            manifest_inode: 13,
        }),
        WorkerKind::BatchReceived(wire::BatchReceived { batch: 1 }),
        WorkerKind::Detach(wire::Detach {}),
        WorkerKind::Fds(wire::FdBatch { batch: 1, first: 128, count: 2 }),
    ]
}

fn server_frames() -> Vec<ServerKind> {
    let refused = wire::AttachRefused { reason: wire::RefusalReason::Busy.into(), text: "busy".to_owned() };
    vec![
        ServerKind::Refused(refused),
        ServerKind::Waiting(wire::Waiting { done_bytes: 1, total_bytes: 2, jobs_ahead: 3 }),
        ServerKind::Grant(wire::Grant { lease: 4, generation: 3, fds: 130 }),
        ServerKind::Fds(wire::FdBatch { batch: 1, first: 128, count: 2 }),
        ServerKind::Reclaimed(wire::Reclaimed { lease: 4, generation: 3 }),
        ServerKind::ReturnRequested(wire::ReturnRequested {}),
        ServerKind::BatchReceived(wire::BatchReceived { batch: 1 }),
    ]
}

/// Frames one after the other, each with its length before it.
fn frame_bytes() -> Vec<u8> {
    let worker = worker_frames().into_iter().map(|kind| wire::WorkerFrame { kind: Some(kind) });
    let server = server_frames().into_iter().map(|kind| wire::ServerFrame { kind: Some(kind) });
    let mut bytes: Vec<u8> = worker.flat_map(|frame| frame.encode_length_delimited_to_vec()).collect();
    bytes.extend(server.flat_map(|frame| frame.encode_length_delimited_to_vec()));
    bytes
}

fn fd_names() -> String {
    let generation = names_to_store_generation(3, 2).map(|name| name.to_string());
    let lease = names_to_store_lease(4).map(|name| name.to_string());
    let names: Vec<String> = generation.chain(["g2.retired".to_owned()]).chain(lease).collect();
    names.join("\n") + "\n"
}

fn recorded() -> Vec<RecordedModel> {
    let model = |name: &str, by_command| RecordedModel {
        name: name.to_owned(),
        path: "/models/pycoder.gguf".into(),
        workers: 2,
        device: "host".to_owned(),
        pack: true,
        by_command,
        // Version 0.1 has no such keys.
        files: String::new(),
        weights: String::new(),
        configured_path: std::path::PathBuf::new(),
        settings: toml::Table::new(),
        worker_config: "threads = 2\nkv-tokens = 1024\n".parse().unwrap(),
        further_copies: Vec::new(),
        idle: false,
        idle_unload: None,
        memory: supervisor::CopyMemory::default(),
    };
    vec![model("configured", false), model("by/command", true)]
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(in_tree(RELEASE).join(name)).unwrap()
}

#[test]
fn the_manifest_of_a_release_is_readable_and_a_later_format_says_what_to_do() {
    let bytes = read("manifest");
    assert_eq!(decode_manifest(bytes.clone().into()).unwrap(), manifest());
    let mut later = wire::Manifest::decode(&bytes[..]).unwrap();
    later.format = MANIFEST_FORMAT + 1;
    let refusal = decode_manifest(later.encode_to_vec().into()).unwrap_err().to_string();
    assert!(refusal.contains("format 2") && refusal.contains("load the model anew"), "{refusal}");
}

#[test]
fn the_lease_record_of_a_release_is_readable_and_a_later_format_says_what_to_do() {
    let bytes = read("lease-record");
    let memfd = |bytes: &[u8]| SealedMemfd::from_bytes("compat", bytes).unwrap();
    assert_eq!(LeaseRecord::from_memfd(&memfd(&bytes)).unwrap(), lease_record());
    let mut later = wire::LeaseRecord::decode(&bytes[..]).unwrap();
    later.format = LEASE_RECORD_FORMAT + 1;
    let refusal = LeaseRecord::from_memfd(&memfd(&later.encode_to_vec())).unwrap_err().to_string();
    assert!(refusal.contains("format 2") && refusal.contains("restart the worker"), "{refusal}");
}

#[test]
fn the_frames_of_a_release_are_readable() {
    let bytes = read("frames");
    let mut rest = &bytes[..];
    for expected in worker_frames() {
        let found = wire::WorkerFrame::decode_length_delimited(&mut rest).unwrap();
        assert_eq!(found.kind, Some(expected));
    }
    for expected in server_frames() {
        let found = wire::ServerFrame::decode_length_delimited(&mut rest).unwrap();
        assert_eq!(found.kind, Some(expected));
    }
    assert!(rest.is_empty());
}

/// A hand-off of another protocol is refused; `weight_server::state` tests that. The sentence is
/// what its user reads.
#[test]
fn another_protocol_is_refused_with_what_to_do() {
    let refusal = weight_server::refusal::AttachRefusal::Protocol { found: 2 }.to_string();
    assert!(refusal.contains("protocol 2") && refusal.contains("executable"), "{refusal}");
}

#[test]
fn the_names_in_the_fd_store_of_a_release_are_known() {
    let names = String::from_utf8(read("fd-names")).unwrap();
    let stored = names.lines().map(|name| (name.to_owned(), ()));
    let sorted = sort_stored(stored.chain([("g3.later".to_owned(), ())]));
    // A later version may store more: an earlier one ignores it.
    assert_eq!(sorted.unrecognized, ["g3.later", "g2.retired"]);
    assert_eq!(sorted.generations.keys().collect::<Vec<_>>(), [&3]);
    assert_eq!(sorted.leases.keys().collect::<Vec<_>>(), [&4]);
    assert!(sorted.leases.into_values().all(|lease| lease.pidfd.is_some()));
    assert!(sorted.generations.into_values().all(|stored| stored.into_ordered().unwrap().len() == 3));
    assert_eq!(names, fd_names());
}

#[test]
fn the_runtime_directory_of_a_release_is_readable() {
    let folder = tempfile::tempdir().unwrap();
    let directory = RuntimeDir::at(folder.path());
    std::fs::copy(in_tree(RELEASE).join("models.toml"), directory.models_record()).unwrap();
    assert_eq!(recorded_models(&directory), recorded());
    // The record of a child that lives: this process.
    let recorded = String::from_utf8(read("child.pid")).unwrap();
    directory.record_child("router", std::process::id()).unwrap();
    let present = std::fs::read_to_string(folder.path().join("router.pid")).unwrap();
    let shape = |text: &str| text.replace(|digit: char| digit.is_ascii_digit(), "").to_owned();
    assert_eq!(shape(&recorded), shape(&present));
    assert_eq!(directory.living_children().unwrap(), [("router".to_owned(), std::process::id())]);
}

#[test]
#[ignore = "by hand, at a release: BALLAST_TEST_COMPAT_DIR names the folder"]
fn write_the_files_of_this_release() {
    let folder = PathBuf::from(std::env::var_os("BALLAST_TEST_COMPAT_DIR").unwrap());
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.join(name), bytes).unwrap();
    write("manifest", &encode_manifest(&manifest()));
    write("lease-record", &lease_record_bytes());
    write("frames", &frame_bytes());
    write("fd-names", fd_names().as_bytes());
    write("child.pid", b"4711 99\n");
    let models = recorded().into_iter().map(|model| toml::Value::try_from(model).unwrap()).collect();
    let record = toml::Table::from_iter([("models".to_owned(), toml::Value::Array(models))]);
    write("models.toml", record.to_string().as_bytes());
}

/// As it stands in the memfd of the FD store.
fn lease_record_bytes() -> Vec<u8> {
    use std::os::fd::AsRawFd;
    let memfd = lease_record().to_memfd().unwrap();
    let fd = std::os::fd::AsFd::as_fd(&memfd).as_raw_fd();
    std::fs::read(Path::new("/proc/self/fd").join(fd.to_string())).unwrap()
}
