// SPDX-License-Identifier: Apache-2.0

//! A weight-server in a process of its own, with a fake FD store, generated models, and workers
//! that can be killed.
//!
//! There is no `ballast` executable here. The test executable starts itself, and [`child_process`]
//! becomes the role that the environment names.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use handoff::AttachModelError;
use handoff::attach::{AttachRequest, AttachedModel, attach, request_model};
use proto::weights::v1 as wire;
use proto::weights::v1::weight_server_client::WeightServerClient;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::Status;
use tonic::transport::Channel;
use weight_server::{LoaderProgram, WeightServerConfig};

use crate::fake_fd_store::FakeFdStore;

/// Ten times what any test here takes on an idle machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) const ROLE: &str = "BALLAST_TEST_ROLE";
pub(crate) const DIRECTORY: &str = "BALLAST_TEST_DIRECTORY";
pub(crate) const MODEL: &str = "BALLAST_TEST_MODEL";
const TOKEN: &str = "BALLAST_TEST_TOKEN";
const SERVER_OPTIONS: &str = "BALLAST_TEST_SERVER_OPTIONS";
/// Resource limits that a role sets for itself: "fsize=N" or "nofile=N".
const LIMITS: &str = "BALLAST_TEST_LIMITS";
/// A loader stops itself (SIGSTOP) when this many bytes of shared memory are resident.
const STOP_AT: &str = "BALLAST_TEST_STOP_AT";

/// Becomes another process if the environment names a role. Otherwise the test passes at once.
#[test]
fn child_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    apply_limits();
    match role.as_str() {
        "server" => become_server(),
        "loader" => become_loader(),
        "worker" => become_worker(),
        "taker" => become_taker(),
        "gpu-worker" => crate::gpu::become_worker(),
        other => panic!("unknown role {other}"),
    }
}

fn own_arguments() -> Vec<String> {
    ["--exact", "support::child_process", "--nocapture", "--test-threads=1"].map(str::to_owned).into()
}

fn apply_limits() {
    use nix::sys::resource::{Resource, setrlimit};
    let Ok(limits) = std::env::var(LIMITS) else { return };
    for limit in limits.split(',').filter(|limit| !limit.is_empty()) {
        let (name, value) = limit.split_once('=').unwrap();
        let value = value.parse().unwrap();
        let resource = match name {
            "fsize" => Resource::RLIMIT_FSIZE,
            "nofile" => Resource::RLIMIT_NOFILE,
            other => panic!("unknown limit {other}"),
        };
        setrlimit(resource, value, value).unwrap();
    }
}

fn become_server() -> ! {
    service::logging::init("weight-server", tracing::Level::WARN);
    let directory = std::env::var(DIRECTORY).unwrap();
    let options = std::env::var(SERVER_OPTIONS).unwrap();
    let config: WeightServerConfig =
        toml::from_str(&format!("runtime-dir = {directory:?}\n{options}")).unwrap();
    let mut environment = vec![(ROLE.to_owned(), "loader".to_owned())];
    for name in [LIMITS, STOP_AT] {
        let value = std::env::var(format!("LOADER_{name}")).unwrap_or_default();
        environment.push((name.to_owned(), value));
    }
    let loader =
        LoaderProgram { program: std::env::current_exe().unwrap(), arguments: own_arguments(), environment };
    let code = match weight_server::run_with_loader(config, loader) {
        Ok(()) => 0,
        Err(error) => {
            use service::HasExit;
            eprintln!("ballast weight-server: {}", service::exit::one_line(&error));
            error.exit().code()
        }
    };
    std::process::exit(code.into());
}

fn become_loader() -> ! {
    if let Ok(bytes) = std::env::var(STOP_AT).unwrap_or_default().parse::<u64>() {
        std::thread::spawn(move || {
            loop {
                if shared_memory_bytes() >= bytes {
                    nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP).unwrap();
                    return;
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
    }
    let code = match weight_server::loader::run() {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ballast loader: {}", service::exit::one_line(&error));
            1
        }
    };
    std::process::exit(code);
}

fn shared_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Attaches, then answers one line of standard input at a time.
fn become_worker() -> ! {
    let directory = PathBuf::from(std::env::var(DIRECTORY).unwrap());
    let token = std::env::var(TOKEN).ok().filter(|token| !token.is_empty());
    let mut ask = request(&std::env::var(MODEL).unwrap());
    ask.token = token.map(|token| token.into_bytes().into());
    let mut attached = match attach(&directory.join("weights.sock"), &ask, |_| {}) {
        Ok(attached) => attached,
        Err(error) => {
            println!("worker: refused {error}");
            std::process::exit(1);
        }
    };
    let lease = attached.lease.id();
    println!("worker: attached {lease} {}", checksum(&attached));
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "check" => println!("worker: {:?} {}", attached.lease.status(), checksum(&attached)),
            "detach" => {
                attached.tensors.clear();
                drop(attached);
                println!("worker: detached");
                std::process::exit(0);
            }
            "sloppy" => {
                // Ends the lease while its tensors are still mapped.
                let AttachedModel { tensors, lease, .. } = attached;
                drop(lease);
                println!("worker: {} tensors left", tensors.len());
                std::io::stdin().lines().next();
                std::process::exit(0);
            }
            other => panic!("unknown command {other}"),
        }
    }
    std::process::exit(0);
}

/// Takes the granted descriptors and maps nothing, as a worker does while it creates its context.
fn become_taker() -> ! {
    let directory = PathBuf::from(std::env::var(DIRECTORY).unwrap());
    let ask = request(&std::env::var(MODEL).unwrap());
    let granted = request_model(&directory.join("weights.sock"), &ask, |_| {}).unwrap();
    println!("worker: granted");
    std::io::stdin().lines().next();
    drop(granted);
    std::process::exit(0);
}

/// Over names and bytes of all tensors.
fn checksum(attached: &AttachedModel) -> String {
    let mut hasher = blake3::Hasher::new();
    for tensor in &attached.tensors {
        hasher.update(tensor.name.as_bytes()).update(&tensor.bytes);
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

pub(crate) fn request(model: &str) -> AttachRequest {
    AttachRequest {
        model: model.to_owned(),
        device: "host".to_owned(),
        layout: 0,
        token: None,
        kv_bytes: 1 << 20,
        workspace_bytes: 1 << 10,
    }
}

/// The content of tensor `index` of a generated model.
pub(crate) fn pattern(index: usize, bytes: u64) -> impl Iterator<Item = u8> {
    (0..bytes).map(move |at| (at.wrapping_mul(2_654_435_761) >> 13) as u8 ^ (index as u8).wrapping_mul(37))
}

/// Writes a model of F32 tensors with these numbers of values.
pub(crate) fn make_model(path: &Path, tensors: &[u64]) {
    let mut metadata = gguf::MetadataBuilder::default();
    metadata.put("general.name", "test").unwrap();
    metadata.put("tokenizer.ggml.model", "none").unwrap();
    let mut layout = gguf::TensorLayout::default();
    for (index, values) in tensors.iter().enumerate() {
        layout.add(&format!("tensor.{index}"), quant::DType::F32, &[*values]).unwrap();
    }
    let file = std::io::BufWriter::new(File::create(path).unwrap());
    let mut writer = gguf::GgufWriter::start(file, &metadata, layout).unwrap();
    for (index, values) in tensors.iter().enumerate() {
        writer.write(&pattern(index, values * 4).collect::<Vec<u8>>()).unwrap();
    }
    writer.finish().unwrap();
}

/// Writes a model of one tensor whose data is a hole in the file: large, and quick to write.
pub(crate) fn make_sparse_model(path: &Path, bytes: u64) {
    make_model(path, &[8]);
    let mut contents = std::fs::read(path).unwrap();
    let header = gguf::Header::read(&contents[..], contents.len() as u64).unwrap();
    let data_start = header.data_start();
    // The only dimension comes before type and offset, at the end of the tensor table.
    let dims_at = header.bytes().len() - 8 - 4 - 8;
    contents[dims_at..dims_at + 8].copy_from_slice(&(bytes / 4).to_le_bytes());
    contents.truncate(data_start as usize);
    std::fs::write(path, contents).unwrap();
    File::options().write(true).open(path).unwrap().set_len(data_start + bytes).unwrap();
}

#[derive(Default)]
pub(crate) struct ServerOptions {
    /// More lines of the server's configuration.
    pub(crate) config: String,
    pub(crate) server_limits: String,
    pub(crate) loader_limits: String,
    pub(crate) loader_stop_at: Option<u64>,
}

/// One weight-server in a directory of its own.
pub(crate) struct TestServer {
    pub(crate) directory: TempDir,
    pub(crate) fd_store: FakeFdStore,
    pub(crate) runtime: Runtime,
    options: ServerOptions,
    server: Child,
    starts: u32,
}

impl TestServer {
    pub(crate) fn start(options: ServerOptions) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let fd_store = FakeFdStore::bind(&directory.path().join("notify.sock"));
        let runtime = Runtime::new().unwrap();
        let server = spawn_server(directory.path(), &options, &fd_store);
        fd_store.wait_ready(1);
        Self { directory, fd_store, runtime, options, server, starts: 1 }
    }

    pub(crate) fn plain() -> Self {
        Self::start(ServerOptions::default())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path("weights.sock")
    }

    pub(crate) fn server_pid(&self) -> i32 {
        self.server.id() as i32
    }

    pub(crate) fn make_model(&self, name: &str, tensors: &[u64]) -> PathBuf {
        let path = self.path(&format!("{name}.gguf"));
        make_model(&path, tensors);
        path
    }

    /// Starts a server with one resident model of a few tensors.
    pub(crate) fn with_model(options: ServerOptions, name: &str) -> (Self, PathBuf) {
        let server = Self::start(options);
        let path = server.make_model(name, &[100_000, 10, 600_000]);
        server.load(name, &path).unwrap();
        (server, path)
    }

    pub(crate) fn kill_server(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }

    /// Starts a successor, which inherits the contents of the FD store.
    pub(crate) fn restart_server(&mut self) {
        self.server = spawn_server(self.directory.path(), &self.options, &self.fd_store);
        self.starts += 1;
        self.fd_store.wait_ready(self.starts);
    }

    pub(crate) fn stop_server(&mut self) -> std::process::ExitStatus {
        signal(self.server_pid(), nix::sys::signal::Signal::SIGTERM);
        self.server.wait().unwrap()
    }

    pub(crate) fn admin(&self) -> WeightServerClient<Channel> {
        let path = self.path("weights-admin.sock");
        let channel = self.runtime.block_on(service::grpc::connect(&path)).unwrap();
        WeightServerClient::new(channel)
    }

    pub(crate) fn load(&self, model: &str, path: &Path) -> Result<wire::Loaded, Status> {
        self.load_with(model, path, false)
    }

    pub(crate) fn load_with(
        &self,
        model: &str,
        path: &Path,
        no_packing: bool,
    ) -> Result<wire::Loaded, Status> {
        let request = load_request(model, path, no_packing);
        self.runtime.block_on(load(self.admin(), request))
    }

    pub(crate) fn load_onto(&self, device: &str, model: &str, path: &Path) -> Result<wire::Loaded, Status> {
        let request = wire::LoadRequest { device: device.to_owned(), ..load_request(model, path, false) };
        self.runtime.block_on(load(self.admin(), request))
    }

    pub(crate) fn unload(&self, model: &str) -> Result<u32, Status> {
        let request = wire::UnloadRequest { model: model.to_owned(), generation: 0 };
        let mut admin = self.admin();
        self.runtime.block_on(async { Ok(admin.unload(request).await?.into_inner().leases) })
    }

    pub(crate) fn allow_token(&self, name: &str, token: &str) {
        let request =
            wire::AllowTokenRequest { name: name.to_owned(), token: token.as_bytes().to_vec().into() };
        let mut admin = self.admin();
        self.runtime.block_on(admin.allow_token(request)).unwrap();
    }

    pub(crate) fn status(&self) -> wire::Status {
        let mut admin = self.admin();
        self.runtime.block_on(admin.get_status(wire::GetStatusRequest {})).unwrap().into_inner()
    }

    /// Waits until the status satisfies the condition.
    pub(crate) fn wait_status(&self, what: &str, check: impl Fn(&wire::Status) -> bool) -> wire::Status {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let status = self.status();
            if check(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "{what} did not come: {status:#?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn attach(&self, model: &str) -> Result<AttachedModel, AttachModelError> {
        attach(&self.socket(), &request(model), |_| {})
    }

    pub(crate) fn worker(&self, model: &str, token: &str) -> TestWorkerProcess {
        TestWorkerProcess::start(self.directory.path(), "worker", &[(MODEL, model), (TOKEN, token)])
    }

    pub(crate) fn verify(&self, model: &str) -> Result<wire::VerifyResponse, Status> {
        let request = wire::VerifyRequest { model: model.to_owned(), device: String::new() };
        let mut admin = self.admin();
        Ok(self.runtime.block_on(admin.verify(request))?.into_inner())
    }

    /// Whether the server has mapped a library of NVIDIA's driver.
    pub(crate) fn server_has_driver(&self) -> bool {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.server_pid())).unwrap();
        maps.contains("libcuda") || maps.contains("libnvidia")
    }

    /// The number of the server's open descriptors.
    pub(crate) fn server_fds(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.server_pid())).unwrap().count()
    }

    /// Waits until the loader has stopped itself; returns its process id.
    pub(crate) fn wait_stopped_loader(&self) -> i32 {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let stopped = self.loaders().into_iter().find(|pid| {
                // The file is missing if the loader has exited.
                std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") T "))
            });
            if let Some(pid) = stopped {
                return pid;
            }
            assert!(Instant::now() < deadline, "no loader stopped");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The server's child processes.
    pub(crate) fn loaders(&self) -> Vec<i32> {
        let mut loaders = Vec::new();
        for task in std::fs::read_dir(format!("/proc/{}/task", self.server_pid())).unwrap() {
            let path = task.unwrap().path().join("children");
            let text = std::fs::read_to_string(path).unwrap_or_default();
            loaders.extend(text.split_ascii_whitespace().map(|pid| pid.parse::<i32>().unwrap()));
        }
        loaders
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        // Fails if the test has killed the server already.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn spawn_server(directory: &Path, options: &ServerOptions, fd_store: &FakeFdStore) -> Child {
    let stored = fd_store.contents();
    // A shell replaces the supervisor's shim: it knows its own process id, which exec keeps.
    let mut command = Command::new("sh");
    command
        .args(["-c", "export LISTEN_PID=$$; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(own_arguments())
        .env(ROLE, "server")
        .env(DIRECTORY, directory)
        .env(SERVER_OPTIONS, &options.config)
        .env(LIMITS, &options.server_limits)
        .env(format!("LOADER_{LIMITS}"), &options.loader_limits)
        .env(format!("LOADER_{STOP_AT}"), options.loader_stop_at.map_or(String::new(), |b| b.to_string()))
        .env("NOTIFY_SOCKET", directory.join("notify.sock"))
        .env("LISTEN_FDS", stored.len().to_string())
        .env("LISTEN_FDNAMES", stored.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(":"))
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let mappings =
        stored.into_iter().zip(3..).map(|((_, parent_fd), child_fd)| FdMapping { parent_fd, child_fd });
    command.fd_mappings(mappings.collect()).unwrap();
    command.spawn().unwrap()
}

pub(crate) fn load_request(model: &str, path: &Path, no_packing: bool) -> wire::LoadRequest {
    wire::LoadRequest {
        model: model.to_owned(),
        path: path.to_str().unwrap().to_owned(),
        no_packing,
        ..wire::LoadRequest::default()
    }
}

pub(crate) async fn load(
    mut admin: WeightServerClient<Channel>,
    request: wire::LoadRequest,
) -> Result<wire::Loaded, Status> {
    let mut events = admin.load(request).await?.into_inner();
    while let Some(event) = events.message().await? {
        if let Some(wire::load_event::Kind::Loaded(loaded)) = event.kind {
            return Ok(loaded);
        }
    }
    panic!("the stream ended without a result");
}

/// The failure kind in the details of an error of Load.
pub(crate) fn load_failure(status: &Status) -> wire::LoadFailure {
    use prost::Message;
    wire::LoadFailed::decode(status.details()).unwrap().failure()
}

pub(crate) fn signal(pid: i32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
}

/// A worker process.
pub(crate) struct TestWorkerProcess {
    pub(crate) child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    /// Its first line of output.
    pub(crate) greeting: String,
}

impl TestWorkerProcess {
    pub(crate) fn start(directory: &Path, role: &str, environment: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(own_arguments())
            .env(ROLE, role)
            .env(DIRECTORY, directory)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut worker = Self { child, stdin, stdout, greeting: String::new() };
        worker.greeting = worker.line();
        worker
    }

    /// The next line of the worker, without those of the test harness.
    fn line(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "the worker ended");
            // The harness prints the test's name first, without a line break.
            if let Some((_, said)) = line.split_once("worker: ") {
                return said.trim().to_owned();
            }
        }
    }

    pub(crate) fn command(&mut self, command: &str) -> String {
        writeln!(self.stdin, "{command}").unwrap();
        self.line()
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The lease id and the checksum of the model, from the greeting.
    pub(crate) fn attached(&self) -> (u64, &str) {
        let rest = self.greeting.strip_prefix("attached ").unwrap_or_else(|| panic!("{}", self.greeting));
        let (lease, checksum) = rest.split_once(' ').unwrap();
        (lease.parse().unwrap(), checksum)
    }
}

impl Drop for TestWorkerProcess {
    fn drop(&mut self) {
        // Fails if the test has ended the worker already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection without the client library, for frames that the library never sends.
pub(crate) fn raw_connection(server: &TestServer) -> handoff::seqpacket::Connection {
    let connection = handoff::seqpacket::Connection::connect(&server.socket()).unwrap();
    connection.set_timeouts(Some(TEST_TIMEOUT), Some(TEST_TIMEOUT)).unwrap();
    connection
}

pub(crate) fn raw_attach(model: &str) -> wire::WorkerFrame {
    let attach = wire::Attach {
        protocol: handoff::PROTOCOL_VERSION,
        layout: 0,
        manifest_format: handoff::manifest::MANIFEST_FORMAT,
        device: "host".to_owned(),
        model: model.to_owned(),
        token: Default::default(),
        kv_bytes: 0,
        workspace_bytes: 0,
    };
    wire::WorkerFrame { kind: Some(wire::worker_frame::Kind::Attach(attach)) }
}

/// Sends arbitrary bytes as one packet.
pub(crate) fn send_raw(connection: &handoff::seqpacket::Connection, bytes: &[u8]) {
    let socket = UnixDatagram::from(connection.as_fd().try_clone_to_owned().unwrap());
    socket.send(bytes).unwrap();
}
