// SPDX-License-Identifier: Apache-2.0

//! Several models of one file share one copy of the weights; aliases are further names of a model.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::harness::http::HttpClient;
use crate::harness::{
    ServedFleet, ballast, demo_7m, demo_22m, device, eventually, first_json_line, proc, serve_config, text,
};

fn model(name: &str, path: &Path, workers: u32, more: &str) -> String {
    let device = device();
    format!(
        "[[models]]\nname = {name:?}\npath = {path:?}\ndevice = {device:?}\nworkers = {workers}\nthreads = 1\n\
         {more}\n"
    )
}

/// Another path of the file.
fn link(file: &Path, folder: &Path) -> PathBuf {
    let link = folder.join("link.gguf");
    std::os::unix::fs::symlink(file, &link).unwrap();
    link
}

fn complete(http: &HttpClient, model: &str, prompt: &str) -> (u16, Value) {
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 48, "temperature": 0});
    let (status, reply) = http.post("/v1/completions", &body);
    (status, serde_json::from_str(&reply).unwrap())
}

/// The model's greedy text, as soon as it is served.
fn answer(http: &HttpClient, model: &str) -> String {
    let whole = eventually(model, || {
        let (status, reply) = complete(http, model, "def add(a, b):\n");
        (status == 200).then_some(reply)
    });
    whole["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// The copies of weights, each with the models that use it.
fn copies(fleet: &ServedFleet) -> BTreeSet<String> {
    let lines = fleet.try_ps_lines().unwrap();
    let copies = lines.iter().filter(|line| line["role"] == "generation");
    copies.map(|copy| format!("{} {}", copy["name"].as_str().unwrap(), copy["used_by"])).collect()
}

fn set<const N: usize>(copies: [&str; N]) -> BTreeSet<String> {
    copies.map(str::to_owned).into()
}

#[test]
fn models_of_one_file_share_a_copy_and_keep_their_own_settings() {
    let folder = tempfile::tempdir().unwrap();
    let link = link(&demo_22m(), folder.path());
    let long = model("long", &demo_22m(), 1, "kv-tokens = 1024\ndraft = \"small-2\"\naliases = [\"gpt\"]");
    let short = model("short", &link, 2, "kv-tokens = 256\nctx-size = 64\nkv-type = \"q8_0\"");
    let small = model("small", &demo_7m(), 1, "kv-tokens = 256");
    let config = format!("{long}{short}{small}{}", model("small-2", &demo_7m(), 0, ""));
    let fleet = ServedFleet::start_config(&config);
    let http = HttpClient::connect(&fleet);
    let both = set(["model:long [\"long\",\"short\"]", "model:small [\"small\",\"small-2\"]"]);
    assert_eq!(copies(&fleet), both);

    let texts = ["long", "gpt", "short", "small"].map(|name| answer(&http, name));
    assert_eq!(texts[0], texts[1]);
    assert_ne!(texts[0], texts[3]);
    let drafted = "ballast:spec_decode_num_draft_tokens_total{model_name=\"long\"";
    eventually("the shared small model drafts", || http.metric(drafted).filter(|&tokens| tokens > 0.0));
    let prompt = "x = [1, 2, 3]\n".repeat(20);
    assert_eq!(complete(&http, "long", &prompt).0, 200);
    assert_eq!(complete(&http, "short", &prompt).0, 400, "its context has 64 tokens");

    let listed: Value = serde_json::from_str(&http.get("/v1/models").1).unwrap();
    let listed = listed["data"].as_array().unwrap();
    let of = |id: &str| listed.iter().find(|entry| entry["id"] == id).unwrap();
    assert_eq!((&of("gpt")["root"], &of("gpt")["digest"]), (&json!("long"), &of("short")["digest"]));
    let metrics = http.get("/metrics").1;
    let lines = |name: &str| metrics.lines().filter(|line| line.starts_with(name)).count();
    assert_eq!(lines("ballast:weights_bytes{"), 2, "each copy once: {metrics}");
    assert_eq!(lines("ballast:weights_workers{"), 3, "long, short and small: {metrics}");

    fleet.run(&["unload", "long"]);
    let left = set(["model:long [\"short\"]", "model:small [\"small\",\"small-2\"]"]);
    assert_eq!(copies(&fleet), left);
    assert_eq!(answer(&http, "short"), texts[2]);
    eventually("its alias is unknown", || (complete(&http, "gpt", "x").0 == 404).then_some(()));
    let path = demo_22m();
    let load =
        ["load", path.to_str().unwrap(), "--device", &device(), "--threads", "1", "--kv-tokens", "256"];
    fleet.run(&[&load[..], &["--name", "long", "--alias", "gpt"]].concat());
    assert_eq!(copies(&fleet), both);
    assert_eq!(answer(&http, "gpt"), texts[0]);
    let taken = fleet.run_command(&[&load[..], &["--name", "other", "--alias", "short"]].concat());
    assert!(!taken.status.success() && text(&taken).1.contains("\"short\""), "{}", text(&taken).1);
    fleet.run(&["unload", "long"]);
    fleet.run(&["unload", "short"]);
    eventually("the copy without a model is gone", || {
        (copies(&fleet) == set(["model:small [\"small\",\"small-2\"]"])).then_some(())
    });
    fleet.stop();
}

#[test]
fn a_shared_copy_outlives_weight_server_and_supervisor_with_all_its_workers() {
    let directory = tempfile::Builder::new().prefix("ballast-test-").tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| model(name, &demo_7m(), 1, "kv-tokens = 256"));
    let runtime_dir = directory.path().join("run");
    let mut fleet = ServedFleet::start_command(directory, serve_config(&runtime_dir, &format!("{a}{b}")));
    let texts = ["a", "b"].map(|name| answer(&HttpClient::connect(&fleet), name));
    let workers = |fleet: &ServedFleet| {
        let workers = fleet.processes_by_role("worker");
        workers.into_iter().map(|worker| (worker.name, worker.pid)).collect::<Vec<_>>()
    };
    let before = workers(&fleet);
    proc::send_signal(fleet.only_process("weight-server").pid, "KILL");
    proc::send_signal(fleet.supervisor.id(), "KILL");
    fleet.supervisor.wait().unwrap();
    // The successor names the models in another order.
    let mut successor = serve_config(&runtime_dir, &format!("{b}{a}")).spawn().unwrap();
    first_json_line(&mut successor);
    fleet.supervisor = successor;
    eventually("the copy is adopted", || (copies(&fleet) == set(["model:a [\"a\",\"b\"]"])).then_some(()));
    assert_eq!(workers(&fleet), before, "no worker restarts");
    assert_eq!(["a", "b"].map(|name| answer(&HttpClient::connect(&fleet), name)), texts);
    fleet.stop();
}

#[test]
fn other_packing_of_one_file_is_a_second_copy_and_the_plan_says_so() {
    let kv = "kv-tokens = 256\n";
    let [a, b] = ["a", "b"].map(|name| model(name, &demo_7m(), 1, kv));
    let unpacked = model("unpacked", &demo_7m(), 1, &format!("{kv}pack = false"));
    let config = format!("{a}{b}{unpacked}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fleet.toml");
    let plan = |config: &str, more: &[&str]| {
        std::fs::write(&file, config).unwrap();
        let output = ballast().args(["plan", "--config"]).arg(&file).args(more).output().unwrap();
        (output.status.code(), text(&output))
    };
    let (_, (printed, _)) = plan(&config, &[]);
    assert!(printed.contains("the copy of a, counted there"), "{printed}");
    assert!(printed.contains("`pack` differs from a"), "{printed}");
    let needed = |config: &str| {
        let report: Value = serde_json::from_str(&plan(config, &["--json"]).1.0).unwrap();
        report["devices"][0]["needed"].as_u64().unwrap()
    };
    let weights = needed(&model("a", &demo_7m(), 0, kv));
    assert_eq!(needed(&format!("{a}{b}")) - weights, 2 * (needed(&a) - weights), "the weights count once");
    let (code, (_, error)) = plan(&format!("{a}{}", model("b", &demo_7m(), 1, "aliases = [\"a\"]")), &[]);
    assert!(code == Some(2) && error.contains("\"a\""), "{code:?}: {error}");

    let fleet = ServedFleet::start_config(&config);
    assert_eq!(copies(&fleet), set(["model:a [\"a\",\"b\"]", "model:unpacked [\"unpacked\"]"]));
    let http = HttpClient::connect(&fleet);
    let texts = ["a", "b", "unpacked"].map(|name| answer(&http, name));
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    fleet.stop();
}
