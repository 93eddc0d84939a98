// SPDX-License-Identifier: Apache-2.0

//! Frames below gRPC: packets with descriptors on the hand-off socket, datagrams on the notify
//! sockets, and bytes on every socket of HTTP.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::time::Duration;

use bytes::Bytes;
use handoff::fd_passing::send_with_fds;
use prost::Message;
use proto::weights::v1::{Attach, BatchReceived, Detach, FdBatch, Reclaim, WorkerFrame, worker_frame::Kind};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};

use super::mutation::mutated;
use crate::harness::ServedFleet;
use crate::harness::random::SeededRandom;

/// A server that does not answer within this time waits for more.
const READ_TIMEOUT: Duration = Duration::from_millis(20);

/// Some frames on one connection, some of them with descriptors.
pub(super) fn to_hand_off(fleet: &ServedFleet, random: &mut SeededRandom) -> &'static str {
    let (seeds, null) = (hand_off_frames(), File::open("/dev/null").unwrap());
    let fd = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let path = fleet.runtime_dir().join("weights.sock");
    connect(&fd, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let packets = UnixDatagram::from(fd);
    packets.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
    packets.set_write_timeout(Some(READ_TIMEOUT)).unwrap();
    for _ in 0..=random.below(3) {
        let descriptors = vec![null.as_fd(); random.below(4) * random.below(2)];
        // The weight-server may have closed the connection.
        let _ = send_with_fds(&packets, &mutated(random, &seeds), &descriptors);
        let _ = packets.recv(&mut [0; 4096]);
    }
    "the hand-off socket"
}

fn hand_off_frames() -> Vec<Vec<u8>> {
    let attach = Attach {
        protocol: handoff::PROTOCOL_VERSION,
        device: "host".into(),
        model: "pycoder-7m-q8_0".into(),
        token: Bytes::from_static(&[7; 32]),
        kv_bytes: 1 << 20,
        workspace_bytes: 1 << 20,
        ..Attach::default()
    };
    let reclaim = Reclaim {
        protocol: handoff::PROTOCOL_VERSION,
        generation: 1,
        lease: 1,
        token: Bytes::from_static(&[7; 32]),
        digest: Bytes::from_static(&[9; 32]),
        device: "host".into(),
        fds: 2,
        ..Reclaim::default()
    };
    let kinds = [
        Kind::Attach(attach),
        Kind::Reclaim(reclaim),
        Kind::BatchReceived(BatchReceived { batch: 0 }),
        Kind::Fds(FdBatch { batch: 0, first: 0, count: 2 }),
        Kind::Detach(Detach {}),
    ];
    kinds.map(|kind| WorkerFrame { kind: Some(kind) }.encode_to_vec()).into()
}

/// Messages of the notify protocol from a process that is no child.
pub(super) fn to_notify_sockets(fleet: &ServedFleet, random: &mut SeededRandom) -> &'static str {
    let seeds = [
        "READY=1\nSTATUS=serving",
        "WATCHDOG=trigger",
        "STOPPING=1",
        "EXTEND_TIMEOUT_USEC=18446744073709551615",
        "FDSTORE=1\nFDNAME=g1.manifest\nFDPOLL=0",
        "FDSTOREREMOVE=1\nFDNAME=g1.manifest",
        "BARRIER=1",
        "ADOPT=1\nATTACH_TOKEN=0707070707070707070707070707070707070707070707070707070707070707",
    ];
    let seeds = seeds.map(|text| text.as_bytes().to_vec());
    let entries = std::fs::read_dir(fleet.runtime_dir()).unwrap().flatten().map(|entry| entry.path());
    let mut sockets: Vec<_> = entries
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("notify-")))
        .collect();
    sockets.sort();
    let (null, socket) = (File::open("/dev/null").unwrap(), UnixDatagram::unbound().unwrap());
    socket.set_write_timeout(Some(READ_TIMEOUT)).unwrap();
    socket.connect(random.pick(&sockets)).unwrap();
    let descriptors = vec![null.as_fd(); random.below(4) * random.below(2)];
    let _full = send_with_fds(&socket, &mutated(random, &seeds), &descriptors);
    "the notify sockets"
}

/// Bytes on a socket that speaks HTTP.
pub(super) fn to_stream_sockets(fleet: &ServedFleet, random: &mut SeededRandom) -> &'static str {
    let sockets = ["supervisor.sock", "weights-admin.sock", "worker-0.sock", "worker-1.sock", "router.sock"];
    let bytes = mutated(random, &http_requests());
    let index = random.below(sockets.len() + 3);
    match sockets.get(index) {
        Some(name) => {
            let stream = UnixStream::connect(fleet.runtime_dir().join(name)).unwrap();
            stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
            exchange(stream, &bytes);
        }
        None => {
            let stream = TcpStream::connect(fleet.http.strip_prefix("http://").unwrap()).unwrap();
            stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
            exchange(stream, &bytes);
        }
    }
    "the sockets of HTTP/1 and HTTP/2"
}

fn exchange(mut stream: impl Read + Write, bytes: &[u8]) {
    let _closed = stream.write_all(bytes);
    let _silent = stream.read(&mut [0; 1024]);
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn http_requests() -> Vec<Vec<u8>> {
    let body = r#"{"prompt": "def f(", "max_tokens": 4, "stop": ["x"], "logprobs": 2, "temperature": 0.5}"#;
    let post = |path: &str, body: &str| {
        format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())
            .into_bytes()
    };
    let chat = r#"{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}"#;
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    };
    let settings = frame(4, 0, 0, &[]);
    let headers = frame(1, 4, 1, &[0x83, 0x86, 0x84, 0x41, 0x01, b'x']);
    let frames = [
        headers.clone(),
        frame(0, 1, 1, b"data"),
        frame(3, 0, 1, &[0, 0, 0, 8]),
        frame(6, 0, 0, &[1; 8]),
        frame(7, 0, 0, &[0; 8]),
        frame(8, 0, 0, &[0x7f, 0xff, 0xff, 0xff]),
        frame(9, 4, 1, &[0x82]),
        frame(4, 0, 0, &[0, 4, 0xff, 0xff, 0xff, 0xff]),
    ];
    let mut requests = vec![
        post("/v1/completions", body),
        post("/v1/chat/completions", chat),
        b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n".to_vec(),
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"a\":\r\n0\r\n\r\n".to_vec(),
        [PREFACE, &settings, &frames.concat()].concat(),
    ];
    requests.extend(frames.map(|frame| [PREFACE, &settings, &headers, &frame].concat()));
    requests
}
