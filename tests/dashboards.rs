// SPDX-License-Identifier: Apache-2.0

//! The Grafana dashboard and the Prometheus alerts in `deploy/`, against the metrics of a fleet.

use std::collections::HashSet;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::http::HttpClient;
use crate::harness::{ServedFleet, demo_7m, in_tree};

const DASHBOARD: &str = "deploy/grafana/ballast.json";
const ALERTS: &str = "deploy/prometheus/ballast.rules.yml";

/// Every name with the prefix `ballast:` in a text.
fn metrics_in(text: &str) -> HashSet<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let names = text.split("ballast:").skip(1).map(|rest| rest.split(|c| !is_name(c)).next().unwrap());
    names.filter(|name| !name.is_empty()).collect()
}

#[test]
fn the_dashboard_and_the_alerts_use_metrics_that_a_fleet_has() {
    let fleet = ServedFleet::start(&demo_7m(), &["--workers", "1", "--threads", "1"]);
    let http = HttpClient::connect(&fleet);
    http.post_json("/v1/completions", &json!({"prompt": "def f(", "max_tokens": 5, "ignore_eos": true}));
    let page = http.get("/metrics").1;
    let helped = page.lines().filter_map(|line| line.strip_prefix("# HELP ballast:")?.split(' ').next());
    let known: HashSet<&str> = helped.collect();
    for file in [DASHBOARD, ALERTS] {
        let text = std::fs::read_to_string(in_tree(file)).unwrap();
        let used = metrics_in(&text);
        assert!(used.len() >= 10, "{file} uses {used:?}");
        for name in used {
            let family = name.strip_suffix("_bucket").unwrap_or(name);
            assert!(known.contains(family), "{file} uses {name}, which no fleet has");
        }
    }
    for name in ["generation_tokens_total", "request_success_total", "time_to_first_token_seconds_count"] {
        let own = http.metric(&format!("ballast:{name}")).unwrap();
        assert_eq!((http.metric(&format!("vllm:{name}")), own > 0.0), (Some(own), true), "{name}");
    }
    fleet.stop();
}

#[test]
#[ignore = "nightly: installs the packages promql-parser and PyYAML"]
fn nightly_the_expressions_of_the_dashboard_and_the_alerts_are_promql() {
    let folder = tempfile::tempdir().unwrap();
    let dashboard: Value =
        serde_json::from_str(&std::fs::read_to_string(in_tree(DASHBOARD)).unwrap()).unwrap();
    let targets =
        dashboard["panels"].as_array().unwrap().iter().filter_map(|panel| panel["targets"].as_array());
    let expressions: Vec<&Value> = targets.flatten().map(|target| &target["expr"]).collect();
    let file = folder.path().join("expressions.json");
    std::fs::write(&file, json!(expressions).to_string()).unwrap();
    let python = folder.path().join("venv/bin/python");
    let run = |command: &mut Command| assert!(command.status().unwrap().success(), "{command:?}");
    run(Command::new("python3").args(["-m", "venv"]).arg(folder.path().join("venv")));
    run(Command::new(&python).args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "promql-parser==0.12.0",
        "PyYAML==6.0.3",
    ]));
    run(Command::new(&python).arg(in_tree("tests/promql.py")).arg(&file).arg(in_tree(ALERTS)));
}
