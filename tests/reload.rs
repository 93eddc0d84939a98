// SPDX-License-Identifier: Apache-2.0

//! `ballast reload` and SIGHUP: what differs in the configuration changes, and nothing else.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::harness::api::{Continuation, TestRequest, generate_all, runtime};
use crate::harness::{
    FleetProcess, ServedFleet, demo_7m, demo_22m, device, eventually, proc, serve_config, text,
};

fn model(name: &str, path: &Path, workers: u32, more: &str) -> String {
    let device = device();
    format!(
        "[[models]]\nname = {name:?}\npath = {path:?}\ndevice = {device:?}\nworkers = {workers}\nthreads = 1\n\
         kv-tokens = 2048\n{more}"
    )
}

/// Streams that go on while a fleet changes.
fn requests(model: &str) -> Vec<TestRequest> {
    let request = |seed: u32| TestRequest {
        model: model.to_owned(),
        prompt: (0..30).map(|i| 10 + (i * 7 + seed) % 900).collect(),
        max_tokens: 150,
        temperature: 0.8,
        seed: u64::from(seed),
        ..TestRequest::default()
    };
    (0..3).map(request).collect()
}

fn streams(fleet: &ServedFleet, model: &str) -> Vec<Continuation> {
    let done = runtime().block_on(generate_all(&fleet.grpc, &requests(model)));
    done.into_iter().map(|stream| stream.unwrap()).collect()
}

impl ServedFleet {
    pub(crate) fn config_file(&self) -> PathBuf {
        self.runtime_dir().with_extension("toml")
    }

    pub(crate) fn configure(&self, config: &str) {
        std::fs::write(self.config_file(), config).unwrap();
    }

    /// Reloads and returns what is printed.
    #[track_caller]
    pub(crate) fn reload(&self, arguments: &[&str]) -> String {
        let output = self.run_command(&[&["reload"], arguments].concat());
        let (printed, error) = text(&output);
        assert!(output.status.success(), "{error}");
        printed
    }

    fn identities(&self) -> Vec<(String, u32)> {
        self.processes().into_iter().map(|process| (process.name, process.pid)).collect()
    }
}

fn workers_of_fleet(fleet: &ServedFleet) -> Vec<FleetProcess> {
    fleet.processes_by_role("worker")
}

/// Runs `change` while streams of the model go on, and compares them token for token.
pub(crate) fn while_streaming(fleet: &ServedFleet, model: &str, change: impl FnOnce()) {
    let (expected, done) = (streams(fleet, model), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert_eq!(streams(fleet, model), expected);
            }
        });
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(change));
        done.store(true, Ordering::Relaxed);
        load.join().unwrap();
        if let Err(panic) = changed {
            std::panic::resume_unwind(panic);
        }
    });
    assert_eq!(streams(fleet, model), expected);
}

#[test]
fn a_reload_changes_the_models_that_differ_and_disturbs_no_stream_of_others() {
    let kept = model("kept", &demo_7m(), 2, "");
    let gone = model("gone", &demo_22m(), 1, "");
    let fleet = ServedFleet::start_config(&format!("{kept}{gone}"));
    let before = fleet.identities();
    assert_eq!(fleet.reload(&[]), "the configuration has not changed\n");

    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy.gguf");
    std::fs::copy(demo_22m(), &copy).unwrap();
    let new = model("new", &copy, 1, "");
    fleet.configure(&format!("[supervision]\nwatchdog = \"40s\"\n{kept}{new}"));
    let expected = format!(
        "model gone is removed after its streams\nmodel new is loaded from {}, workers: 1\n\
         not applied until the supervisor restarts: supervision.watchdog \"30s\" -> \"40s\"\n",
        copy.display()
    );
    assert_eq!(fleet.reload(&["--dry-run"]), expected);
    assert_eq!(fleet.identities(), before, "--dry-run changes nothing");

    while_streaming(&fleet, "kept", || {
        assert_eq!(fleet.reload(&[]), expected);
        eventually("the models have changed", || {
            let lines = fleet.try_ps_lines()?;
            let state =
                |name: &str| lines.iter().find(|line| line["name"] == name).map(|line| &line["state"]);
            (state("model:gone").is_none() && state("model:new")? == "ready").then_some(())
        });
        eventually("the new model serves", || {
            let done = runtime().block_on(generate_all(&fleet.grpc, &requests("new")));
            done.iter().all(Result::is_ok).then_some(())
        });
    });
    let after = fleet.identities();
    let stayed = before.iter().filter(|(name, _)| name != "worker-2");
    stayed.for_each(|process| assert!(after.contains(process), "{process:?} is not in {after:?}"));
    fleet.stop();
}

#[test]
fn reloaded_settings_reach_workers_and_router_without_a_lost_request() {
    let config = |workers, kv_tokens: &str, router: &str| {
        format!("{router}{}", model("m", &demo_7m(), workers, "").replace("kv-tokens = 2048", kv_tokens))
    };
    let fleet = ServedFleet::start_config(&config(2, "kv-tokens = 2048", ""));
    let before = fleet.identities();
    fleet.configure(&config(3, "kv-tokens = 4096", ""));
    while_streaming(&fleet, "m", || {
        let printed = fleet.reload(&[]);
        assert!(printed.contains("restart one after the other: kv-bytes"), "{printed}");
        assert!(printed.ends_with("workers of model m: 2 -> 3\n"), "{printed}");
        eventually("three workers with new settings are ready", || {
            let now = workers_of_fleet(&fleet);
            let is_new = |w: &FleetProcess| w.state == "ready" && before.iter().all(|(_, pid)| *pid != w.pid);
            (now.len() == 3 && now.iter().all(is_new)).then_some(())
        });
    });
    assert!(workers_of_fleet(&fleet).iter().all(|worker| worker.restarts == 0));

    let limited = config(1, "kv-tokens = 4096", "[router]\nconnections-max = 77\n");
    fleet.configure(&limited);
    let printed = fleet.reload(&[]);
    assert!(
        printed.starts_with("workers of model m: 3 -> 1\nthe router restarts after its streams: "),
        "{printed}"
    );
    eventually("the router is new, and one worker is left", || {
        let now = fleet.processes();
        let router = now.iter().find(|p| p.role == "router" && p.state == "ready")?;
        let is_new = before.iter().all(|(_, pid)| *pid != router.pid);
        (is_new && workers_of_fleet(&fleet).len() == 1).then_some(())
    });
    let stored = std::fs::read_to_string(fleet.runtime_dir().join("router.toml")).unwrap();
    assert!(stored.contains("connections-max = 77"), "{stored}");
    eventually("the fleet serves", || {
        let done = runtime().block_on(generate_all(&fleet.grpc, &requests("m")));
        done.iter().all(Result::is_ok).then_some(())
    });
    fleet.stop();
}

#[test]
fn an_invalid_configuration_changes_nothing_and_names_the_key() {
    let valid = model("m", &demo_7m(), 1, "");
    let fleet = ServedFleet::start_config(&valid);
    let before = fleet.identities();
    let other = model("other", &demo_22m(), 1, "");
    let wrong = [
        (format!("{valid}{}", model("other", &demo_22m(), 1, "worker = 3\n")), 2, "worker"),
        (format!("[admission]\nbatch-floor = 95\n{valid}{other}"), 2, "batch-floor"),
        (format!("[supervision]\nwatchdog = \"1ms\"\n{valid}{other}"), 2, "supervision.watchdog"),
        (format!("{valid}{}", model("other", &demo_22m(), 1, "running-max = 5000\n")), 2, "running-max"),
        (
            format!("{valid}{}", model("other", &demo_22m(), 1, "queue-max = 0\n")),
            2,
            "`queue-max` of \"other\"",
        ),
        (format!("{other}{}", model("m", &demo_7m(), 5000, "")), 2, "5001 workers"),
        (format!("{other}{}", model("m", Path::new("/none.gguf"), 1, "")), 2, "/none.gguf"),
    ];
    for (config, code, named) in wrong {
        fleet.configure(&config);
        let output = fleet.run_command(&["reload"]);
        let (printed, error) = text(&output);
        assert_eq!((output.status.code(), printed.as_str()), (Some(code), ""), "{error}");
        assert!(error.contains(named), "{error}");
        assert_eq!(fleet.identities(), before);
    }
    fleet.configure(&valid);
    assert_eq!(fleet.reload(&[]), "the configuration has not changed\n");
    assert_eq!(streams(&fleet, "m").len(), 3);
    fleet.stop();
}

#[test]
fn a_fleet_without_a_configuration_file_is_not_reloaded() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let output = fleet.run_command(&["reload"]);
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output).1;
    assert!(error.contains("--config"), "{error}");
    fleet.stop();
}

#[test]
fn a_hangup_reloads_and_tells_the_service_manager() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("manager.sock");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let one = model("m", &demo_7m(), 1, "");
    let mut command = serve_config(&directory.path().join("run"), &one);
    command.env("NOTIFY_SOCKET", &path);
    let read_until = move |wanted: &str| {
        let mut datagram = [0; 1024];
        std::iter::from_fn(|| {
            let bytes = manager.recv(&mut datagram).unwrap();
            Some(String::from_utf8_lossy(&datagram[..bytes]).into_owned())
        })
        .find(|message| message.starts_with(wanted))
        .unwrap()
    };
    // A manager that does not read would be waited for at the barriers of the weight-server.
    let messages = std::thread::spawn(move || {
        read_until("READY=1");
        (read_until("RELOADING=1"), read_until("READY=1"))
    });
    let fleet = ServedFleet::start_command(directory, command);
    fleet.configure(&model("m", &demo_7m(), 2, ""));
    proc::send_signal(fleet.supervisor.id(), "HUP");
    eventually("a second worker is ready", || {
        let now = workers_of_fleet(&fleet);
        (now.len() == 2 && now.iter().all(|worker| worker.state == "ready")).then_some(())
    });
    let (reloading, ready) = messages.join().unwrap();
    assert!(reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{reloading}");
    assert_eq!(ready, "READY=1");
    drop(fleet);
}
