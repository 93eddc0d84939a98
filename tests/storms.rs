// SPDX-License-Identifier: Apache-2.0

//! Many faults or many clients at once: processes that die as soon as they start, 10,000
//! connections, and silent clients of the hand-off socket.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use proto::weights::v1::Status;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use serde_json::json;

use crate::harness::admin::try_weight_server_status;
use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, eventually, proc};

fn request(seed: u64) -> TestRequest {
    TestRequest {
        prompt: (0..20).map(|i| 10 + i * 13 + seed as u32).collect(),
        max_tokens: 40,
        temperature: 0.7,
        seed,
        ..TestRequest::default()
    }
}

fn requests() -> Vec<TestRequest> {
    (0..4).map(request).collect()
}

/// What a fleet of three workers keeps through a storm of restarts.
struct Baseline {
    status: Status,
    /// Of supervisor and weight-server, which keep the descriptors of the weights.
    descriptors: [usize; 2],
    answers: Vec<Vec<u32>>,
}

fn weight_server_status(fleet: &ServedFleet) -> Status {
    eventually("the weight-server answers", || runtime().block_on(try_weight_server_status(fleet)))
}

fn descriptors(fleet: &ServedFleet) -> [usize; 2] {
    [fleet.supervisor.id(), fleet.only_process("weight-server").pid].map(|pid| proc::open_files(pid).len())
}

fn answers(fleet: &ServedFleet) -> Vec<Vec<u32>> {
    eventually("requests are served", || {
        let found = runtime().block_on(generate_all(&fleet.grpc, &requests()));
        found.into_iter().map(|one| Some(one.ok()?.tokens)).collect()
    })
}

impl Baseline {
    fn of(fleet: &ServedFleet) -> Self {
        let answers = answers(fleet);
        Self { status: weight_server_status(fleet), descriptors: descriptors(fleet), answers }
    }

    /// All processes are back, no weights were read again, and nothing is left of the dead.
    fn check(&self, fleet: &ServedFleet) {
        eventually("all processes are back", || {
            let processes = fleet.try_processes()?;
            processes.iter().all(|process| process.state == "ready").then_some(())
        });
        assert_eq!(answers(fleet), self.answers);
        let reserved = |status: &Status| status.ledger.as_ref().map(|ledger| ledger.reserved_bytes);
        eventually("leases and descriptors are at their baseline", || {
            let now = weight_server_status(fleet);
            let generation = |status: &Status| status.generations[0].generation;
            assert_eq!(generation(&now), generation(&self.status), "the weights were loaded again");
            let is_back = now.leases.len() == 3
                && reserved(&now) == reserved(&self.status)
                && descriptors(fleet).iter().zip(&self.descriptors).all(|(now, before)| *now <= before + 2);
            is_back.then_some(())
        });
    }
}

/// Kills every process of the role as soon as it runs, for 4 s.
fn storm(fleet: &ServedFleet, role: &str) {
    let mark = format!("{}/", fleet.runtime_dir().display());
    let has_role = |pid: &u32| proc::arguments(*pid).get(1).is_some_and(|first| first == role);
    let end = Instant::now() + Duration::from_secs(4);
    let mut killed = 0;
    while Instant::now() < end {
        for pid in proc::processes_with_argument(&mark).into_iter().filter(has_role) {
            proc::send_signal(pid, "KILL");
            killed += 1;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    eprintln!("measured: a storm of restarts killed a {role} {killed} times");
    assert!(killed > 3, "the storm killed a {role} {killed} times");
}

#[test]
fn i1_a_storm_of_restarts_reads_no_weights_again_and_leaves_nothing() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "3", "--threads", "1"]);
    let baseline = Baseline::of(&fleet);
    for role in ["worker", "router"] {
        storm(&fleet, role);
        baseline.check(&fleet);
    }
    fleet.stop();
}

/// A weight-server that crashes again and again is started at most 5 s later.
#[test]
fn i3_a_storm_of_weight_servers_disturbs_no_stream_and_ends_within_seconds() {
    const BACKOFF_MAX: Duration = Duration::from_secs(5);
    /// To start and to adopt the weights on a busy machine.
    const START: Duration = Duration::from_secs(5);
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "3", "--threads", "1"]);
    let baseline = Baseline::of(&fleet);
    let long: Vec<TestRequest> =
        requests().into_iter().map(|one| TestRequest { max_tokens: 900, ..one }).collect();
    let expected = runtime().block_on(generate_all(&fleet.grpc, &long));
    let found = runtime().block_on(fleet.generate_during_fault(&long, || storm(&fleet, "weight-server")));
    let ended = Instant::now();
    for (expected, found) in expected.iter().zip(&found) {
        assert_eq!(expected.as_ref().unwrap(), found.as_ref().unwrap(), "a stream was disturbed");
    }
    eventually("the weight-server is back", || {
        (fleet.only_process("weight-server").state == "ready").then_some(())
    });
    let took = ended.elapsed();
    eprintln!("measured: the weight-server is back {took:?} after the storm");
    assert!(took < BACKOFF_MAX + START, "the weight-server was back after {took:?}");
    baseline.check(&fleet);
    fleet.stop();
}

#[test]
fn i7_ten_thousand_connections_are_bounded_and_delay_no_request() {
    const CONNECTIONS: usize = 10_000;
    /// `address-connections-max`, and what the router has open besides.
    const ROUTER_DESCRIPTORS_MAX: usize = 1024 + 100;
    if !proc::allow_descriptors(CONNECTIONS as u64 + 2000) {
        crate::harness::report_skipped(format_args!("this process may not open {CONNECTIONS} connections"));
        return;
    }
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let router = fleet.only_process("router").pid;
    let before = proc::open_files(router).len();
    let address = fleet.http.strip_prefix("http://").unwrap();
    let connections: Vec<TcpStream> =
        (0..CONNECTIONS).filter_map(|_| TcpStream::connect(address).ok()).collect();
    assert_eq!(connections.len(), CONNECTIONS, "a connection was refused");
    let begin = Instant::now();
    let http = HttpClient::connect(&fleet);
    http.post_json("/v1/completions", &json!({"prompt": "import ", "max_tokens": 4}));
    eprintln!("measured: a request beside {CONNECTIONS} connections takes {:?}", begin.elapsed());
    let open = proc::open_files(router);
    if open.len() >= ROUTER_DESCRIPTORS_MAX {
        std::thread::sleep(Duration::from_secs(1));
        let later = proc::open_files(router);
        let (count, kinds, later) = (open.len(), kinds(&open), kinds(&later));
        panic!("the router has {count} descriptors: {kinds:?}, and a second later {later:?}");
    }
    drop(connections);
    eventually("the connections are closed", || (proc::open_files(router).len() <= before + 8).then_some(()));
    fleet.stop();
}

/// How many descriptors there are of each kind: `socket`, `anon_inode`, or a path.
fn kinds(files: &[String]) -> BTreeMap<&str, usize> {
    let mut kinds = BTreeMap::new();
    for file in files {
        *kinds.entry(file.split(':').next().unwrap_or(file)).or_default() += 1;
    }
    kinds
}

#[test]
fn i7_silent_clients_of_the_hand_off_delay_an_attach_for_a_bounded_time() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let path = fleet.runtime_dir().join("weights.sock");
    let silent = || -> OwnedFd {
        let fd = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&fd, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        fd
    };
    let clients: Vec<OwnedFd> = (0..400).map(|_| silent()).collect();
    let victim = fleet.only_process("worker");
    proc::send_signal(victim.pid, "KILL");
    let begin = Instant::now();
    eventually("a new worker serves", || {
        let workers = fleet.processes_by_role("worker");
        workers.into_iter().find(|worker| worker.pid != victim.pid && worker.state == "ready")
    });
    let http = HttpClient::connect(&fleet);
    eventually("requests are served", || (http.get("/ready").0 == 200).then_some(()));
    eprintln!("measured: an attach beside {} silent clients takes {:?}", clients.len(), begin.elapsed());
    drop(clients);
    fleet.stop();
}
