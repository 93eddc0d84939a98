// SPDX-License-Identifier: Apache-2.0

//! Fuzzes the frames that a worker receives: a weight-server sends any packets with any
//! descriptors. The attach ends with an error that can be printed, or maps what its manifest says.
//! No descriptor is left.
//!
//! An input is a length in two bytes, the contents of sealed memfds, and packets. A packet is a
//! byte that chooses the descriptors, a length in one byte, and the packet's bytes.

#![no_main]

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::LazyLock;

use handoff::attach::{AttachRequest, request_model};
use handoff::fd_passing::send_with_fds;
use handoff::seqpacket::{Connection, Listener};
use libfuzzer_sys::fuzz_target;
use memory::memfd::SealedMemfd;
use proto::weights::v1::WorkerFrame;

static SOCKET: LazyLock<PathBuf> =
    LazyLock::new(|| std::env::temp_dir().join(format!("ballast-fuzz-{}", std::process::id())));
static LISTENER: LazyLock<Listener> =
    LazyLock::new(|| Listener::bind(&SOCKET).expect("the socket can be bound"));

/// Sends the packets of the input, and closes the connection.
fn serve(connection: Connection, input: &[u8]) {
    let (length, rest) = input.split_first_chunk().unwrap_or((&[0; 2], &[]));
    let (contents, mut packets) = rest.split_at(usize::from(u16::from_le_bytes(*length)).min(rest.len()));
    let memfd = SealedMemfd::from_bytes("fuzz", contents).expect("a memfd can be made");
    let null = OwnedFd::from(File::open("/dev/null").expect("/dev/null opens"));
    let socket = UnixDatagram::from(OwnedFd::from(connection));
    while let [choice, length, rest @ ..] = packets {
        let (bytes, next) = rest.split_at(usize::from(*length).min(rest.len()));
        let sent = if choice & 4 == 0 { memfd.as_fd() } else { null.as_fd() };
        let fds: Vec<BorrowedFd<'_>> = (0..choice & 3).map(|_| sent).collect();
        if bytes.is_empty() || send_with_fds(&socket, bytes, &fds).is_err() {
            return;
        }
        packets = next;
    }
}

fn accept() -> Connection {
    loop {
        match LISTENER.accept() {
            Ok(connection) => return connection,
            Err(_) => std::thread::yield_now(),
        }
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc is there").count()
}

fn attach(input: &[u8]) {
    let request = AttachRequest {
        model: "m".to_owned(),
        device: "host".to_owned(),
        layout: 0,
        token: None,
        kv_bytes: 1,
        workspace_bytes: 1,
    };
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let connection = accept();
            connection.receive::<WorkerFrame>().expect("the worker asks first");
            serve(connection, input);
        });
        let granted = request_model(&SOCKET, &request, |_| {});
        if let Err(error) = granted.and_then(|granted| granted.import_host()) {
            assert!(!error.to_string().is_empty());
        }
        // Until its end: what a thread that is about to end still holds would count as a leak.
        server.join().expect("the server does not panic");
    });
}

fuzz_target!(
    init: {
        // The runtime of std would do it, but `main` is libFuzzer's.
        // SAFETY: no other thread runs yet, and ignoring a signal calls no code.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        LazyLock::force(&LISTENER);
        // Whatever the first attach opens for good is open.
        attach(&[]);
    },
    |input: &[u8]| {
        let before = open_descriptors();
        attach(input);
        assert_eq!(open_descriptors(), before, "descriptors are left");
    }
);
