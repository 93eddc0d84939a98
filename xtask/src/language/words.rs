// SPDX-License-Identifier: Apache-2.0

//! Words that the tree does not use, each with the word to use instead (docs/GLOSSARY.md).

use super::entries;
use std::path::PathBuf;

/// `word -> what to use` or `two words -> what to use` a line.
const BANNED: &str = include_str!("../../banned-words.txt");

pub(super) fn check(texts: &[(PathBuf, String)]) -> Vec<String> {
    let banned: Vec<(Vec<&str>, &str)> = entries(BANNED)
        .filter_map(|line| line.split_once(" -> "))
        .map(|(word, instead)| (word.split(' ').collect(), instead))
        .collect();
    let mut findings = Vec::new();
    for (file, text) in texts.iter().filter(|(file, _)| !file.starts_with("xtask")) {
        for (number, line) in text.lines().enumerate() {
            let words = words_of(line);
            for (banned, instead) in &banned {
                if words.windows(banned.len()).any(|window| window == banned) {
                    let banned = banned.join(" ");
                    let at = file.display();
                    findings.push(format!("{at}:{}: \"{banned}\": {instead}", number + 1));
                }
            }
        }
    }
    findings
}

/// The words of a line in lower case; `give_back`, `GiveBack` and "give back" are the same two.
fn words_of(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut was_lower = false;
    for character in line.chars() {
        let begins = character.is_uppercase() && was_lower;
        if (begins || !character.is_alphanumeric()) && !word.is_empty() {
            words.push(std::mem::take(&mut word));
        }
        if character.is_alphanumeric() {
            word.extend(character.to_lowercase());
        }
        was_lower = character.is_lowercase() || character.is_numeric();
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_split_into_words() {
        assert_eq!(words_of("fn give_back(RowTime, late)"), ["fn", "give", "back", "row", "time", "late"]);
    }

    #[test]
    fn every_line_of_the_list_bans_something() {
        for line in entries(BANNED) {
            let (word, instead) = line.split_once(" -> ").expect(line);
            assert!(!instead.is_empty(), "{line}");
            let text = (PathBuf::from("a.rs"), format!("// a {word} of it\n"));
            assert_eq!(check(&[text]).len(), 1, "{line}");
        }
    }
}
