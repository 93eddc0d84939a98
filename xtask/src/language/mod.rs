// SPDX-License-Identifier: Apache-2.0

//! Checks of the tree's language: banned words, type names, prose and function lengths.
//!
//! Each check has a list of exceptions beside this crate's manifest. A list can only shrink: an
//! entry that no longer matches anything is itself a finding.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

mod functions;
mod prose;
mod source_text;
mod type_names;
mod words;

pub(crate) fn check(files: &[PathBuf]) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for file in files.iter().filter(|file| is_checked(file)) {
        let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        texts.push((file.clone(), text));
    }
    let mut findings = words::check(&texts);
    findings.extend(type_names::check(&texts));
    findings.extend(prose::check(&texts));
    findings.extend(functions::check(&texts));
    Ok(findings)
}

/// Sources and documents. Data, fixtures and raw measurements keep the words they were made with.
fn is_checked(file: &Path) -> bool {
    let extension = file.extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("rs" | "cu" | "cuh" | "proto" | "md"))
        && !file.starts_with("bench/results")
        && !file.starts_with("demo")
        && file != Path::new("docs/STYLE.md")
}

fn has_extension(file: &Path, extensions: &[&str]) -> bool {
    file.extension().and_then(|extension| extension.to_str()).is_some_and(|own| extensions.contains(&own))
}

/// The entries of an exception list: one a line, `#` begins a comment.
fn entries(list: &str) -> impl Iterator<Item = &str> {
    list.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Findings for entries of `list` that match nothing any more.
fn stale(list_name: &str, list: &str, used: &std::collections::BTreeSet<String>) -> Vec<String> {
    entries(list)
        .filter(|entry| !used.contains(*entry))
        .map(|entry| format!("xtask/{list_name}: `{entry}` is no longer needed; remove the line"))
        .collect()
}
