// SPDX-License-Identifier: Apache-2.0

//! Calls on the administrative sockets, as the log names them: caller, subject and outcome.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use bytes::Bytes;
use proto::weights::v1::weight_server_client::WeightServerClient;
use proto::weights::v1::{AllowTokenRequest, ForgetTokenRequest, LoadRequest, UnloadRequest, VerifyRequest};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::harness::api::runtime;
use crate::harness::{ServedFleet, ballast, demo_7m, demo_22m, device, eventually, proc, serve};

/// A fleet of one worker, and the file that its processes log to.
struct LoggedFleet {
    fleet: ServedFleet,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

impl LoggedFleet {
    /// `levels` is what BALLAST_LOG says.
    fn start(levels: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
        let command = command(directory.path(), levels, &log);
        Self { fleet: ServedFleet::start_command(directory, command), log, _folder: folder }
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// The lines about commands.
    fn lines(&self) -> Vec<String> {
        self.text().lines().filter(|line| line.contains(" admin command")).map(str::to_owned).collect()
    }

    /// Waits for a line that contains all parts.
    #[track_caller]
    fn expect(&self, parts: &[&str]) {
        let is_there = |line: &String| parts.iter().all(|part| line.contains(part));
        eventually(&format!("a line with {parts:?}"), || self.lines().iter().any(is_there).then_some(()));
    }
}

fn command(runtime_dir: &std::path::Path, levels: &str, log: &std::path::Path) -> Command {
    let mut command = serve(runtime_dir, &demo_7m(), &["--workers", "1", "--threads", "1"]);
    command.env("BALLAST_LOG", levels).stderr(File::options().append(true).create(true).open(log).unwrap());
    command
}

/// Calls the weight-server, past the supervisor.
async fn call(mut client: WeightServerClient<Channel>, command: &str, subject: &str) -> Result<(), Status> {
    let (name, model) = (subject.to_owned(), subject.to_owned());
    let path = demo_22m().canonicalize().unwrap().to_string_lossy().into_owned();
    match command {
        "load" => {
            let request = LoadRequest { model, path, ..LoadRequest::default() };
            let mut events = client.load(request).await?.into_inner();
            while events.message().await?.is_some() {}
            Ok(())
        }
        "unload" => client.unload(UnloadRequest { model, generation: 0 }).await.map(drop),
        "verify" => client.verify(VerifyRequest { model, device: String::new() }).await.map(drop),
        "allow-token" => {
            let request = AllowTokenRequest { name, token: Bytes::from_static(&[7; 32]) };
            client.allow_token(request).await.map(drop)
        }
        _ => client.forget_token(ForgetTokenRequest { name }).await.map(drop),
    }
}

#[test]
fn each_call_to_the_weight_server_is_in_the_log_with_its_caller_and_outcome() {
    let logged = LoggedFleet::start("info");
    let caller = format!("uid={} pid={}", rustix::process::geteuid().as_raw(), std::process::id());
    let socket = logged.fleet.runtime_dir().join("weights-admin.sock");
    let runtime = runtime();
    let client = WeightServerClient::new(runtime.block_on(service::grpc::connect(&socket)).unwrap());
    let long_name = "n".repeat(5000);
    for (command, subject, expected) in [
        ("load", "second", Code::Ok),
        ("load", "", Code::InvalidArgument),
        ("verify", "third", Code::NotFound),
        ("unload", "second", Code::Ok),
        ("unload", "second", Code::NotFound),
        ("unload", &long_name, Code::NotFound),
        ("allow-token", "stranger", Code::Ok),
        ("allow-token", "two\nlines", Code::InvalidArgument),
        ("forget-token", "stranger", Code::Ok),
    ] {
        let (seen, outcome) = (logged.lines().len(), call_outcome(&runtime, &client, command, subject));
        assert_eq!(outcome, expected, "{command} {subject}");
        let of_call = || Some(logged.lines().split_off(seen)).filter(|lines| lines.len() == 2);
        let lines = eventually(&format!("{command} {subject} is in the log"), of_call);
        let named = format!("command={command:?} subject={:?}", &subject[..subject.len().min(3)]);
        let named = named.strip_suffix('"').unwrap();
        let is_named = |line: &String| line.contains(named) && line.contains(&caller);
        assert!(lines.iter().all(is_named), "{lines:?}");
        assert!(lines[0].contains(" INFO weight-server admin command command="), "{lines:?}");
        assert!(lines[0].len() < 1000, "{lines:?}");
        let end = match expected {
            Code::Ok => " INFO weight-server admin command succeeded ",
            _ => " WARN weight-server admin command failed ",
        };
        assert!(lines[1].contains(end) && lines[1].contains("took_ms="), "{lines:?}");
        assert_eq!(lines[1].contains("error="), expected != Code::Ok, "{lines:?}");
    }
    logged.fleet.stop();
}

fn call_outcome(
    runtime: &tokio::runtime::Runtime,
    client: &WeightServerClient<Channel>,
    command: &str,
    subject: &str,
) -> Code {
    let outcome = runtime.block_on(call(client.clone(), command, subject));
    outcome.map_or_else(|status| status.code(), |()| Code::Ok)
}

#[test]
fn calls_of_the_supervisor_to_its_child_are_there_only_at_level_debug() {
    let logged = LoggedFleet::start("info,admin_audit=debug");
    let other = demo_22m();
    let (other, device) = (other.to_str().unwrap(), device());
    let pid = format!("pid={} ", logged.fleet.supervisor.id());
    let load = ["load", other, "--name", "other", "--threads", "1", "--device", &device];
    for arguments in [&load[..], &["unload", "other"]] {
        assert!(logged.fleet.run_command(arguments).status.success(), "{arguments:?}");
        let command = format!("command={:?} subject=\"other\"", arguments[0]);
        logged.expect(&[" INFO supervisor admin command succeeded", &command]);
        logged.expect(&["DEBUG weight-server admin command succeeded", arguments[0], &pid]);
    }
    logged.expect(&["DEBUG weight-server admin command succeeded", "\"allow-token\"", &pid]);
    let is_double = |line: &&String| line.contains(" INFO weight-server ");
    assert_eq!(logged.lines().iter().find(is_double), None);
    logged.fleet.stop();
}

#[test]
fn a_command_whose_caller_leaves_is_unanswered() {
    let logged = LoggedFleet::start("info");
    let worker = logged.fleet.only_process("worker").pid;
    // It does not drain.
    proc::send_signal(worker, "STOP");
    let mut drain = ballast();
    drain.args(["drain", "worker-0", "--runtime-dir"]).arg(logged.fleet.runtime_dir());
    let mut drain = drain.stderr(Stdio::null()).spawn().unwrap();
    let caller = format!(
        "command=\"drain\" subject=\"worker-0\" uid={} pid={}",
        rustix::process::geteuid().as_raw(),
        drain.id()
    );
    logged.expect(&[" INFO supervisor admin command command", &caller]);
    drain.kill().unwrap();
    drain.wait().unwrap();
    logged.expect(&[" INFO supervisor admin command unanswered", &caller, "took_ms="]);
    proc::send_signal(worker, "CONT");
    logged.fleet.stop();
}
