// SPDX-License-Identifier: Apache-2.0

//! Form of documents: lines of at most 100 columns and, in docs/ and README.md, sentences of at
//! most 30 words. Doc comments in sources keep to 100 columns too.

use super::{entries, has_extension, stale};
use std::collections::BTreeSet;
use std::path::PathBuf;

const COLUMNS_MAX: usize = 100;
const SENTENCE_WORDS_MAX: usize = 30;

/// Files whose comments are not yet wrapped; `path` a line.
const EXCEPTIONS_NAME: &str = "wide-comments.txt";
const EXCEPTIONS: &str = include_str!("../../wide-comments.txt");

pub(super) fn check(texts: &[(PathBuf, String)]) -> Vec<String> {
    let allowed: BTreeSet<&str> = entries(EXCEPTIONS).collect();
    let (mut findings, mut used) = (Vec::new(), BTreeSet::new());
    for (file, text) in texts {
        let name = file.display().to_string();
        if has_extension(file, &["md"]) {
            findings.extend(wide_lines(text).map(|line| too_wide(&name, line)));
            if file.starts_with("docs") || name == "README.md" {
                findings.extend(long_sentences(text).into_iter().map(|(line, words)| {
                    format!("{name}:{line}: a sentence of {words} words, at most {SENTENCE_WORDS_MAX}")
                }));
            }
        } else {
            let mut wide = wide_comments(text).peekable();
            if wide.peek().is_some() && allowed.contains(name.as_str()) {
                used.insert(name);
            } else {
                findings.extend(wide.map(|line| too_wide(&name, line)));
            }
        }
    }
    findings.extend(stale(EXCEPTIONS_NAME, EXCEPTIONS, &used));
    findings
}

fn too_wide(file: &str, line: usize) -> String {
    format!("{file}:{line}: more than {COLUMNS_MAX} columns")
}

/// Lines of a document that are too wide. A row of a table and a link cannot be wrapped.
fn wide_lines(text: &str) -> impl Iterator<Item = usize> {
    let mut in_block = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        in_block ^= line.trim_start().starts_with("```");
        let cannot_wrap = in_block || line.starts_with("    ") || line.trim_start().starts_with('|');
        (line.chars().count() > COLUMNS_MAX && !cannot_wrap && line.trim().contains(' '))
            .then_some(number + 1)
    })
}

fn wide_comments(text: &str) -> impl Iterator<Item = usize> {
    text.lines().enumerate().filter_map(|(number, line)| {
        let is_comment = line.trim_start().starts_with("//") && !line.contains("://");
        (is_comment && line.chars().count() > COLUMNS_MAX).then_some(number + 1)
    })
}

/// The first line and the number of words of each sentence that is too long. Paragraphs and list
/// items are read; code, tables and headings are not.
fn long_sentences(text: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut paragraph: Vec<(usize, &str)> = Vec::new();
    let mut in_block = false;
    for (number, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        in_block ^= trimmed.starts_with("```");
        let is_code = in_block || trimmed.starts_with("```") || line.starts_with("    ");
        let ends = trimmed.is_empty() || is_code || trimmed.starts_with(['|', '#']);
        if ends || is_list_item(trimmed) {
            sentences(&paragraph, &mut found);
            paragraph.clear();
        }
        if !ends {
            paragraph.extend(trimmed.split_whitespace().map(|word| (number + 1, word)));
        }
    }
    sentences(&paragraph, &mut found);
    found
}

fn is_list_item(line: &str) -> bool {
    let digits = line.chars().take_while(char::is_ascii_digit).count();
    line.starts_with("- ") || digits > 0 && line[digits..].starts_with(". ")
}

fn sentences(words: &[(usize, &str)], found: &mut Vec<(usize, usize)>) {
    let mut begin = 0;
    for (at, (_, word)) in words.iter().enumerate() {
        let end = word.trim_end_matches([')', '*', '"', '`', ']', '_']).ends_with(['.', '!', '?', ':', ';']);
        if !end && at + 1 < words.len() {
            continue;
        }
        let count = words[begin..=at].iter().filter(|(_, word)| word.contains(char::is_alphanumeric)).count();
        if count > SENTENCE_WORDS_MAX {
            found.push((words[begin].0, count));
        }
        begin = at + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings_of(file: &str, text: &str) -> Vec<String> {
        let findings = check(&[(PathBuf::from(file), text.to_owned())]);
        findings.into_iter().filter(|finding| finding.starts_with(file)).collect()
    }

    #[test]
    fn a_wide_line_is_a_finding_but_not_in_a_table_or_code() {
        let wide = "word ".repeat(30);
        assert_eq!(findings_of("a.md", &wide).len(), 1);
        assert_eq!(
            findings_of("docs/a.md", &format!("| {wide}|\n\n    {wide}\n```\n{wide}\n```\n")).len(),
            0
        );
        assert_eq!(findings_of("a.rs", &format!("/// {wide}\n")).len(), 1);
        assert_eq!(findings_of("a.rs", &format!("let a = \"{wide}\";\n")).len(), 0);
    }

    #[test]
    fn a_long_sentence_is_found_with_its_first_line() {
        let long = "word ".repeat(SENTENCE_WORDS_MAX + 1);
        let wrapped = long.replace("word word word ", "word word word\n");
        assert_eq!(long_sentences(&format!("A short one.\n\n{wrapped}.\n")), [(3, SENTENCE_WORDS_MAX + 1)]);
        let short = "word ".repeat(SENTENCE_WORDS_MAX - 1);
        assert!(long_sentences(&format!("{short}end. {short}end.\n- {short}\n- {short}\n")).is_empty());
    }
}
