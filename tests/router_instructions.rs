// SPDX-License-Identifier: Apache-2.0

//! Instructions that the router executes for a token and for a request, counted by callgrind, and
//! their budget. Unlike times, they do not depend on what else the machine does.
//!
//! The real router stands between a worker and clients of this process. All streams get one token
//! at a time and all clients read it before the next one, as in decode: no frames are read
//! together.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use proto::v1::inference_client::InferenceClient;
use serde::Deserialize;

use crate::harness::api::runtime;
use crate::harness::in_tree;
use crate::harness::lone_router::{LoneRouter, ReadStream};
use crate::harness::proc;

/// A figure may exceed its budget by this part. Two runs differ by 1%, two versions of glibc by
/// some more.
const MARGIN: f64 = 0.10;
/// Instructions of a window should be many times those of the router's periodic work.
const STEPS_OF_ONE_STREAM: usize = 400;
const STEPS: usize = 30;
const STREAMS: usize = 64;
const REQUESTS: usize = 60;

/// `tests/data/router_instructions.toml`.
#[derive(Deserialize)]
struct Budget {
    figures: toml::Table,
}

/// A router that callgrind watches.
struct CountedRouter {
    router: LoneRouter,
    /// Instructions per second of work that does not depend on requests.
    idle_rate: f64,
}

fn callgrind(folder: &Path) -> Command {
    // The number of the runtime's threads decides how often one wakes another: one processor, one
    // thread, on every machine.
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", &an_allowed_processor(), "valgrind", "--tool=callgrind"]);
    command.args(["--instr-atstart=no", "--error-limit=no", "--quiet"]);
    command.arg(format!("--callgrind-out-file={}/callgrind.out", folder.display()));
    command.arg(format!("--vgdb-prefix={}/vgdb", folder.display()));
    command
}

fn an_allowed_processor() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    list.trim().split([',', '-']).next().unwrap().to_owned()
}

impl CountedRouter {
    fn start() -> Self {
        let limits = "streams-max = 4096\n";
        let router = LoneRouter::start(limits, |folder| Some(callgrind(folder)));
        let counted = Self { router, idle_rate: 0.0 };
        counted.order("instrumentation on");
        let begin = Instant::now();
        let idle = counted.count("idle", || std::thread::sleep(std::time::Duration::from_secs(2)));
        Self { idle_rate: idle / begin.elapsed().as_secs_f64(), ..counted }
    }

    fn order(&self, words: &str) {
        let folder = self.router.runtime_dir();
        let mut command = Command::new("vgdb");
        command.arg(format!("--vgdb-prefix={}/vgdb", folder.display()));
        command.arg(format!("--pid={}", self.router.pid())).args(words.split(' '));
        let output = command.output().unwrap();
        assert!(output.status.success(), "vgdb {words}: {output:?}");
    }

    /// The instructions of the router during `work`, less those of its periodic work.
    fn count(&self, what: &str, work: impl FnOnce()) -> f64 {
        self.order("zero");
        let (before, begin) = (self.profiles(), Instant::now());
        work();
        let periodic = self.idle_rate * begin.elapsed().as_secs_f64();
        self.order("dump");
        let new = self.profiles().into_iter().find(|path| !before.contains(path));
        let profile = new.unwrap_or_else(|| panic!("{what}: no profile"));
        let text = std::fs::read_to_string(&profile).unwrap();
        if let Some(folder) = std::env::var_os("BALLAST_TEST_PROFILES") {
            std::fs::copy(&profile, Path::new(&folder).join(what.replace([' ', ','], "-"))).unwrap();
        }
        let total = text.lines().find_map(|line| line.strip_prefix("totals: ")).unwrap();
        total.trim().parse::<f64>().unwrap() - periodic
    }

    fn profiles(&self) -> Vec<PathBuf> {
        let entries =
            std::fs::read_dir(self.router.runtime_dir()).unwrap().map(|entry| entry.unwrap().path());
        entries
            .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("callgrind.out."))
            .collect()
    }
}

/// How clients call the router.
#[derive(Clone, Copy, PartialEq)]
enum Api {
    Completions,
    Chat,
    Grpc,
}

const APIS: [(Api, &str); 3] = [(Api::Completions, "completions"), (Api::Chat, "chat"), (Api::Grpc, "gRPC")];

/// Clients whose connections are open.
struct Clients {
    http: reqwest::Client,
    grpc: InferenceClient<tonic::transport::Channel>,
}

impl Clients {
    async fn connect(router: &LoneRouter) -> Self {
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        Self { http, grpc: InferenceClient::connect(router.url.clone()).await.unwrap() }
    }

    async fn open(&mut self, router: &LoneRouter, api: Api, tokens: usize) -> ReadStream {
        let path = match api {
            Api::Grpc => {
                return ReadStream::Grpc(router.generate(&mut self.grpc, tokens as u32, "").await);
            }
            Api::Completions => "/v1/completions",
            Api::Chat => "/v1/chat/completions",
        };
        ReadStream::Http(router.post(&self.http, path, tokens as u32, "").await)
    }
}

/// Reads the next token of each stream, then lets the worker compute one.
async fn steps(router: &LoneRouter, streams: &mut [ReadStream], steps: usize) {
    for _ in 0..steps {
        router.worker.step();
        for stream in &mut *streams {
            stream.token().await;
        }
    }
}

/// The name of a figure, and its value.
type CountedFigure = (String, f64);

fn instructions_per_token(
    counted: &CountedRouter,
    (api, name): (Api, &str),
    streams: usize,
) -> CountedFigure {
    let measured = if streams == 1 { STEPS_OF_ONE_STREAM } else { STEPS };
    // The first steps grow buffers to their size.
    let warm_up = 8;
    let (router, runtime) = (&counted.router, runtime());
    let (_clients, mut open) = runtime.block_on(async {
        let mut clients = Clients::connect(router).await;
        let mut open = Vec::new();
        for _ in 0..streams {
            let mut stream = clients.open(router, api, 1 + warm_up + measured).await;
            stream.token().await;
            open.push(stream);
        }
        steps(router, &mut open, warm_up).await;
        (clients, open)
    });
    let what = format!("token, {name}, {streams} at once");
    let count = counted.count(&what, || runtime.block_on(steps(router, &mut open, measured)));
    runtime.block_on(async {
        for stream in &mut open {
            stream.end().await;
        }
    });
    (what, count / (measured * streams) as f64)
}

/// A request with one token, on an open connection.
fn instructions_per_request(counted: &CountedRouter, (api, name): (Api, &str)) -> CountedFigure {
    let (router, runtime) = (&counted.router, runtime());
    let requests = async |clients: &mut Clients, count: usize| {
        for _ in 0..count {
            let mut stream = clients.open(router, api, 1).await;
            stream.token().await;
            stream.end().await;
        }
    };
    let mut clients = runtime.block_on(async {
        let mut clients = Clients::connect(router).await;
        requests(&mut clients, 10).await;
        clients
    });
    let what = format!("request, {name}");
    let count = counted.count(&what, || runtime.block_on(requests(&mut clients, REQUESTS)));
    (what, count / REQUESTS as f64)
}

/// Counts all figures and compares them with their budget.
#[test]
#[ignore = "counts instructions of a release build; a step of .ci/run"]
fn the_router_stays_within_its_budget_of_instructions() {
    let has_valgrind = Command::new("valgrind").arg("--version").output().is_ok_and(|it| it.status.success());
    assert!(has_valgrind, "install valgrind: without it, the router's instructions are not counted");
    let counted = CountedRouter::start();
    assert!(proc::is_alive(counted.router.pid()));
    eprintln!("measured: {:.0} instructions a second without requests", counted.idle_rate);
    let mut figures = Vec::new();
    for api in APIS {
        figures.extend([1, STREAMS].map(|streams| instructions_per_token(&counted, api, streams)));
        figures.push(instructions_per_request(&counted, api));
    }
    let text = std::fs::read_to_string(in_tree("tests/data/router_instructions.toml")).unwrap();
    let budget: Budget = toml::from_str(&text).unwrap();
    let mut exceeded = Vec::new();
    for (name, count) in &figures {
        let allowed = budget.figures.get(name).and_then(toml::Value::as_integer);
        let allowed = allowed.unwrap_or_else(|| panic!("no budget for {name:?}: {count:.0} instructions"));
        let ratio = count / allowed as f64;
        eprintln!("measured: {name}: {count:.0} instructions, {ratio:.3} of the budget");
        if ratio > 1.0 + MARGIN {
            exceeded.push(format!("{name}: {count:.0} instructions, the budget is {allowed}"));
        }
        if ratio < 1.0 - MARGIN {
            eprintln!("lower the budget of {name:?} in tests/data/router_instructions.toml to {count:.0}");
        }
    }
    assert!(exceeded.is_empty(), "the router needs more instructions than its budget: {exceeded:#?}");
}
