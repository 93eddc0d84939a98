// SPDX-License-Identifier: Apache-2.0

//! Tests faults: failed loads, limits, and clients that violate the protocol.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use handoff::seqpacket::{Connection, FrameError, MAX_FRAME_BYTES};
use nix::sys::signal::Signal;
use prost::Message;
use proto::weights::v1::{self as wire, LoadFailure, RefusalReason, ServerFrame, server_frame, worker_frame};

use crate::support::{
    MODEL, ServerOptions, TEST_TIMEOUT, TestServer, TestWorkerProcess, load, load_failure, load_request,
    make_sparse_model, raw_attach, raw_connection, send_raw, signal,
};

/// A server whose loader stops itself in the middle of loading this model.
fn stopped_load(
    bytes: u64,
) -> (TestServer, PathBuf, tokio::task::JoinHandle<Result<wire::Loaded, tonic::Status>>, i32) {
    let server =
        TestServer::start(ServerOptions { loader_stop_at: Some(bytes / 4), ..ServerOptions::default() });
    let path = server.path("big.gguf");
    make_sparse_model(&path, bytes);
    let loading = server.runtime.spawn(load(server.admin(), load_request("big", &path, false)));
    // Other children of the server may not have ended yet.
    let loader = server.wait_stopped_loader();
    (server, path, loading, loader)
}

fn assert_nothing_left(server: &TestServer) {
    let status = server.wait_status("an empty ledger", |status| status.generations.is_empty());
    let ledger = status.ledger.unwrap();
    assert_eq!((ledger.reserved_bytes, ledger.reserved_fds), (0, 0));
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", server.server_pid())).unwrap();
    let memfds = descriptors.filter(|entry| {
        let target = std::fs::read_link(entry.as_ref().unwrap().path()).unwrap_or_default();
        target.starts_with("/memfd:ballast")
    });
    assert_eq!(memfds.count(), 0);
    server.wait_status("the loader's end", |_| server.loaders().is_empty());
}

#[test]
fn killed_loader_fails_the_load_for_every_waiter_and_leaves_nothing() {
    let (server, _, loading, loader) = stopped_load(128 << 20);
    let socket = server.socket();
    let (report, reports) = std::sync::mpsc::channel();
    let early = std::thread::spawn(move || {
        let ask = crate::support::request("big");
        let attached =
            handoff::attach::attach(&socket, &ask, |progress| report.send(progress).unwrap_or_default());
        attached.unwrap_err().to_string()
    });
    reports.recv_timeout(TEST_TIMEOUT).unwrap();
    signal(loader, Signal::SIGKILL);
    let error = server.runtime.block_on(loading).unwrap().unwrap_err();
    assert_eq!(load_failure(&error), LoadFailure::LoaderLost);
    assert!(error.message().contains("killed by signal 9"), "{}", error.message());
    let refused = early.join().unwrap();
    assert!(refused.contains("killed by signal 9"), "{refused}");
    assert_nothing_left(&server);

    let small = server.make_model("small", &[10]);
    server.load("small", &small).unwrap();
}

#[test]
fn unload_cancels_a_running_load() {
    let (server, _, loading, _) = stopped_load(64 << 20);
    server.unload("big").unwrap();
    let error = server.runtime.block_on(loading).unwrap().unwrap_err();
    assert_eq!(load_failure(&error), LoadFailure::Unloaded);
    assert_nothing_left(&server);
}

#[test]
fn loader_exits_after_the_death_of_the_weight_server() {
    let (mut server, _, _loading, loader) = stopped_load(64 << 20);
    server.kill_server();
    signal(loader, Signal::SIGCONT);
    let deadline = Instant::now() + TEST_TIMEOUT;
    while Path::new(&format!("/proc/{loader}/exe")).exists() {
        assert!(Instant::now() < deadline, "the loader still runs");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn file_that_changes_during_the_load_fails_the_load() {
    type FileChange = fn(&Path);
    let changes: [(&str, FileChange); 3] = [
        ("touched", |path| {
            File::options().append(true).open(path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap()
        }),
        ("grown", |path| {
            std::io::Write::write_all(&mut File::options().append(true).open(path).unwrap(), b"x").unwrap()
        }),
        ("cut off", |path| File::options().write(true).open(path).unwrap().set_len(1 << 20).unwrap()),
    ];
    for (name, change) in changes {
        let (server, path, loading, loader) = stopped_load(64 << 20);
        change(&path);
        signal(loader, Signal::SIGCONT);
        let error = server.runtime.block_on(loading).unwrap().unwrap_err();
        assert_eq!(load_failure(&error), LoadFailure::FileChanged, "{name}: {}", error.message());
        assert!(error.message().contains("big.gguf changed while"), "{name}: {}", error.message());
        assert_nothing_left(&server);
    }
}

#[test]
fn bad_files_are_refused_with_specific_errors() {
    let server = TestServer::plain();
    let cut = server.make_model("cut", &[1000, 2000]);
    let bytes = std::fs::read(&cut).unwrap();
    std::fs::write(&cut, &bytes[..bytes.len() - 4000]).unwrap();
    let garbage = server.path("garbage.gguf");
    std::fs::write(&garbage, "PK\x03\x04 this is an archive").unwrap();
    let empty = server.path("empty.gguf");
    std::fs::write(&empty, "").unwrap();
    let fifo = server.path("fifo.gguf");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (path, failure, text) in [
        (cut, LoadFailure::ModelRefused, "tensor.1"),
        (garbage, LoadFailure::ModelRefused, "garbage.gguf"),
        (empty, LoadFailure::ModelRefused, "empty.gguf"),
        (fifo, LoadFailure::File, "not a regular file"),
        (server.path("absent.gguf"), LoadFailure::File, "No such file"),
        (server.directory.path().to_owned(), LoadFailure::File, "not a regular file"),
    ] {
        let error = server.load("m", &path).unwrap_err();
        assert_eq!(load_failure(&error), failure, "{}", error.message());
        assert!(error.message().contains(text), "{}", error.message());
        assert!(!error.message().contains('\n'));
    }
    assert_nothing_left(&server);
}

#[test]
fn out_of_memory_names_the_need_and_the_free_amount() {
    let server = TestServer::start(ServerOptions {
        config: "host-budget = \"16MiB\"".to_owned(),
        ..ServerOptions::default()
    });
    let path = server.path("m.gguf");
    make_sparse_model(&path, 32 << 20);
    let error = server.load("m", &path).unwrap_err();
    assert_eq!(load_failure(&error), LoadFailure::OutOfMemory);
    assert!(error.message().contains("of 16.0 MiB are free"), "{}", error.message());

    let server = TestServer::start(ServerOptions {
        config: "host-budget = \"1024TiB\"".to_owned(),
        ..ServerOptions::default()
    });
    let path = server.path("m.gguf");
    make_sparse_model(&path, 1 << 40);
    let error = server.load("m", &path).unwrap_err();
    assert_eq!(load_failure(&error), LoadFailure::OutOfMemory);
    assert!(error.message().contains("1.00 TiB are needed, the machine has"), "{}", error.message());
    assert_nothing_left(&server);
}

#[test]
fn file_size_limit_is_named_in_the_error() {
    let limits = format!("fsize={}", 4 << 20);
    let server = TestServer::start(ServerOptions { loader_limits: limits, ..ServerOptions::default() });
    let path = server.make_model("m", &[3 << 20]);
    let error = server.load("m", &path).unwrap_err();
    assert_eq!(load_failure(&error), LoadFailure::OutOfMemory);
    assert!(error.message().contains("RLIMIT_FSIZE"), "{}", error.message());
    assert_nothing_left(&server);
}

#[test]
fn descriptor_limits_are_named_in_the_error() {
    // The weight-server cannot hold so many: it refuses before anything is allocated.
    let server = TestServer::start(ServerOptions {
        server_limits: "nofile=400".to_owned(),
        ..ServerOptions::default()
    });
    let tensors = vec![16; 300];
    let path = server.make_model("m", &tensors);
    let error = server.load_with("m", &path, true).unwrap_err();
    assert_eq!(load_failure(&error), LoadFailure::OutOfFds);
    assert!(error.message().contains("301 file descriptors are needed"), "{}", error.message());
    assert_nothing_left(&server);
    server.load("m", &path).unwrap();

    // Only the loader's limit is too low.
    let server = TestServer::start(ServerOptions {
        loader_limits: "nofile=100".to_owned(),
        ..ServerOptions::default()
    });
    let path = server.make_model("m", &tensors);
    let error = server.load_with("m", &path, true).unwrap_err();
    assert_eq!(load_failure(&error), LoadFailure::OutOfFds);
    assert!(error.message().contains("RLIMIT_NOFILE"), "{}", error.message());
    assert_nothing_left(&server);
}

#[test]
fn start_failure_prints_one_line() {
    let taken = TestServer::plain();
    let long = tempfile::tempdir().unwrap();
    let long = long.path().join("x".repeat(100));
    std::fs::create_dir(&long).unwrap();
    for (directory, limits, code, text) in [
        (taken.directory.path().to_owned(), "", 6, "another weight-server runs in"),
        (long, "", 6, "107"),
        (taken.directory.path().to_owned(), "nofile=200", 4, "RLIMIT_NOFILE"),
        (taken.path("absent"), "", 1, "absent"),
    ] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "support::child_process", "--nocapture"])
            .env("BALLAST_TEST_ROLE", "server")
            .env("BALLAST_TEST_DIRECTORY", &directory)
            .env("BALLAST_TEST_SERVER_OPTIONS", "")
            .env("BALLAST_TEST_LIMITS", limits)
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.lines().count() == 1 && stderr.contains(text), "{stderr}");
    }
}

/// The reason of the refusal; the connection ends after it.
fn refused(connection: &Connection) -> RefusalReason {
    let reason = loop {
        let (frame, _) = connection.receive::<ServerFrame>().unwrap();
        if let Some(server_frame::Kind::Refused(refused)) = frame.kind {
            break refused.reason();
        }
    };
    assert!(matches!(connection.receive::<ServerFrame>(), Err(FrameError::Closed)));
    reason
}

#[test]
fn protocol_violations_are_refused_and_counted() {
    let (server, _) = TestServer::with_model(ServerOptions::default(), "m");
    let baseline = server.server_fds();
    let frame = |kind| wire::WorkerFrame { kind: Some(kind) };
    let detach = frame(worker_frame::Kind::Detach(wire::Detach {}));
    let receipt = frame(worker_frame::Kind::BatchReceived(wire::BatchReceived { batch: 0 }));
    type Attack<'a> = Box<dyn Fn(&Connection) + 'a>;
    let attacks: Vec<(&str, Attack<'_>)> = vec![
        ("sends descriptors", Box::new(|c| c.send(&raw_attach("m"), &[c.as_fd(); 100]).unwrap())),
        ("sends garbage", Box::new(|c| send_raw(c, &[0xff; 300]))),
        (
            "sends a partial frame",
            Box::new(|c| {
                let bytes = raw_attach("m").encode_to_vec();
                send_raw(c, &bytes[..bytes.len() - 3]);
            }),
        ),
        ("sends an oversized frame", Box::new(|c| send_raw(c, &vec![0x0a; MAX_FRAME_BYTES + 1]))),
        ("sends an unknown kind", Box::new(|c| send_raw(c, &[0x7a, 0x00]))),
        ("begins with a receipt", Box::new(|c| c.send(&receipt, &[]).unwrap())),
        ("begins with a detach", Box::new(|c| c.send(&detach, &[]).unwrap())),
        (
            "attaches twice",
            Box::new(|c| {
                c.send(&raw_attach("m"), &[]).unwrap();
                c.send(&raw_attach("m"), &[]).unwrap();
            }),
        ),
        (
            "acknowledges another batch",
            Box::new(|c| {
                c.send(&raw_attach("m"), &[]).unwrap();
                let other = wire::BatchReceived { batch: 7 };
                c.send(&frame(worker_frame::Kind::BatchReceived(other)), &[]).unwrap();
            }),
        ),
    ];
    for (count, (name, attack)) in (1..).zip(&attacks) {
        let connection = raw_connection(&server);
        attack(&connection);
        assert_eq!(refused(&connection), RefusalReason::Violation, "{name}");
        assert_eq!(server.status().violations, count, "{name}");
    }
    drop(server.attach("m").unwrap());
    // Connections with a grant keep their record and pidfd until this test process exits.
    let leases = server.status().leases.len();
    server.wait_status("closed descriptors", |_| server.server_fds() <= baseline + 2 + 3 * leases);
}

#[test]
fn other_protocol_and_manifest_versions_are_refused() {
    let (server, _) = TestServer::with_model(ServerOptions::default(), "m");
    type AttachChange = fn(&mut wire::Attach);
    let cases: [(AttachChange, RefusalReason); 3] = [
        (|attach| attach.protocol = 99, RefusalReason::Protocol),
        (|attach| attach.manifest_format = 0, RefusalReason::ManifestFormat),
        (|attach| attach.manifest_format = 99, RefusalReason::ManifestFormat),
    ];
    for (change, reason) in cases {
        let connection = raw_connection(&server);
        let mut frame = raw_attach("m");
        let Some(worker_frame::Kind::Attach(attach)) = &mut frame.kind else { panic!() };
        change(attach);
        connection.send(&frame, &[]).unwrap();
        assert_eq!(refused(&connection), reason);
    }
}

#[test]
fn silent_clients_do_not_block_others() {
    let server = TestServer::plain();
    let path = server.make_model("m", &vec![8; 300]);
    server.load_with("m", &path, true).unwrap();
    let stuck: Vec<Connection> = (0..8)
        .map(|_| {
            let connection = raw_connection(&server);
            connection.send(&raw_attach("m"), &[]).unwrap();
            connection
        })
        .collect();
    let silent: Vec<Connection> = (0..8).map(|_| raw_connection(&server)).collect();
    let started = Instant::now();
    server.worker("m", "").attached();
    // One after another the clients would take two minutes.
    assert!(started.elapsed() < TEST_TIMEOUT, "{:?}", started.elapsed());
    // Each silent client is disconnected in time. The lease of a stuck one lasts as long as this
    // process, which may have mapped something.
    for connection in silent {
        assert!(matches!(connection.receive::<ServerFrame>(), Err(FrameError::Closed)));
    }
    server.wait_status("the end of all waits", |status| {
        let state = |lease: &wire::Lease| lease.state() == wire::LeaseState::Disconnected;
        status.leases.iter().filter(|lease| state(lease)).count() == stuck.len()
    });
}

#[test]
fn dead_worker_releases_its_reservation() {
    let (server, _) = TestServer::with_model(ServerOptions::default(), "m");
    let before = server.status().ledger.unwrap();
    let mut worker = server.worker("m", "");
    let during = server.status().ledger.unwrap();
    assert_eq!(during.reserved_bytes - before.reserved_bytes, (1 << 20) + (1 << 10));
    worker.kill();
    let after = server.wait_status("the end of the lease", |status| status.leases.is_empty());
    assert_eq!(after.ledger.unwrap(), before);
    server.fd_store.wait_names(&["g1.a0", "g1.manifest"]);
}

#[test]
fn worker_that_dies_after_its_grant_releases_its_reservation() {
    let (server, _) = TestServer::with_model(ServerOptions::default(), "m");
    let before = server.status().ledger.unwrap();
    let mut taker = TestWorkerProcess::start(server.path("").as_path(), "taker", &[(MODEL, "m")]);
    assert_eq!(taker.greeting, "granted");
    let during = server.status().ledger.unwrap();
    assert_eq!(during.reserved_bytes - before.reserved_bytes, (1 << 20) + (1 << 10), "nothing is taken yet");
    taker.kill();
    let after = server.wait_status("the end of the lease", |status| status.leases.is_empty());
    assert_eq!(after.ledger.unwrap(), before);
    server.fd_store.wait_names(&["g1.a0", "g1.manifest"]);
}

#[test]
fn reservation_lasts_until_the_memory_is_known_to_be_unmapped() {
    let (server, _) = TestServer::with_model(ServerOptions::default(), "m");
    let mut worker = server.worker("m", "");
    assert_eq!(worker.command("sloppy"), "3 tensors left");
    let status = server.wait_status("the broken connection", |status| {
        status.leases[0].state() == wire::LeaseState::Disconnected
    });
    assert_eq!(status.ledger.unwrap().reservations.len(), 2);
    assert_eq!(server.unload("m").unwrap(), 1, "the worker still has it mapped");
    worker.kill();
    server.wait_status("the end of both", |status| status.leases.is_empty() && status.generations.is_empty());
}
