// SPDX-License-Identifier: Apache-2.0

//! Who may write to standard output and standard error.
//!
//! A print macro panics if its stream is broken, and waits if the stream is not read; in a release
//! build the first ends a fleet and the second freezes it. Processes log, and commands print
//! through `cli/src/terminal.rs`.

use std::path::Path;

/// Each calls a stream by a way that panics, waits, or hides its errors.
const MACROS: [&str; 5] = ["print!(", "println!(", "eprint!(", "eprintln!(", "dbg!("];
const STREAMS: [&str; 6] = [
    "stdout().lock(",
    "stderr().lock(",
    "stdout().write",
    "stderr().write",
    "(std::io::stdout()",
    "(std::io::stderr()",
];

/// The output of commands, with checked errors.
const TERMINAL: &str = "cli/src/terminal.rs";

/// Sources that are no part of the executable: tools, and code for tests.
const EXEMPT: [&str; 4] = ["xtask/", "bench/", "crates/models/src/testing", "crates/models/src/testing.rs"];

/// Stands before the module from which on a file holds its unit tests, and before helpers of tests
/// elsewhere in a file.
const FOR_TESTS: &str = "#[cfg(test)]";

pub(crate) fn check_source(file: &Path, text: &str) -> Vec<String> {
    let name = file.to_string_lossy();
    let is_shipped = name.contains("src/") && !EXEMPT.iter().any(|exempt| name.starts_with(exempt));
    if !is_shipped {
        return Vec::new();
    }
    let streams = if name == TERMINAL { &[][..] } else { &STREAMS[..] };
    let lines: Vec<&str> = text.lines().collect();
    let begins_unit_tests = |at: usize| {
        let mut below = lines[at + 1..].iter().skip_while(|line| line.trim_start().starts_with("#["));
        lines[at].trim() == FOR_TESTS
            && below.next().is_some_and(|line| line.starts_with("mod ") && line.ends_with('{'))
    };
    let shipped = (0..lines.len()).take_while(|&at| !begins_unit_tests(at));
    let found = shipped.map(|at| (at, lines[at])).filter_map(|(number, line)| {
        let code = line.trim_start();
        let is_comment = code.starts_with("//");
        let word =
            MACROS.iter().find(|word| calls(code, word)).or(streams.iter().find(|s| code.contains(**s)));
        let word = word.filter(|_| !is_comment)?;
        let advice = "a broken or stalled stream panics or waits here; log, or use cli/src/terminal.rs";
        Some(format!("{name}:{}: {word}..): {advice}", number + 1))
    });
    found.collect()
}

/// Whether the code calls this macro, and not one whose name ends like it.
fn calls(code: &str, name: &str) -> bool {
    code.match_indices(name)
        .any(|(at, _)| !code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(file: &str, line: &str) -> usize {
        check_source(Path::new(file), &format!("fn f() {{\n    {line}\n}}\n")).len()
    }

    #[test]
    fn print_macros_stand_in_no_process() {
        let mut prints = MACROS.map(|name| format!("{name}\"x\");"));
        assert!(prints.iter().all(|line| findings("worker/src/a.rs", line) == 1), "{prints:?}");
        prints.iter_mut().for_each(|line| line.insert_str(0, "// "));
        assert!(prints.iter().all(|line| findings("worker/src/a.rs", line) == 0), "{prints:?}");
        assert_eq!(findings("worker/src/a.rs", "my_println!(\"x\");"), 0);
    }

    #[test]
    fn streams_are_written_in_one_place() {
        let line = "let mut out = std::io::stdout().lock();";
        assert_eq!(findings("cli/src/ps.rs", line), 1);
        assert_eq!(findings("cli/src/ps.rs", "writeln!(std::io::stdout(), \"x\")"), 1);
        assert_eq!(findings("cli/src/ps.rs", "io::stdout().write_all(b\"x\")"), 1);
        assert_eq!(findings(TERMINAL, line), 0);
        assert_eq!(findings("cli/src/ps.rs", "std::io::stdout().is_terminal()"), 0);
    }

    #[test]
    fn unit_tests_and_tools_may_print() {
        let line = format!("{}\"x\");", MACROS[1]);
        assert_eq!(findings("xtask/src/main.rs", &line), 0);
        assert_eq!(findings("tests/harness/mod.rs", &line), 0);
        let text = format!("fn f() {{}}\n\n{FOR_TESTS}\nmod tests {{\n    {line}\n}}\n");
        assert!(check_source(Path::new("worker/src/a.rs"), &text).is_empty());
        let text = format!("{FOR_TESTS}\nmod tests;\n\nfn f() {{\n    {line}\n}}\n");
        assert_eq!(check_source(Path::new("worker/src/a.rs"), &text).len(), 1);
    }
}
