//! Who may use whom: docs/ARCHITECTURE.md's table against `cargo metadata`.

use cargo_metadata::{DependencyKind, MetadataCommand};
use std::collections::{BTreeMap, BTreeSet};

/// Normal and build dependencies among our own packages. What is not listed is forbidden.
const MAY_USE: &[(&str, &[&str])] = &[
    ("quant", &[]),
    ("proto", &[]),
    ("service", &[]),
    ("prefix", &[]),
    ("pace", &[]),
    ("memory", &["proto"]),
    ("gguf", &["quant"]),
    ("ops", &["quant"]),
    ("models", &["ops", "quant", "gguf"]),
    ("text", &["gguf"]),
    ("grammar", &["text"]),
    ("engine", &["models", "ops", "pace", "prefix"]),
    ("kernels", &["ops", "quant", "memory"]),
    ("weight-server", &["gguf", "quant", "memory", "proto", "service", "kernels"]),
    (
        "worker",
        &[
            "engine", "grammar", "models", "ops", "kernels", "memory", "gguf", "quant", "text", "prefix",
            "proto", "service",
        ],
    ),
    ("router", &["text", "gguf", "pace", "proto", "service"]),
    ("supervisor", &["proto", "service", "memory"]),
    ("loadgen", &["proto", "service", "text"]),
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
