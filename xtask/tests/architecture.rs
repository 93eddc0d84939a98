// SPDX-License-Identifier: Apache-2.0

//! What docs/ARCHITECTURE.md says of the tree, against the tree: who may use whom, and that each
//! invariant has its test.

use cargo_metadata::{DependencyKind, MetadataCommand};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Normal and build dependencies among our own packages. What is not listed is forbidden.
const MAY_USE: &[(&str, &[&str])] = &[
    ("quant", &[]),
    ("proto", &[]),
    ("service", &[]),
    ("prefix", &[]),
    ("retry-after", &[]),
    ("sampling-params", &[]),
    ("chat-output", &[]),
    ("cuda", &[]),
    ("turns", &[]),
    ("traces", &["service"]),
    ("memory", &["cuda"]),
    ("handoff", &["cuda", "memory", "proto"]),
    ("gguf", &["quant"]),
    ("ops", &["quant"]),
    ("models", &["ops", "quant", "gguf"]),
    ("text", &["gguf"]),
    ("grammar", &["text"]),
    ("engine", &["models", "ops", "retry-after", "prefix", "sampling-params"]),
    ("kernels", &["cuda", "ops", "quant", "memory", "turns"]),
    ("weight-server", &["cuda", "gguf", "handoff", "quant", "memory", "proto", "service", "kernels", "text"]),
    (
        "worker",
        &[
            "engine",
            "grammar",
            "models",
            "ops",
            "kernels",
            "memory",
            "gguf",
            "quant",
            "text",
            "prefix",
            "proto",
            "sampling-params",
            "service",
            "traces",
            "cuda",
            "handoff",
            "turns",
        ],
    ),
    (
        "router",
        &[
            "chat-output",
            "text",
            "gguf",
            "prefix",
            "retry-after",
            "proto",
            "sampling-params",
            "service",
            "traces",
        ],
    ),
    ("supervisor", &["proto", "service"]),
    ("device-monitor", &["cuda", "proto", "service"]),
    ("ballast-client", &["proto"]),
    ("loadgen", &["proto", "service", "text"]),
    (
        "simulation",
        &[
            "engine",
            "handoff",
            "memory",
            "prefix",
            "proto",
            "router",
            "service",
            "supervisor",
            "weight-server",
        ],
    ),
    ("xtask", &[]),
];

/// The executable may use every library.
const EXECUTABLE: &str = "ballast";

#[test]
fn dependencies_go_one_way() {
    let metadata = MetadataCommand::new().no_deps().exec().unwrap();
    let ours: BTreeSet<String> = metadata.packages.iter().map(|p| p.name.to_string()).collect();
    let allowed: BTreeMap<&str, &[&str]> = MAY_USE.iter().copied().collect();
    let mut violations = Vec::new();
    for package in metadata.packages.iter().filter(|p| p.name.as_str() != EXECUTABLE) {
        let Some(may_use) = allowed.get(package.name.as_str()) else {
            violations.push(format!("{} is not in the table", package.name));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|d| d.kind != DependencyKind::Development) {
            if ours.contains(&dependency.name) && !may_use.contains(&dependency.name.as_str()) {
                violations.push(format!("{} may not use {}", package.name, dependency.name));
            }
        }
    }
    for (name, _) in MAY_USE.iter().filter(|(name, _)| !ours.contains(*name)) {
        violations.push(format!("{name} is in the table but not in the workspace"));
    }
    assert!(violations.is_empty(), "{violations:#?}");
}

/// Tests here run on a GPU alone, which nothing that has to pass needs.
const GPU_ONLY: &str = "tests/gpu/";

#[test]
fn every_invariant_has_a_test_that_names_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let architecture = std::fs::read_to_string(root.join("docs/ARCHITECTURE.md")).unwrap();
    let stated: BTreeSet<u32> = architecture
        .lines()
        .filter_map(|line| line.strip_prefix("- **I")?.split(' ').next()?.parse().ok())
        .collect();
    assert_eq!(stated, (1..=8).collect());
    let listed = Command::new("git").args(["ls-files", "*.rs"]).current_dir(root).output().unwrap();
    assert!(listed.status.success(), "{listed:?}");
    let files = String::from_utf8(listed.stdout).unwrap();
    let mut named = BTreeSet::new();
    for file in files.lines().filter(|file| !file.contains(GPU_ONLY)) {
        // A file may have been removed and not committed yet.
        let text = std::fs::read_to_string(root.join(file)).unwrap_or_default();
        let numbers = text.lines().filter_map(|line| {
            let name = line.trim_start().strip_prefix("fn i")?;
            name.split('_').next()?.parse::<u32>().ok()
        });
        named.extend(numbers);
    }
    let unnamed: Vec<&u32> = stated.difference(&named).collect();
    assert!(unnamed.is_empty(), "no test outside of {GPU_ONLY} names I{unnamed:?}");
}
