// SPDX-License-Identifier: Apache-2.0

//! Rules of the source tree that the compiler and clippy don't know.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file above this needs a line `//! Longer than 600 lines: <reason>` in its head.
const FILE_LINES_MAX: usize = 600;
const LONG_FILE_MARK: &str = "//! Longer than 600 lines:";

/// The licence in the form that tools read; the first line of every source.
const LICENCE_HEAD: &str = "SPDX-License-Identifier: Apache-2.0";

/// Words for unfinished work; spelt in two halves so that this file passes its own check.
const LEFTOVERS: [&str; 4] =
    [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("todo", "!("), concat!("unimplemented", "!(")];

/// The only folders that may contain `unsafe`.
const UNSAFE_ALLOWED: [&str; 5] =
    ["crates/cuda/", "crates/handoff/", "crates/memory/", "crates/turns/", "kernels/"];

/// Names that belong to one processor family. A file or folder of that name needs a sibling
/// `portable.rs`.
const ARCHITECTURE_NAMES: [&str; 6] = ["x86", "x86_64", "avx2", "avx512", "neon", "aarch64"];

/// The whole tree, demo models included. With the GPU bundle (24 MiB), it fits into the 64 MiB that
/// travel to a machine with a GPU.
const TREE_BYTES_MAX: u64 = 40 << 20;

pub(crate) fn check() -> Result<Vec<String>> {
    let mut findings = Vec::new();
    let files = tracked_files()?;
    let bytes: u64 = files.iter().filter_map(|f| f.metadata().ok()).map(|m| m.len()).sum();
    if bytes > TREE_BYTES_MAX {
        findings.push(format!("the tree has {bytes} bytes, at most {TREE_BYTES_MAX} are allowed"));
    }
    for file in files.iter().filter(|f| is_source(f)) {
        let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        findings.extend(check_source(file, &text));
        findings.extend(crate::output::check_source(file, &text));
        findings.extend(missing_portable_sibling(file));
    }
    findings.extend(crate::language::check(&files)?);
    for library in files.iter().filter(|f| f.ends_with("src/lib.rs") || f.ends_with("src/main.rs")) {
        let text = std::fs::read_to_string(library)?;
        if !may_be_unsafe(library) && !text.contains("#![forbid(unsafe_code)]") {
            findings.push(format!("{}: lacks #![forbid(unsafe_code)]", library.display()));
        }
    }
    Ok(findings)
}

fn check_source(file: &Path, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX && !text.contains(LONG_FILE_MARK) {
        findings.push(format!(
            "{}: {lines} lines; split it by reason to change, or say why in its head: `{LONG_FILE_MARK} ...`",
            file.display()
        ));
    }
    if !text.lines().next().is_some_and(|first| first.contains(LICENCE_HEAD)) {
        findings.push(format!("{}: the first line is not `// {LICENCE_HEAD}`", file.display()));
    }
    for (number, line) in text.lines().enumerate() {
        if let Some(word) = LEFTOVERS.iter().find(|word| line.contains(**word)) {
            findings.push(format!("{}:{}: {word}", file.display(), number + 1));
        }
    }
    findings
}

fn missing_portable_sibling(file: &Path) -> Option<String> {
    let own = file.ancestors().find(|part| {
        part.file_stem().and_then(|stem| stem.to_str()).is_some_and(|stem| ARCHITECTURE_NAMES.contains(&stem))
    })?;
    // The outermost folder of that kind decides: x86/avx2.rs is covered by the portable.rs beside
    // x86/.
    let outermost = file
        .ancestors()
        .filter(|part| {
            part.file_stem()
                .and_then(|stem| stem.to_str())
                .is_some_and(|stem| ARCHITECTURE_NAMES.contains(&stem))
        })
        .last()
        .unwrap_or(own);
    let folder = outermost.parent()?;
    let sibling = folder.join("portable.rs");
    let sibling_folder = folder.join("portable");
    (!sibling.exists() && !sibling_folder.exists())
        .then(|| format!("{}: no portable sibling at {}", file.display(), sibling.display()))
}

fn may_be_unsafe(file: &Path) -> bool {
    UNSAFE_ALLOWED.iter().any(|allowed| file.starts_with(allowed))
}

fn is_source(file: &Path) -> bool {
    matches!(
        file.extension().and_then(|e| e.to_str()),
        Some("rs" | "cu" | "cuh" | "proto" | "html" | "css" | "js")
    )
}

fn tracked_files() -> Result<Vec<PathBuf>> {
    let output = Command::new("git").args(["ls-files", "-z"]).output().context("running git ls-files")?;
    anyhow::ensure!(output.status.success(), "git ls-files failed: run xtask inside the checkout");
    let list = String::from_utf8(output.stdout).context("file names are not UTF-8")?;
    Ok(list.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).filter(|p| p.exists()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_file_needs_a_reason() {
        let long = format!("// {LICENCE_HEAD}\n{}", "x\n".repeat(FILE_LINES_MAX));
        assert_eq!(check_source(Path::new("a.rs"), &long).len(), 1);
        let argued = format!("{long}{LONG_FILE_MARK} one table\n");
        assert!(check_source(Path::new("a.rs"), &argued).is_empty());
    }

    #[test]
    fn leftovers_are_found_with_their_line() {
        let text = format!("// {LICENCE_HEAD}\nfn f() {{\n    {}\n}}\n", LEFTOVERS[2]);
        assert_eq!(check_source(Path::new("a.rs"), &text), [format!("a.rs:3: {}", LEFTOVERS[2])]);
    }

    #[test]
    fn a_source_names_its_licence_first() {
        assert_eq!(check_source(Path::new("a.rs"), "fn f() {}\n").len(), 1);
    }

    #[test]
    fn an_architecture_file_needs_a_portable_sibling() {
        let dir = std::env::temp_dir().join(format!("xtask-siblings-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("x86")).unwrap();
        assert!(missing_portable_sibling(&dir.join("x86/avx2.rs")).is_some());
        std::fs::write(dir.join("portable.rs"), "").unwrap();
        assert!(missing_portable_sibling(&dir.join("x86/avx2.rs")).is_none());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
