// SPDX-License-Identifier: Apache-2.0

//! What documents name, against the tree: files, tests and sections exist.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do: at once, saying where")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Documents whose tables name tests.
const WITH_TESTS: [&str; 3] = ["README.md", "docs/RELIABILITY.md", "docs/internals/scheduler.md"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn tracked(pattern: &str) -> Vec<String> {
    let output = Command::new("git").args(["ls-files", pattern]).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let list = String::from_utf8(output.stdout).unwrap();
    // A file may have been removed and not committed yet.
    list.lines().filter(|file| root().join(file).exists()).map(str::to_owned).collect()
}

/// Documents of today; measurements and the changelog speak of the past.
fn documents() -> Vec<(String, String)> {
    let names = tracked("*.md").into_iter();
    let names = names.filter(|name| !name.starts_with("bench/results") && name != "CHANGELOG.md");
    names.map(|name| (name.clone(), std::fs::read_to_string(root().join(name)).unwrap())).collect()
}

/// What stands in backticks, outside of code blocks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    let mut in_block = false;
    text.lines()
        .filter(move |line| {
            in_block ^= line.trim_start().starts_with("```");
            !in_block && !line.starts_with("    ")
        })
        .flat_map(|line| line.split('`').skip(1).step_by(2))
}

/// A path of the tree: a folder with a slash at its end, or a file of a type that stands there.
fn is_path(name: &str) -> bool {
    let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
    let ending = name.ends_with('/')
        || [".rs", ".cu", ".cuh", ".proto", ".toml", ".md", ".txt"].iter().any(|end| name.ends_with(end));
    plain && ending && name.contains('/') && !name.starts_with('/') && !name.contains("NAME")
}

#[test]
fn every_file_that_a_document_names_exists() {
    let mut missing = Vec::new();
    for (document, text) in documents() {
        let folder = root().join(&document).parent().unwrap().to_path_buf();
        let named = quoted(&text).filter(|name| is_path(name));
        for name in named.filter(|name| !name.starts_with("dist/") && !name.starts_with("target/")) {
            if !root().join(name).exists() && !folder.join(name).exists() {
                missing.push(format!("{document}: {name}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn every_link_between_documents_has_its_target() {
    let mut missing = Vec::new();
    for (document, text) in documents() {
        let folder = root().join(&document).parent().unwrap().to_path_buf();
        // A link may be broken over two lines.
        let text = text.replace('\n', " ");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = link.split('#').next().unwrap();
            if !target.is_empty() && !target.contains("://") && !folder.join(target).exists() {
                missing.push(format!("{document}: {link}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn every_test_that_a_table_names_exists() {
    let mut tests = BTreeSet::new();
    for file in tracked("*.rs") {
        let text = std::fs::read_to_string(root().join(file)).unwrap();
        let names = text.lines().filter_map(|line| {
            let rest = line.trim_start().trim_start_matches("async ").strip_prefix("fn ")?;
            Some(rest.split(['(', '<']).next()?.to_owned())
        });
        tests.extend(names);
    }
    let mut missing = Vec::new();
    for document in WITH_TESTS {
        let text = std::fs::read_to_string(root().join(document)).unwrap();
        for row in text.lines().filter(|line| line.starts_with('|') && !line.starts_with("|--")) {
            let cell = row.trim_end_matches('|').rsplit('|').next().unwrap().trim();
            let names = cell.split(',').map(str::trim).filter(|name| name.starts_with('`'));
            for name in names.map(|name| name.trim_matches('`')) {
                if name.matches('_').count() >= 3 && !tests.contains(name) {
                    missing.push(format!("{document}: {name}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}
