// SPDX-License-Identifier: Apache-2.0

//! Fuzzes the weight-server with workers that send any frames in any order, with any descriptors,
//! and end at any time. After every event its invariants hold. When all processes have ended and
//! all models are unloaded, no reservation and no descriptor is left.
//!
//! An input is a byte of options, then steps: a byte that chooses what is done, a byte that chooses
//! the connection, and the step's own bytes, of which missing ones are 0. Zeroes are what a right
//! worker sends.

#![no_main]

mod held_model;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use bytes::Bytes;
use handoff::PROTOCOL_VERSION;
use handoff::fd_batches::fd_batches;
use handoff::fd_passing::send_with_fds;
use handoff::manifest::MANIFEST_FORMAT;
use handoff::seqpacket::{Connection, FrameError};
use held_model::HeldModel;
use libfuzzer_sys::fuzz_target;
use proto::weights::v1::{self as wire, ServerFrame, WorkerFrame, server_frame, worker_frame};
use weight_server::fuzzing::{FuzzedServer, HOST_BYTES};

const CONNECTIONS: usize = 6;
const PIDS: [i32; 3] = [100, 101, 102];
const TOKENS: [&[u8]; 4] = [b"", &[7; 32], &[8; 32], &[9; 300]];
const MODELS: [&str; 4] = ["m", "n", "", "absent"];
const DEVICES: [&str; 4] = ["host", "host:0", "GPU-01010101-0101-0101-0101-010101010101", ""];
const SIZES: [u64; 6] = [0, 1, 1 << 20, HOST_BYTES - 1, HOST_BYTES, u64::MAX];
const HIGHEST_IDS: [u64; 5] = [0, u64::MAX / 2, u64::MAX / 2 + 1, u64::MAX - 1, u64::MAX];
const COUNTS: [u32; 6] = [0, 1, 2, 3, 4096, u32::MAX];
/// Frames that a worker reads at once. A grant of three descriptors has two.
const FRAMES_MAX: usize = 4;

/// The first one is resident. The second has the same number, and so have the last two.
static HELD: LazyLock<[HeldModel; 4]> = LazyLock::new(|| {
    [(1, "m", 1), (1, "m", 2), (2, "n", 3), (2, "n", 4)]
        .map(|(generation, model, fill)| HeldModel::new(generation, model, fill))
});

struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.byte()) % from.len()]
    }

    fn bytes(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        bytes
    }
}

struct Worker {
    connection: Connection,
    /// The same connection, for packets that are not frames.
    socket: UnixDatagram,
}

struct FuzzedWorkers<'a> {
    script: Script<'a>,
    server: FuzzedServer,
    workers: [Option<Worker>; CONNECTIONS],
    /// Numbers of leases that were granted.
    leases: Vec<u64>,
}

impl FuzzedWorkers<'_> {
    fn step(&mut self) {
        let action = self.script.byte() % 16;
        let place = usize::from(self.script.byte()) % CONNECTIONS;
        match action {
            0 => self.connect(place),
            1 => self.attach(place),
            2 => self.receive_all(place),
            3 => self.reclaim(place),
            4 => self.give_back(place),
            5 => self.send(place, worker_frame::Kind::Detach(wire::Detach {}), &[]),
            6 => self.workers[place] = None,
            7 => self.send_batch(place),
            8 => {
                let batch = self.script.pick(&COUNTS);
                self.send(place, worker_frame::Kind::BatchReceived(wire::BatchReceived { batch }), &[]);
            }
            9 => drop(self.receive(place)),
            10 => self.send_packet(place),
            11 => self.server.end_process(PIDS[place % PIDS.len()]),
            12 => self.server.unload(MODELS[place % MODELS.len()]),
            13 => match self.script.pick(&[true, false]) {
                true => self.server.allow_token(MODELS[place % 2], TOKENS[1 + place % 2]),
                false => self.server.forget_token(MODELS[place % 2]),
            },
            14 => {
                let seconds = self.script.pick(&[1, 3, 11, 31]);
                self.server.elapse(Duration::from_secs(seconds));
            }
            _ => self.server.replace_supervisor(),
        }
        self.server.settle();
    }

    fn connect(&mut self, place: usize) {
        let connection = self.server.connect(PIDS[place % PIDS.len()]);
        connection.set_nonblocking().expect("a socket can be set non-blocking");
        let socket = OwnedFd::from(connection.try_clone().expect("a descriptor is free"));
        self.workers[place] = Some(Worker { connection, socket: UnixDatagram::from(socket) });
    }

    fn worker(&mut self, place: usize) -> &Worker {
        if self.workers[place].is_none() {
            self.connect(place);
        }
        self.workers[place].as_ref().expect("the worker has just connected")
    }

    /// A frame that cannot be sent is lost: the server has closed the connection.
    fn send(&mut self, place: usize, kind: worker_frame::Kind, fds: &[BorrowedFd<'_>]) {
        let _ = self.worker(place).connection.send(&WorkerFrame { kind: Some(kind) }, fds);
    }

    fn send_packet(&mut self, place: usize) {
        let (bytes, fds) = (self.script.bytes(), self.script.pick(&[0, 1, 2]));
        let _ = send_with_fds(&self.worker(place).socket, bytes, &HELD[2].fds()[..fds]);
    }

    fn attach(&mut self, place: usize) {
        let script = &mut self.script;
        let attach = wire::Attach {
            model: script.pick(&MODELS).to_owned(),
            token: Bytes::from_static(script.pick(&TOKENS)),
            kv_bytes: script.pick(&SIZES),
            workspace_bytes: script.pick(&SIZES),
            device: script.pick(&DEVICES).to_owned(),
            layout: script.pick(&[0, 0, 0, 1]),
            manifest_format: script.pick(&[MANIFEST_FORMAT, MANIFEST_FORMAT + 1, 0, u32::MAX]),
            protocol: script.pick(&[PROTOCOL_VERSION, PROTOCOL_VERSION, 0, u32::MAX]),
        };
        self.send(place, worker_frame::Kind::Attach(attach), &[]);
    }

    fn reclaim(&mut self, place: usize) {
        let script = &mut self.script;
        let held = &HELD[usize::from(script.byte()) % HELD.len()];
        let lease = match script.byte() {
            highest @ 250.. => HIGHEST_IDS[usize::from(highest - 250) % HIGHEST_IDS.len()],
            low @ 128.. => u64::from(low - 128),
            granted => self.leases.get(usize::from(granted)).copied().unwrap_or(u64::from(granted) + 1),
        };
        let generation = match script.byte() {
            0..128 => held.generation,
            highest @ 250.. => HIGHEST_IDS[usize::from(highest - 250) % HIGHEST_IDS.len()],
            low => u64::from(low - 128),
        };
        let fds = held.fds().len() as u32;
        let claim = wire::Reclaim {
            generation,
            lease,
            token: Bytes::from_static(script.pick(&TOKENS)),
            kv_bytes: script.pick(&SIZES),
            workspace_bytes: script.pick(&SIZES),
            fds: script.pick(&[fds, fds, fds, fds, 0, 1, 2, 4, 4096, u32::MAX]),
            digest: script.pick(&[&held.digest, &held.digest, &HELD[0].digest, &Bytes::new()]).clone(),
            manifest_inode: script.pick(&[held.manifest_inode, held.manifest_inode, 0, u64::MAX]),
            device: script.pick(&DEVICES).to_owned(),
            protocol: script.pick(&[PROTOCOL_VERSION, PROTOCOL_VERSION, 0, u32::MAX]),
        };
        self.send(place, worker_frame::Kind::Reclaim(claim), &[]);
    }

    /// Sends a whole generation, whether it was asked for or not.
    fn give_back(&mut self, place: usize) {
        let held = &HELD[usize::from(self.script.byte()) % HELD.len()];
        for batch in fd_batches(held.fds().len() as u32) {
            self.send(place, worker_frame::Kind::Fds(batch), &held.fds());
        }
    }

    /// Sends a batch whose numbers need not fit its descriptors.
    fn send_batch(&mut self, place: usize) {
        let script = &mut self.script;
        let (batch, first, count) = (script.pick(&COUNTS), script.pick(&COUNTS), script.pick(&COUNTS));
        let held = &HELD[usize::from(script.byte()) % HELD.len()];
        let other = &HELD[usize::from(script.byte()) % HELD.len()];
        let mut fds = held.fds();
        fds.truncate(script.pick(&[3, 2, 1, 0]));
        fds.extend(other.fds().into_iter().skip(script.pick(&[3, 2, 1, 0])));
        self.send(place, worker_frame::Kind::Fds(wire::FdBatch { batch, first, count }), &fds);
    }

    /// Takes frames as a right worker does, which acknowledges each batch.
    fn receive_all(&mut self, place: usize) {
        for _ in 0..FRAMES_MAX {
            let Some(kind) = self.receive(place) else { return };
            if let server_frame::Kind::Fds(batch) = kind {
                let receipt = wire::BatchReceived { batch: batch.batch };
                self.send(place, worker_frame::Kind::BatchReceived(receipt), &[]);
            }
            self.server.settle();
        }
    }

    fn receive(&mut self, place: usize) -> Option<server_frame::Kind> {
        let worker = self.workers[place].as_ref()?;
        match worker.connection.receive::<ServerFrame>() {
            Ok((frame, fds)) => {
                let kind = frame.kind.expect("the server sends frames of a known kind");
                match &kind {
                    server_frame::Kind::Grant(grant) => self.leases.push(grant.lease),
                    server_frame::Kind::Refused(refused) => assert!(!refused.text.is_empty()),
                    _ => {}
                }
                let count = if let server_frame::Kind::Fds(batch) = &kind { batch.count } else { 0 };
                assert_eq!(fds.len(), count as usize, "descriptors beside {kind:?}");
                Some(kind)
            }
            Err(FrameError::NotReady) => None,
            Err(_) => {
                self.workers[place] = None;
                None
            }
        }
    }
}

fn run(input: &[u8]) {
    let mut script = Script(input);
    let options = script.byte();
    let awaited: &[i32] = if options & 2 == 0 { &[] } else { &PIDS[..1] };
    let server = FuzzedServer::start(HELD[0].duplicates(), options & 1 != 0, awaited);
    let mut fuzzed =
        FuzzedWorkers { script, server, workers: [const { None }; CONNECTIONS], leases: Vec::new() };
    while !fuzzed.script.0.is_empty() {
        fuzzed.step();
    }
    let FuzzedWorkers { server, workers, .. } = fuzzed;
    drop(workers);
    server.finish();
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc is there").count()
}

fuzz_target!(
    init: {
        // The runtime of std would do it, but `main` is libFuzzer's.
        // SAFETY: no other thread runs yet, and ignoring a signal calls no code.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        // Whatever the first run opens for good is open.
        run(&[]);
    },
    |input: &[u8]| {
        let before = open_descriptors();
        run(input);
        // The runtime's threads may end a moment after it.
        let deadline = Instant::now() + Duration::from_secs(5);
        while open_descriptors() > before {
            assert!(Instant::now() < deadline, "descriptors are left");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
);
