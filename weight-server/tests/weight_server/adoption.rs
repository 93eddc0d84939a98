// SPDX-License-Identifier: Apache-2.0

//! Tests adoption: the weight-server dies, and its successor adopts generations and leases.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use memory::memfd::SealedMemfd;
use nix::sys::signal::Signal;
use proto::weights::v1::{self as wire, RefusalReason, server_frame, worker_frame};

use crate::support::{ServerOptions, TEST_TIMEOUT, TestServer, TestWorkerProcess, raw_connection, signal};

fn generation(status: &wire::Status) -> &wire::Generation {
    let [generation] = &status.generations[..] else { panic!("{status:?}") };
    generation
}

/// Waits until the worker reports this lease status.
fn wait_lease(worker: &mut TestWorkerProcess, state: &str) -> String {
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    loop {
        let answer = worker.command("check");
        if answer.starts_with(state) {
            return answer;
        }
        assert!(std::time::Instant::now() < deadline, "{answer} never became {state}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn successor_adopts_generations_and_leases_without_the_model_file() {
    let (mut server, path) = TestServer::with_model(ServerOptions::default(), "m");
    let mut worker = server.worker("m", "");
    let (lease, checksum) = worker.attached();
    let checksum = checksum.to_owned();
    let before = server.status();
    server.fd_store.wait_names(&["g1.a0", "g1.manifest", "l1.pidfd", "l1.record"]);

    server.kill_server();
    std::fs::remove_file(&path).unwrap();
    assert!(wait_lease(&mut worker, "Broken").ends_with(&checksum), "the worker still reads its weights");

    server.restart_server();
    assert!(wait_lease(&mut worker, "Held").ends_with(&checksum));
    let after =
        server.wait_status("the reclaim", |status| status.leases[0].state() == wire::LeaseState::Held);
    assert!(generation(&after).adopted);
    assert_eq!(generation(&after).digest, generation(&before).digest);
    assert_eq!((after.leases[0].lease, after.leases[0].pid), (lease, worker.pid()));
    let rows = |status: &wire::Status| status.ledger.as_ref().unwrap().reservations.clone();
    assert_eq!(rows(&after), rows(&before));
    assert!(after.adoption_notes.is_empty() && after.fd_store);

    // Without the file, a load finds the resident model, and a new worker attaches.
    assert!(!server.load("m", &path).unwrap().read_from_file);
    let second = server.worker("m", "");
    assert_eq!(second.attached(), (lease + 1, checksum.as_str()));

    // The reclaimed lease is complete: a detach ends it.
    assert_eq!(worker.command("detach"), "detached");
    server.wait_status("the end of the first lease", |status| status.leases.len() == 1);
    server.fd_store.wait_names(&["g1.a0", "g1.manifest", "l2.pidfd", "l2.record"]);
}

#[test]
fn adoption_works_repeatedly() {
    let (mut server, _) = TestServer::with_model(ServerOptions::default(), "m");
    let mut worker = server.worker("m", "");
    for _ in 0..2 {
        server.kill_server();
        server.restart_server();
        wait_lease(&mut worker, "Held");
    }
    assert_eq!(server.status().leases.len(), 1);
}

#[test]
fn lease_of_a_dead_worker_is_not_adopted() {
    let (mut server, _) = TestServer::with_model(ServerOptions::default(), "m");
    let mut worker = server.worker("m", "");
    server.kill_server();
    worker.kill();
    server.restart_server();
    let status = server.status();
    assert!(status.leases.is_empty());
    assert_eq!(status.ledger.unwrap().reservations.len(), 1, "only the weights");
    server.fd_store.wait_names(&["g1.a0", "g1.manifest"]);
}

#[test]
fn loads_and_unloads_wait_until_leases_are_reclaimed() {
    let (mut server, _) = TestServer::with_model(ServerOptions::default(), "m");
    let worker = server.worker("m", "");
    let other = server.make_model("other", &[10]);
    signal(worker.pid(), Signal::SIGSTOP);
    server.kill_server();
    server.restart_server();
    for refused in [server.load("other", &other).map(drop), server.unload("m").map(drop)] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unavailable);
        assert!(refused.message().contains("1 are missing"), "{}", refused.message());
    }
    // A new worker may attach in the meantime.
    server.worker("m", "").attached();
    let stopped = worker.attached().0;
    signal(worker.pid(), Signal::SIGCONT);
    server.wait_status("the reclaim", |status| {
        status.leases.iter().any(|lease| lease.lease == stopped && lease.state() == wire::LeaseState::Held)
    });
    server.load("other", &other).unwrap();
    server.unload("m").unwrap();
}

#[test]
fn unloaded_model_stays_unloaded_after_adoption() {
    let (mut server, _) = TestServer::with_model(ServerOptions::default(), "m");
    let mut worker = server.worker("m", "");
    server.unload("m").unwrap();
    server.fd_store.wait_names(&["g1.a0", "g1.manifest", "g1.retired", "l1.pidfd", "l1.record"]);
    server.kill_server();
    server.restart_server();
    wait_lease(&mut worker, "Held");
    assert_eq!(generation(&server.status()).state(), wire::GenerationState::Retiring);
    assert!(server.worker("m", "").greeting.starts_with("refused"));
    worker.command("detach");
    server.wait_status("its end", |status| status.generations.is_empty());
    server.fd_store.wait_names(&[]);
}

#[test]
fn commit_records_are_stored_last_and_removed_first() {
    let server = TestServer::plain();
    let path = server.make_model("m", &[600_000, 600_000, 600_000]);
    server.load_with("m", &path, true).unwrap();
    drop(server.attach("m").unwrap());
    server.wait_status("the end of the lease", |status| status.leases.is_empty());
    server.unload("m").unwrap();
    server.fd_store.wait_names(&[]);
    let expected = [
        "+g1.a0",
        "+g1.a1",
        "+g1.a2",
        "+g1.manifest",
        "+l1.pidfd",
        "+l1.record",
        "-l1.record",
        "-l1.pidfd",
        "-g1.manifest",
        "-g1.retired",
        "-g1.a0",
        "-g1.a1",
        "-g1.a2",
    ];
    assert_eq!(server.fd_store.log(), expected);
}

#[test]
fn incomplete_and_exchanged_generations_are_dropped() {
    for damage in ["missing", "exchanged", "unsealed"] {
        let (mut server, path) = TestServer::with_model(ServerOptions::default(), "m");
        server.kill_server();
        match damage {
            "missing" => server.fd_store.remove("g1.a0"),
            "exchanged" => {
                let other = SealedMemfd::from_bytes("other", &[0; 4096]).unwrap();
                server.fd_store.replace("g1.a0", other.as_fd().try_clone_to_owned().unwrap());
            }
            _ => server.fd_store.replace("g1.a0", File::open(&path).unwrap().into()),
        }
        server.restart_server();
        let status = server.status();
        assert!(status.generations.is_empty());
        let [note] = &status.adoption_notes[..] else { panic!("{:?}", status.adoption_notes) };
        assert!(note.starts_with("generation 1 was dropped"), "{note}");
        server.fd_store.wait_names(&[]);
        // Generation numbers are not reused, because a worker may still hold the old one. The model
        // itself can be loaded again.
        assert!(server.load("m", &path).unwrap().read_from_file);
    }
}

#[test]
fn worker_returns_lease_and_model_that_the_fd_store_has_lost() {
    let (mut server, path) = TestServer::with_model(ServerOptions::default(), "m");
    let mut worker = server.worker("m", "");
    let checksum = worker.attached().1.to_owned();
    server.kill_server();
    for name in ["g1.a0", "g1.manifest", "l1.pidfd", "l1.record"] {
        server.fd_store.remove(name);
    }
    server.restart_server();
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    while server.status().leases.is_empty() {
        assert!(std::time::Instant::now() < deadline, "{:?}", server.status());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(wait_lease(&mut worker, "Held").ends_with(&checksum));
    assert!(generation(&server.status()).adopted);
    assert!(!server.load("m", &path).unwrap().read_from_file);
    server.fd_store.wait_names(&["g1.a0", "g1.manifest", "l1.pidfd", "l1.record"]);
}

#[test]
fn generation_without_any_descriptor_left_is_loaded_again() {
    let (mut server, path) = TestServer::with_model(ServerOptions::default(), "m");
    server.kill_server();
    for name in ["g1.a0", "g1.manifest"] {
        server.fd_store.remove(name);
    }
    server.restart_server();
    assert!(server.load("m", &path).unwrap().read_from_file);
}

#[test]
fn lease_of_another_process_cannot_be_reclaimed() {
    let (server, _) = TestServer::with_model(ServerOptions::default(), "m");
    let mut worker = server.worker("m", "");
    let (lease, _) = worker.attached();
    let thief = raw_connection(&server);
    let claim = wire::Reclaim { protocol: 1, generation: 1, lease, ..Default::default() };
    thief.send(&wire::WorkerFrame { kind: Some(worker_frame::Kind::Reclaim(claim)) }, &[]).unwrap();
    let (answer, _) = thief.receive::<wire::ServerFrame>().unwrap();
    let Some(server_frame::Kind::Refused(refused)) = answer.kind else { panic!("{answer:?}") };
    assert_eq!(refused.reason(), RefusalReason::UnknownLease);
    assert!(worker.command("check").starts_with("Held"));
}

#[test]
fn tokens_stay_required_after_adoption() {
    let (mut server, _) = TestServer::with_model(ServerOptions::default(), "m");
    let token = "0123456789abcdef0123456789abcdef";
    server.allow_token("worker-0", token);
    let mut worker = server.worker("m", token);
    server.kill_server();
    server.restart_server();
    // No token is registered with the successor, but the lease records hold digests.
    wait_lease(&mut worker, "Held");
    assert!(server.status().tokens_required);
    assert!(server.worker("m", "").greeting.starts_with("refused"));
    assert_eq!(server.status().leases[0].token_name, "worker-0");
}

#[test]
fn stop_removes_the_sockets_and_keeps_the_fd_store() {
    let (mut server, _) = TestServer::with_model(ServerOptions::default(), "m");
    assert_eq!(server.stop_server().code(), Some(0));
    assert!(!server.socket().exists() && !server.path("weights-admin.sock").exists());
    server.fd_store.wait_names(&["g1.a0", "g1.manifest"]);
    server.restart_server();
    assert!(generation(&server.status()).adopted);
    server.worker("m", "").attached();
}
