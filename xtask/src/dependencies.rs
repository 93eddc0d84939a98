// SPDX-License-Identifier: Apache-2.0

//! The dependency audit on `cargo metadata`: where packages come from, their licences, versions
//! present twice.

use anyhow::{Context, Result};
use cargo_metadata::{MetadataCommand, Package};
use std::collections::{BTreeMap, BTreeSet};

/// Licences whose terms allow shipping a binary under Apache-2.0.
const LICENCES: [&str; 13] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// `name: reason` a line; a package may stand in the lock file in several versions only with a
/// reason here.
const DUPLICATES: &str = include_str!("../duplicates.txt");

pub(crate) fn check() -> Result<Vec<String>> {
    let metadata =
        MetadataCommand::new().other_options(vec!["--locked".into()]).exec().context("cargo metadata")?;
    let external: Vec<&Package> = metadata.packages.iter().filter(|p| p.source.is_some()).collect();
    let mut findings = Vec::new();
    for package in &external {
        let at = format!("{} {}", package.name, package.version);
        if !package.source.as_ref().is_some_and(|s| s.is_crates_io()) {
            findings.push(format!("{at}: does not come from crates.io"));
        }
        match &package.license {
            Some(expression) if licence_allowed(expression) => {}
            Some(expression) => findings.push(format!("{at}: licence `{expression}` is not on the list")),
            None => findings.push(format!("{at}: names no licence")),
        }
    }
    let mut versions: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for package in &external {
        versions.entry(package.name.as_str()).or_default().insert(package.version.to_string());
    }
    findings.extend(check_duplicates(&versions, DUPLICATES));
    eprintln!("tidy: {} external packages, all sources and licences read", external.len());
    Ok(findings)
}

fn check_duplicates(versions: &BTreeMap<&str, BTreeSet<String>>, reasons: &str) -> Vec<String> {
    let reasons: BTreeMap<&str, &str> =
        reasons.lines().filter(|l| !l.starts_with('#')).filter_map(|l| l.split_once(": ")).collect();
    let mut findings = Vec::new();
    for (name, versions) in versions.iter().filter(|(_, v)| v.len() > 1) {
        if !reasons.contains_key(name) {
            let list = versions.iter().cloned().collect::<Vec<_>>().join(", ");
            findings.push(format!("{name}: versions {list}; give the reason in xtask/duplicates.txt"));
        }
    }
    for name in reasons.keys().filter(|name| versions.get(**name).is_none_or(|v| v.len() < 2)) {
        findings.push(format!("{name}: is in xtask/duplicates.txt but not there twice"));
    }
    findings
}

/// SPDX expressions as crates write them: `A OR B` needs one allowed side, `A AND B` both; `/` is the old form of OR.
fn licence_allowed(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    let expression = expression.trim();
    if let Some(parts) = split_outside_parentheses(expression, " AND ") {
        return parts.iter().all(|part| licence_allowed(part));
    }
    if let Some(parts) = split_outside_parentheses(expression, " OR ") {
        return parts.iter().any(|part| licence_allowed(part));
    }
    match expression.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
        Some(inner) => licence_allowed(inner),
        None => LICENCES.contains(&expression),
    }
}

fn split_outside_parentheses<'a>(expression: &'a str, operator: &str) -> Option<Vec<&'a str>> {
    let mut depth = 0usize;
    let mut start = 0;
    let mut parts = Vec::new();
    for (at, character) in expression.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ if depth == 0 && at >= start && expression[at..].starts_with(operator) => {
                parts.push(&expression[start..at]);
                start = at + operator.len();
            }
            _ => {}
        }
    }
    if parts.is_empty() {
        return None;
    }
    parts.push(&expression[start..]);
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_expressions_are_understood() {
        for good in ["MIT", "MIT/Apache-2.0", "GPL-3.0 OR MIT", "(MIT OR GPL-2.0) AND Unicode-3.0"] {
            assert!(licence_allowed(good), "{good}");
        }
        for bad in ["GPL-3.0", "MIT AND GPL-3.0", "(GPL-2.0 OR GPL-3.0) AND MIT", ""] {
            assert!(!licence_allowed(bad), "{bad}");
        }
    }

    #[test]
    fn duplicates_need_a_reason_and_reasons_a_duplicate() {
        let two = BTreeSet::from(["1.0.0".to_owned(), "2.0.0".to_owned()]);
        let versions = BTreeMap::from([("a", two)]);
        assert_eq!(check_duplicates(&versions, "").len(), 1);
        assert!(check_duplicates(&versions, "a: b wants the old one\n").is_empty());
        assert_eq!(check_duplicates(&versions, "a: x\nb: y\n").len(), 1);
    }
}
