// SPDX-License-Identifier: Apache-2.0

//! Processes that reach the limit of a cgroup on memory, and processes with another monotonic
//! clock. Both need rights that not every machine gives.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::harness::api::{TestRequest, generate_all, runtime};
use crate::harness::{ServedFleet, ballast, demo_7m, eventually, proc, runs_on_host, serve, text};
use crate::model_text::{CHAT_TEMPLATE, DOUBLING_TEMPLATE, rewrite};

const OUT_OF_RESOURCES: i32 = 4;

/// A cgroup with a limit on memory. The kernel kills a process that would exceed it.
struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    /// `None` if this process may not make one.
    fn create(test: &str, bytes: u64) -> Option<Self> {
        let name = format!("ballast-test-{}-{test}", std::process::id());
        let (v1, v2) = (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
        let (parent, limit) = match v1.is_dir() {
            true => (v1, "memory.limit_in_bytes"),
            false => (v2, "memory.max"),
        };
        let cgroup = Self(parent.join(name));
        let made = std::fs::create_dir(&cgroup.0)
            .and_then(|()| std::fs::write(cgroup.0.join(limit), bytes.to_string()));
        if let Err(error) = made {
            crate::harness::report_skipped(format_args!(
                "{test}: no cgroup with a limit on memory can be made: {error}"
            ));
            return None;
        }
        Some(cgroup)
    }

    fn processes(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// The check of a template that asks for a terabyte may take 512 MiB. Its cgroup has less.
#[test]
fn a_check_that_its_cgroup_ends_blames_memory_and_not_the_file() {
    let Some(cgroup) = MemoryCgroup::create("check", 192 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("doubling.gguf");
    rewrite(&model, &[CHAT_TEMPLATE], |metadata| metadata.put(CHAT_TEMPLATE, DOUBLING_TEMPLATE).unwrap());
    let inspect = ballast();
    let output = Command::new("sh")
        .args(["-c", "echo $$ > \"$0\"; exec \"$@\""])
        .arg(cgroup.processes())
        .arg(inspect.get_program())
        .arg("inspect")
        .arg(&model)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stderr = text(&output).1;
    assert_eq!(output.status.code(), Some(OUT_OF_RESOURCES), "{stderr}");
    assert!(stderr.contains("killed by signal 9") && stderr.contains("out of memory"), "{stderr}");
    assert!(!stderr.contains(CHAT_TEMPLATE), "{stderr}");
}

fn request(seed: u64) -> TestRequest {
    TestRequest {
        prompt: (0..200).map(|i| 10 + i * 13 + seed as u32).collect(),
        max_tokens: 100,
        seed,
        ..TestRequest::default()
    }
}

#[test]
fn a_worker_and_a_router_that_their_cgroup_ends_are_replaced() {
    if !runs_on_host("a_worker_and_a_router_that_their_cgroup_ends_are_replaced") {
        return;
    }
    for role in ["worker", "router"] {
        let Some(cgroup) = MemoryCgroup::create(role, 256 << 10) else { return };
        let fleet = ServedFleet::start(&demo_7m(), &["--workers", "2", "--threads", "1"]);
        let expected = runtime().block_on(generate_all(&fleet.grpc, &[request(1)])).remove(0).unwrap();
        let victim = fleet.processes_by_role(role).remove(0);
        // What the process holds already is counted elsewhere. It may take 256 KiB more.
        std::fs::write(cgroup.processes(), victim.pid.to_string()).unwrap();
        let mut seed = 1;
        eventually("the kernel kills the process, and another one serves", || {
            seed += 1;
            // A stream through a router that dies ends with an error.
            let requests: Vec<TestRequest> = (0..8).map(|_| request(seed)).collect();
            let found = runtime().block_on(async {
                let client = proto::v1::inference_client::InferenceClient::connect(fleet.grpc.clone());
                client.await.ok()?;
                Some(generate_all(&fleet.grpc, &requests).await)
            })?;
            if role == "worker" {
                assert!(found.iter().all(Result::is_ok), "{found:?}");
            }
            let now = fleet.try_processes()?.into_iter().find(|process| process.name == victim.name)?;
            (now.pid != victim.pid && now.state == "ready").then_some(())
        });
        let again = eventually("a request is answered", || {
            runtime().block_on(generate_all(&fleet.grpc, &[request(1)])).remove(0).ok()
        });
        assert_eq!(again.tokens, expected.tokens);
        fleet.stop();
    }
}

/// The files of a cgroup of version 2, mounted where the executable looks for them. Machines whose
/// memory is under version 1 cannot make a real one.
#[test]
fn memory_limits_of_version_2_are_read_and_named() {
    let test = "memory_limits_of_version_2_are_read_and_named";
    if !runs_on_host(test) {
        return;
    }
    let own_mounts = ["unshare", "--map-root-user", "--mount"];
    let may_mount = Command::new(own_mounts[0]).args(&own_mounts[1..]).arg("true").status();
    if !may_mount.is_ok_and(|status| status.success()) {
        crate::harness::report_skipped(format_args!("{test}: this user cannot make a mount namespace"));
        return;
    }
    let cgroup = tempfile::tempdir().unwrap();
    let write = |file: &str, text: &str| std::fs::write(cgroup.path().join(file), text).unwrap();
    write("memory.current", &(16 << 20).to_string());
    write("memory.stat", "anon 0\ninactive_file 1048576\n");
    let generate = |limit: &str| {
        write("memory.max", limit);
        let mut command = Command::new(own_mounts[0]);
        command.args(&own_mounts[1..]).args([
            "sh",
            "-c",
            "mount --bind \"$0\" /sys/fs/cgroup && exec \"$@\"",
        ]);
        command.arg(cgroup.path()).arg(ballast().get_program()).arg("generate").arg(demo_7m());
        command.args(["--prompt", "x", "--max-tokens", "1", "--device", "host"]).stdin(Stdio::null());
        command.output().unwrap()
    };
    let refused = generate("20971520\n");
    let stderr = text(&refused).1;
    assert_eq!(refused.status.code(), Some(OUT_OF_RESOURCES), "{stderr}");
    assert!(stderr.contains("5.00 MiB available") && stderr.contains("cgroup"), "{stderr}");
    let served = generate("max\n");
    assert!(served.status.success(), "{}", text(&served).1);
}

/// The supervisor's monotonic clock and that of its children differ by eleven days.
#[test]
fn processes_with_other_monotonic_clocks_are_one_fleet() {
    let unshare = |program: &Command| {
        let mut command = Command::new("unshare");
        command.args(["--time", "--monotonic", "1000000"]).arg(program.get_program());
        command.args(program.get_args()).env_remove("NOTIFY_SOCKET");
        command
    };
    if !unshare(&Command::new("true")).status().is_ok_and(|status| status.success()) {
        return crate::harness::report_skipped(format_args!("this process may not make a time namespace"));
    }
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let command = serve(directory.path(), &demo_7m(), &["--workers", "1", "--threads", "1"]);
    // Only the children of `unshare` are in the namespace, so the supervisor is not.
    let mut unshared = unshare(&command);
    unshared.stdin(Stdio::null()).stdout(Stdio::piped());
    let fleet = ServedFleet::start_command(directory, unshared);
    let before = fleet.processes();
    let expected = runtime().block_on(generate_all(&fleet.grpc, &[request(1)])).remove(0).unwrap();
    let worker = fleet.only_process("worker");
    proc::send_signal(worker.pid, "KILL");
    let again = eventually("the next worker serves", || {
        runtime().block_on(generate_all(&fleet.grpc, &[request(1)])).remove(0).ok()
    });
    assert_eq!(again.tokens, expected.tokens);
    // The others go on: no deadline of a process was read on the clock of another one.
    for process in before.iter().filter(|process| process.role != "worker") {
        let now = fleet.processes().into_iter().find(|now| now.name == process.name).unwrap();
        assert_eq!((now.pid, now.restarts), (process.pid, process.restarts), "{}", process.name);
    }
    fleet.stop();
}
