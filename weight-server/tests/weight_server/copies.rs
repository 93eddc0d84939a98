// SPDX-License-Identifier: Apache-2.0

//! Copies of a resident model on another device. The devices are the host and its NUMA node 0.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use handoff::attach::{AttachRequest, attach};
use handoff::manifest::{read_manifest, seal_manifest};
use memory::memfd::SealedMemfd;
use nix::sys::signal::Signal;
use proto::weights::v1 as wire;
use tokio::task::JoinHandle;

use crate::support::{
    ServerOptions, TestServer, load, load_request, make_sparse_model, pattern, request, signal,
};

const HOST: &str = "host";
const NODE: &str = "host:0";

/// The part of a file that its identity covers.
const HEAD_BYTES: u64 = 1 << 20;

fn has_node() -> bool {
    let found = Path::new("/sys/devices/system/node/node0").exists();
    if !found {
        println!("SKIPPED: this kernel has no NUMA nodes, so there is no second device");
    }
    found
}

/// Overwrites the tensor data behind the head, and restores the file's times: a load that reads the
/// file then finds other bytes.
fn falsify(path: &Path) {
    let file = File::options().write(true).open(path).unwrap();
    let before = file.metadata().unwrap();
    file.write_all_at(&vec![0xAA; (before.len() - HEAD_BYTES) as usize], HEAD_BYTES).unwrap();
    file.set_modified(before.modified().unwrap()).unwrap();
}

fn begin_load(
    server: &TestServer,
    device: &str,
    path: &Path,
) -> JoinHandle<Result<wire::Loaded, tonic::Status>> {
    let request = wire::LoadRequest { device: device.to_owned(), ..load_request("m", path, false) };
    server.runtime.spawn(load(server.admin(), request))
}

fn generation_on(status: &wire::Status, device: &str) -> Option<wire::Generation> {
    status.generations.iter().find(|generation| generation.device == device).cloned()
}

fn rows(status: &wire::Status, kind: wire::ReservationKind) -> Vec<wire::Reservation> {
    let rows = status.ledger.as_ref().unwrap().reservations.iter();
    rows.filter(|row| row.kind() == kind).cloned().collect()
}

/// A server with the model on the host, and a loader that has stopped in the middle of the copy.
fn stopped_copy() -> (TestServer, i32, JoinHandle<Result<wire::Loaded, tonic::Status>>) {
    let server =
        TestServer::start(ServerOptions { loader_stop_at: Some(16 << 20), ..ServerOptions::default() });
    let path = server.path("m.gguf");
    make_sparse_model(&path, 64 << 20);
    let first = begin_load(&server, HOST, &path);
    let loader = server.wait_stopped_loader();
    let second = begin_load(&server, NODE, &path);
    server.wait_status("the second load", |status| status.generations.len() == 2);
    signal(loader, Signal::SIGCONT);
    assert!(server.runtime.block_on(first).unwrap().unwrap().read_from_file);
    let loader = server.wait_stopped_loader();
    let status =
        server.wait_status("the copy", |status| !rows(status, wire::ReservationKind::Copying).is_empty());
    let [row] = &rows(&status, wire::ReservationKind::Copying)[..] else { panic!("{status:#?}") };
    assert_eq!((row.id, row.device.as_str(), row.bytes, row.fds), (2, HOST, 0, 0));
    (server, loader, second)
}

#[test]
fn i1_a_further_copy_reads_no_tensor_data_from_the_file() {
    if !has_node() {
        return;
    }
    let server = TestServer::plain();
    let tensors = [100_000, 10, 0, 600_000];
    let path = server.make_model("m", &tensors);
    let first = server.load_onto(HOST, "m", &path).unwrap();
    assert!(first.read_from_file);
    falsify(&path);
    let second = server.load_onto(NODE, "m", &path).unwrap();
    let (first, copy) = (first.generation.unwrap(), second.generation.clone().unwrap());
    assert!(!second.read_from_file);
    assert_eq!((copy.device.as_str(), copy.copied_from.as_str()), (NODE, HOST));
    assert_eq!(first.copied_from, "");
    assert!(copy.copy_seconds > 0.0);
    assert_eq!(copy.digest, first.digest);
    let ask = AttachRequest { device: NODE.to_owned(), ..request("m") };
    let attached = attach(&server.socket(), &ask, |_| {}).unwrap();
    assert_eq!(attached.manifest.devices[0].id, NODE);
    for (index, (tensor, values)) in attached.tensors.iter().zip(tensors).enumerate() {
        assert!(tensor.bytes.iter().copied().eq(pattern(index, values * 4)), "{}", tensor.name);
    }
}

#[test]
fn an_unloaded_source_stays_until_the_copy_is_done() {
    if !has_node() {
        return;
    }
    let (server, loader, second) = stopped_copy();
    let mut admin = server.admin();
    let unload = wire::UnloadRequest { model: "m".to_owned(), generation: 1 };
    server.runtime.block_on(admin.unload(unload)).unwrap();
    let source = generation_on(&server.status(), HOST).unwrap();
    assert_eq!(source.state(), wire::GenerationState::Retiring);
    signal(loader, Signal::SIGCONT);
    let copy = server.runtime.block_on(second).unwrap().unwrap().generation.unwrap();
    assert_eq!(copy.copied_from, HOST);
    let status = server.wait_status("the end of the source", |status| status.generations.len() == 1);
    assert!(rows(&status, wire::ReservationKind::Copying).is_empty());
    assert_eq!(rows(&status, wire::ReservationKind::Weights).len(), 1);
}

#[test]
fn a_copy_whose_loader_dies_is_read_from_the_file() {
    if !has_node() {
        return;
    }
    let (server, loader, second) = stopped_copy();
    signal(loader, Signal::SIGKILL);
    server.wait_status("the end of the loader", |_| !server.loaders().contains(&loader));
    // The next loader stops itself too.
    signal(server.wait_stopped_loader(), Signal::SIGCONT);
    let loaded = server.runtime.block_on(second).unwrap().unwrap();
    assert!(loaded.read_from_file);
    assert_eq!(loaded.generation.unwrap().copied_from, "");
    let status = server.status();
    assert!(rows(&status, wire::ReservationKind::Copying).is_empty());
    assert_eq!(generation_on(&status, HOST).unwrap().state(), wire::GenerationState::Ready);
}

#[test]
fn a_first_load_that_dies_lets_the_second_read_the_file() {
    if !has_node() {
        return;
    }
    let server =
        TestServer::start(ServerOptions { loader_stop_at: Some(16 << 20), ..ServerOptions::default() });
    let path = server.path("m.gguf");
    make_sparse_model(&path, 64 << 20);
    let first = begin_load(&server, HOST, &path);
    let loader = server.wait_stopped_loader();
    let second = begin_load(&server, NODE, &path);
    server.wait_status("the second load", |status| status.generations.len() == 2);
    signal(loader, Signal::SIGKILL);
    server.runtime.block_on(first).unwrap().unwrap_err();
    signal(server.wait_stopped_loader(), Signal::SIGCONT);
    assert!(server.runtime.block_on(second).unwrap().unwrap().read_from_file);
}

#[test]
fn a_source_with_other_checksums_is_not_copied_and_is_quarantined() {
    if !has_node() {
        return;
    }
    let (mut server, path) = TestServer::with_model(ServerOptions::default(), "m");
    let digest = generation_on(&server.status(), HOST).unwrap().digest;
    server.kill_server();
    // No process can write to sealed memory, so the manifest is changed instead.
    let stored = server.fd_store.contents();
    let (name, fd) = stored.into_iter().find(|(name, _)| name.ends_with("manifest")).unwrap();
    let mut manifest = read_manifest(&SealedMemfd::verify(fd).unwrap()).unwrap();
    manifest.tensors[0].checksum[0] ^= 1;
    server.fd_store.replace(&name, seal_manifest(&manifest).unwrap().into());
    server.restart_server();

    let loaded = server.load_onto(NODE, "m", &path).unwrap();
    assert!(loaded.read_from_file);
    assert_eq!(loaded.generation.unwrap().digest, digest);
    // The source is verified, found damaged, and made again from the copy that was just read.
    let status = server.wait_status("another generation on the host", |status| {
        generation_on(status, HOST).is_some_and(|found| {
            found.generation != manifest.generation && found.state() == wire::GenerationState::Ready
        })
    });
    let repaired = generation_on(&status, HOST).unwrap();
    assert_eq!((repaired.copied_from.as_str(), repaired.digest), (NODE, digest));
}
