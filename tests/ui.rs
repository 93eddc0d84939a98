// SPDX-License-Identifier: Apache-2.0

//! The page at `/ui`: its files, what it may load, who may ask for its data, and the page in a
//! browser.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use reqwest::header::HeaderMap;
use serde_json::{Value, json};

use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, ballast, demo_7m, eventually, in_tree, proc, report_skipped, serve, text};
use crate::tools::{chat_model, tools};

const TWO_WORKERS: [&str; 6] = ["--workers", "2", "--threads", "1", "--name", "m"];
/// Of other clients while the browser looks at the fleet; as in tests/ui_browser.py.
const STREAMS: usize = 4;
const FILES: [(&str, &str); 14] = [
    ("", "text/html; charset=utf-8"),
    ("/style.css", "text/css; charset=utf-8"),
    ("/chat.css", "text/css; charset=utf-8"),
    ("/fleet.css", "text/css; charset=utf-8"),
    ("/main.js", "text/javascript; charset=utf-8"),
    ("/api.js", "text/javascript; charset=utf-8"),
    ("/chat.js", "text/javascript; charset=utf-8"),
    ("/answer.js", "text/javascript; charset=utf-8"),
    ("/tokens.js", "text/javascript; charset=utf-8"),
    ("/fleet.js", "text/javascript; charset=utf-8"),
    ("/picture.js", "text/javascript; charset=utf-8"),
    ("/ledger.js", "text/javascript; charset=utf-8"),
    ("/plots.js", "text/javascript; charset=utf-8"),
    ("/elements.js", "text/javascript; charset=utf-8"),
];

fn fetch(http: &HttpClient, path: &str, headers: &[(&str, &str)]) -> (u16, HeaderMap, String) {
    http.runtime.block_on(async {
        let request = http.client.get(format!("{}{path}", http.url));
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let reply = request.send().await.unwrap();
        (reply.status().as_u16(), reply.headers().clone(), reply.text().await.unwrap())
    })
}

fn fleet_of(http: &HttpClient) -> Value {
    let (status, text) = http.get("/ui/fleet");
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn the_page_loads_nothing_from_elsewhere_and_runs_no_text_as_a_script() {
    let fleet = ServedFleet::start(&demo_7m(), &TWO_WORKERS);
    let http = HttpClient::connect(&fleet);
    let mut page = String::new();
    for (name, content_type) in FILES {
        let (status, headers, text) = fetch(&http, &format!("/ui{name}"), &[]);
        assert_eq!((status, headers["content-type"].to_str().unwrap()), (200, content_type), "{name}");
        assert_eq!(headers["cache-control"], "no-cache");
        assert_eq!(headers["x-content-type-options"], "nosniff");
        assert_eq!(headers["referrer-policy"], "no-referrer");
        let policy = headers["content-security-policy"].to_str().unwrap();
        assert!(
            policy
                .starts_with("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
        );
        assert!(!policy.contains("unsafe-") && policy.contains("frame-ancestors 'none'"), "{policy}");
        assert!(!text.contains("http://") && !text.contains("https://"), "{name} names another site");
        let tag = headers["etag"].to_str().unwrap();
        let (status, _, rest) = fetch(&http, &format!("/ui{name}"), &[("if-none-match", tag)]);
        assert_eq!((status, rest.len()), (304, 0), "{name}");
        page += &text;
    }
    assert!(page.len() < 100_000, "{} bytes", page.len());
    for name in page.split("/ui/").skip(1).map(|rest| rest.split('"').next().unwrap()) {
        let is_served = name == "fleet" || FILES.iter().any(|(file, _)| file.strip_prefix('/') == Some(name));
        assert!(is_served, "the page asks for /ui/{name}");
    }
    assert_eq!(http.get("/ui/").1, http.get("/ui").1);
    assert_eq!(http.get("/ui/unknown.js").0, 404);
    for path in ["/ui", "/ui/main.js", "/ui/fleet"] {
        assert_eq!(http.post(path, &json!({})).0, 405, "{path}");
    }
    fleet.stop();
}

#[test]
fn the_picture_has_each_copy_once_and_follows_workers_that_are_killed() {
    let fleet = ServedFleet::start(&demo_7m(), &TWO_WORKERS);
    let http = HttpClient::connect(&fleet);
    let body = json!({"prompt": "def f(", "max_tokens": 5, "ignore_eos": true});
    http.post_json("/v1/completions", &body);
    let picture = eventually("the ledger of the device", || {
        let picture = fleet_of(&http);
        picture["devices"][0]["ledger"].is_object().then_some(picture)
    });
    let ledger = &picture["devices"][0]["ledger"];
    let size = |field: &str| ledger[field].as_u64().unwrap();
    assert!(size("weights_bytes") > 7 << 20 && size("workers_bytes") > 0, "{ledger}");
    assert!(size("capacity_bytes") >= size("weights_bytes") + size("workers_bytes"), "{ledger}");
    let copies = picture["copies"].as_array().unwrap();
    assert_eq!((copies.len(), &copies[0]["models"]), (1, &json!(["m"])), "{picture}");
    let names = |picture: &Value| -> Vec<String> {
        let workers = picture["workers"].as_array().unwrap();
        let names = workers.iter().filter(|worker| worker["generation"] == copies[0]["generation"]);
        let mut names: Vec<String> =
            names.map(|worker| worker["name"].as_str().unwrap().to_owned()).collect();
        names.sort_unstable();
        names
    };
    assert_eq!(names(&picture), ["worker-0", "worker-1"], "{picture}");
    let totals = &picture["totals"];
    assert!(totals["output_tokens"].as_f64() >= Some(5.0) && totals["finished"]["length"] == 1.0, "{totals}");
    let buckets = totals["time_to_first_token"].as_array().unwrap();
    assert!(buckets.last().unwrap() == &json!([null, 1.0]) && buckets.len() > 10, "{totals}");

    let worker = &fleet.processes_by_role("worker")[0];
    proc::send_signal(worker.pid, "KILL");
    eventually("the picture without the worker", || {
        (!names(&fleet_of(&http)).contains(&worker.name)).then_some(())
    });
    eventually("the worker again, with its end", || {
        let picture = fleet_of(&http);
        let processes = picture["processes"].as_array().unwrap();
        let process = processes.iter().find(|process| process["name"] == worker.name.as_str()).unwrap();
        let has_ended = process["restarts"] == 1 && process["last_termination"] != "";
        (has_ended && names(&picture).contains(&worker.name)).then_some(())
    });
    fleet.stop();
}

#[test]
fn with_keys_the_files_of_the_page_are_open_and_its_data_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let keys = directory.path().join("keys.toml");
    let key = text(&ballast().args(["key", "page", "--file"]).arg(&keys).output().unwrap()).0;
    let fleet =
        ServedFleet::start(&demo_7m(), &[&TWO_WORKERS[..], &["--keys", keys.to_str().unwrap()]].concat());
    let http = HttpClient::connect(&fleet);
    for (name, _) in FILES {
        assert_eq!(http.get(&format!("/ui{name}")).0, 200, "{name}");
    }
    for path in ["/ui/fleet", "/ui/other.js", "/v1/models", "/server_info"] {
        assert_eq!(http.get(path).0, 401, "{path}");
    }
    let bearer = format!("Bearer {}", key.trim());
    let (status, _, picture) = fetch(&http, "/ui/fleet", &[("authorization", &bearer)]);
    assert_eq!(status, 200, "{picture}");
    fleet.stop();
}

/// The browser of Debian's package `chromium`. `None`, after saying so, if there is none.
fn browser(test: &str) -> Option<PathBuf> {
    let path = Path::new("/usr/bin/chromium");
    if !path.exists() {
        report_skipped(format_args!("{test}: there is no {}", path.display()));
        return None;
    }
    Some(path.to_owned())
}

#[test]
fn a_browser_runs_the_page_without_errors() {
    let Some(browser) = browser("a_browser_runs_the_page_without_errors") else { return };
    let fleet = ServedFleet::start(&demo_7m(), &TWO_WORKERS);
    let profile = tempfile::tempdir().unwrap();
    for (view, expected) in [("", "<option value=\"m\">m</option>"), ("#fleet", "one copy of")] {
        let mut command = Command::new(&browser);
        command.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--log-level=0",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        command.args(["--timeout=20000", "--virtual-time-budget=4000", "--dump-dom"]);
        let output = command.arg(format!("{}/ui{view}", fleet.http)).output().unwrap();
        let (dom, log) = text(&output);
        let said: Vec<&str> = log.lines().filter(|line| line.contains("CONSOLE")).collect();
        assert!(dom.contains(expected) && said.is_empty(), "{view}: {said:?}\n{dom}\n{log}");
    }
    fleet.stop();
}

/// One stream after the other while there is a file `wanted`, none of which may be cut. A browser
/// is slow beside them.
fn stream_while(fleet: &ServedFleet, wanted: &Path, has_ended: &AtomicBool) {
    let http = HttpClient::connect(fleet);
    let body = json!({"prompt": "def f(x):\n", "max_tokens": 1500, "ignore_eos": true, "stream": true});
    while !has_ended.load(Ordering::Relaxed) {
        match wanted.exists() {
            true => drop(http.post_stream("/v1/completions", &body)),
            false => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

#[test]
#[ignore = "nightly: installs the package playwright"]
fn nightly_a_browser_chats_shows_tokens_and_sees_streams_move_from_a_killed_worker() {
    let test = "nightly_a_browser_chats_shows_tokens_and_sees_streams_move_from_a_killed_worker";
    let Some(browser) = browser(test) else { return };
    let folder = tempfile::tempdir().unwrap();
    // The workers take all processors, and the browser draws with them.
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let serve = serve(directory.path(), &chat_model(folder.path()), &TWO_WORKERS);
    let mut behind = Command::new("nice");
    behind.args(["-n", "19"]).arg(serve.get_program()).args(serve.get_args()).stdout(Stdio::piped());
    let fleet = ServedFleet::start_command(directory, behind);
    let python = folder.path().join("venv/bin/python");
    let run = |command: &mut Command| assert!(command.status().unwrap().success(), "{command:?}");
    run(Command::new("python3").args(["-m", "venv"]).arg(folder.path().join("venv")));
    run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "playwright==1.55.0"]));
    let mut script = Command::new(&python);
    script.arg(in_tree("tests/ui_browser.py")).arg(&browser).arg(&fleet.http).arg(fleet.runtime_dir());
    let (wanted, has_ended) = (folder.path().join("streams-wanted"), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let streams: Vec<_> =
            (0..STREAMS).map(|_| scope.spawn(|| stream_while(&fleet, &wanted, &has_ended))).collect();
        let status = script.arg(tools().to_string()).arg(folder.path()).status().unwrap();
        has_ended.store(true, Ordering::Relaxed);
        streams.into_iter().for_each(|stream| stream.join().unwrap());
        assert!(status.success(), "{script:?}");
    });
    for picture in ["chat-light", "chat-dark", "chat-narrow", "fleet-light", "fleet-killed", "fleet-narrow"] {
        assert!(folder.path().join(format!("{picture}.png")).exists(), "{picture}");
    }
    fleet.stop();
}
