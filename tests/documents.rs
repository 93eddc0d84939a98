// SPDX-License-Identifier: Apache-2.0

//! The README's table of what works, against what the executable says it can do.

use crate::harness::{ballast, demo_7m, demo_22m, in_tree, text};
use std::path::Path;

/// The second cell of the README's row that begins with `area`.
fn readme_row(area: &str) -> String {
    let readme = std::fs::read_to_string(in_tree("README.md")).unwrap();
    let begin = format!("| {area} |");
    let row = readme.lines().find(|line| line.starts_with(&begin)).expect(area);
    row[begin.len()..].split('|').next().unwrap().trim().to_owned()
}

/// What `ballast` prints on stderr about a copy of `model` in which `from` is replaced by `to`.
fn refusal(model: &Path, from: &[u8], to: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("changed.gguf");
    let mut bytes = std::fs::read(model).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    bytes[at..at + from.len()].copy_from_slice(to);
    std::fs::write(&file, bytes).unwrap();
    let output =
        ballast().args(["generate", "--prompt", "x", "--device", "host"]).arg(&file).output().unwrap();
    assert!(!output.status.success());
    text(&output).1
}

#[test]
fn readme_names_the_architectures_that_are_known() {
    let stderr = refusal(&demo_7m(), b"qwen3", b"qwen9");
    let known = stderr.split("known are ").nth(1).unwrap().split_whitespace();
    let known: Vec<&str> = known.map(|name| name.trim_matches([',', ';', '.', ':'])).collect();
    let row = readme_row("architectures");
    let mut named: Vec<&str> = row.split([',', ';', ' ']).filter(|word| !word.is_empty()).collect();
    named.retain(|word| !["on", "the", "host", "only"].contains(word));
    named.sort_unstable();
    let mut expected: Vec<&str> = known.into_iter().take(named.len()).collect();
    expected.sort_unstable();
    assert_eq!(named, expected, "{stderr}");
}

#[test]
fn readme_names_the_weight_types_that_have_kernels() {
    // A tensor's type is a number of four bytes behind its name and two dimensions.
    let name = b"blk.0.ffn_up.weight";
    let bytes = std::fs::read(demo_22m()).unwrap();
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap();
    let end = at + name.len() + 4 + 2 * 8 + 4;
    let mut changed = bytes[at..end].to_vec();
    // IQ4_NL, of the same size as Q4_K.
    let dtype = changed.len() - 4;
    changed[dtype..].copy_from_slice(&20_u32.to_le_bytes());
    let stderr = refusal(&demo_22m(), &bytes[at..end], &changed);
    let row = readme_row("weight types").replace(", Q2_K", " and Q2_K");
    assert!(stderr.contains(&row), "{row:?} is not in {stderr:?}");
}

#[test]
fn readme_names_the_kv_cache_types() {
    let output = ballast().arg("plan").arg(demo_7m()).args(["--kv-type", "q4_0"]).output().unwrap();
    let row = readme_row("KV cache types");
    let types = row.trim_end_matches(", per layer").replace(", q8_0", " or q8_0");
    let stderr = text(&output).1;
    assert!(stderr.contains(&types), "{types:?} is not in {stderr:?}");
}
