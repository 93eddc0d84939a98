// SPDX-License-Identifier: Apache-2.0

//! Functions of Rust and CUDA longer than 80 lines.

use super::source_text::without_literals;
use super::{entries, has_extension, stale};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const FUNCTION_LINES_MAX: usize = 80;

/// `path function` a line: functions that were longer when the check came.
const EXCEPTIONS_NAME: &str = "long-functions.txt";
const EXCEPTIONS: &str = include_str!("../../long-functions.txt");

pub(super) fn check(texts: &[(PathBuf, String)]) -> Vec<String> {
    let allowed: BTreeSet<&str> = entries(EXCEPTIONS).collect();
    let (mut findings, mut used) = (Vec::new(), BTreeSet::new());
    for (file, text) in texts.iter().filter(|(file, _)| has_extension(file, &["rs", "cu", "cuh"])) {
        for function in long_functions(file, text) {
            let entry = format!("{} {}", file.display(), function.name);
            if allowed.contains(entry.as_str()) {
                used.insert(entry);
                continue;
            }
            findings.push(format!(
                "{}:{}: function {} has {} lines, at most {FUNCTION_LINES_MAX} are allowed",
                file.display(),
                function.line,
                function.name,
                function.lines
            ));
        }
    }
    findings.extend(stale(EXCEPTIONS_NAME, EXCEPTIONS, &used));
    findings
}

struct Function {
    name: String,
    line: usize,
    lines: usize,
}

/// A function begins at the line that names it and ends where its braces close.
fn long_functions(file: &Path, text: &str) -> Vec<Function> {
    let is_rust = has_extension(file, &["rs"]);
    let code = without_literals(text);
    let lines: Vec<&str> = code.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let name = if is_rust { rust_function(line) } else { cuda_function(line, start, &lines) };
        let Some(name) = name else { continue };
        let Some(end) = end_of_body(&lines, start) else { continue };
        if end - start + 1 > FUNCTION_LINES_MAX {
            found.push(Function { name, line: start + 1, lines: end - start + 1 });
        }
    }
    found
}

fn rust_function(line: &str) -> Option<String> {
    let line = line.trim_start();
    let rest = line.split_once("fn ").filter(|(before, _)| {
        before.is_empty()
            || before.ends_with(' ') && !before.contains(['(', ':', '<', '='])
            || before.starts_with("pub(")
    })?;
    identifier(rest.1)
}

/// A definition in CUDA C++ stands at the left margin and has its parameters' bracket on its line.
fn cuda_function(line: &str, start: usize, lines: &[&str]) -> Option<String> {
    let first = line.chars().next()?;
    if !(first.is_ascii_alphabetic() || first == '_') || !line.contains('(') || line.starts_with("namespace")
    {
        return None;
    }
    let before = line.rsplit_once('(')?.0;
    let head = before.split('(').next_back()?.trim_end();
    let name: String = head.chars().rev().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    let name: String = name.chars().rev().collect();
    // A macro is called by a name in capitals.
    if !name.chars().any(char::is_lowercase) {
        return None;
    }
    // A declaration or a macro call ends with a semicolon before any brace.
    let body = lines[start..].iter().find(|line| line.contains('{') || line.contains(';'))?;
    (!name.is_empty() && body.contains('{')).then_some(name)
}

fn identifier(text: &str) -> Option<String> {
    let name: String = text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!name.is_empty()).then_some(name)
}

/// The line in which the first brace that opens at or after `start` closes; none for a declaration.
fn end_of_body(lines: &[&str], start: usize) -> Option<usize> {
    let mut depth = 0_usize;
    let mut brackets = 0_isize;
    for (number, line) in lines.iter().enumerate().skip(start) {
        for character in line.chars() {
            match character {
                '(' | '[' => brackets += 1,
                ')' | ']' => brackets -= 1,
                ';' if depth == 0 && brackets == 0 => return None,
                '{' => depth += 1,
                '}' => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        return Some(number);
                    }
                }
                _ => {}
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(file: &str, text: &str) -> Vec<String> {
        long_functions(Path::new(file), text).into_iter().map(|found| found.name).collect()
    }

    #[test]
    fn a_long_function_is_found_in_rust_and_in_cuda() {
        let body = "    x();\n".repeat(FUNCTION_LINES_MAX);
        assert_eq!(named("a.rs", &format!("pub(crate) fn long(a: [u8; 2]) {{\n{body}}}\n")), ["long"]);
        assert_eq!(
            named("a.cu", &format!("extern \"C\" __global__ void wide(int a)\n{{\n{body}}}\n")),
            ["wide"]
        );
    }

    #[test]
    fn short_functions_and_declarations_pass() {
        let body = "    x();\n".repeat(FUNCTION_LINES_MAX);
        assert!(named("a.rs", "fn short() {\n}\n").is_empty());
        assert!(named("a.rs", &format!("trait T {{\n    fn declared();\n{body}}}\n")).is_empty());
        assert!(named("a.cu", &format!("void declared(int a);\nstruct S {{\n{body}}};\n")).is_empty());
    }
}
