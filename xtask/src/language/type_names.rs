// SPDX-License-Identifier: Apache-2.0

//! Type names that more than one crate defines.

use super::{entries, has_extension, stale};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Names that may stand in two crates, since they mean the same concept in both.
const SHARED_MAX: usize = 40;
const EXCEPTIONS_NAME: &str = "shared-type-names.txt";
const EXCEPTIONS: &str = include_str!("../../shared-type-names.txt");

pub(super) fn check(texts: &[(PathBuf, String)]) -> Vec<String> {
    let mut crates_of: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (file, text) in texts.iter().filter(|(file, _)| has_extension(file, &["rs"])) {
        for name in defined_types(text) {
            crates_of.entry(name).or_default().insert(crate_of(file));
        }
    }
    let allowed: BTreeSet<&str> = entries(EXCEPTIONS).collect();
    let (mut findings, mut used) = (Vec::new(), BTreeSet::new());
    for (name, crates) in crates_of.iter().filter(|(_, crates)| crates.len() > 1) {
        if allowed.contains(name.as_str()) {
            used.insert(name.clone());
            continue;
        }
        let crates = crates.iter().cloned().collect::<Vec<_>>().join(", ");
        findings.push(format!("type {name} is defined in {crates}; qualify it by what it is there"));
    }
    if allowed.len() > SHARED_MAX {
        findings.push(format!("xtask/{EXCEPTIONS_NAME}: {} names, at most {SHARED_MAX}", allowed.len()));
    }
    findings.extend(stale(EXCEPTIONS_NAME, EXCEPTIONS, &used));
    findings
}

fn crate_of(file: &Path) -> String {
    let parts: Vec<_> = file.iter().map(|part| part.to_string_lossy()).collect();
    let depth = if parts.first().is_some_and(|first| first == "crates") { 2 } else { 1 };
    parts[..depth.min(parts.len())].join("/")
}

/// Structs, enums, traits and unions at any depth; type aliases at the margin, since those within
/// an `impl` are a trait's.
fn defined_types(text: &str) -> Vec<String> {
    text.lines().filter_map(defined_type).collect()
}

fn defined_type(line: &str) -> Option<String> {
    let margin = line.len() - line.trim_start().len();
    let mut words = line.split_whitespace();
    let mut word = words.next()?;
    if word.starts_with("pub") {
        word = words.next()?;
    }
    let defines = match word {
        "struct" | "enum" | "trait" | "union" => true,
        "type" => margin == 0,
        _ => false,
    };
    let name: String = words.next()?.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (defines && name.starts_with(|c: char| c.is_ascii_uppercase())).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_told_from_uses() {
        let text = "pub(crate) struct A<T>(T);\n    enum B {\n// struct C\ntype D = u8;\n    type E = u8;\nimpl F {\n";
        assert_eq!(defined_types(text), ["A", "B", "D"]);
    }

    #[test]
    fn a_name_in_two_crates_is_a_finding() {
        let file = |name: &str| (PathBuf::from(name), "struct Twofold;\n".to_owned());
        let of = |texts: &[(PathBuf, String)]| {
            check(texts).into_iter().filter(|finding| finding.contains("Twofold")).count()
        };
        assert_eq!(of(&[file("crates/a/src/lib.rs"), file("crates/b/src/lib.rs")]), 1);
        assert_eq!(of(&[file("crates/a/src/lib.rs"), file("crates/a/src/b.rs")]), 0);
    }
}
