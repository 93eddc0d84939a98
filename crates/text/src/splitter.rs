// SPDX-License-Identifier: Apache-2.0

//! Splits a text with the expressions of a pre-tokenizer, in time linear in the text.
//!
//! The original expressions are written for backtracking engines and end in `|\s+(?!\S)|\s+`. That
//! tail matches a run of blanks, without the last blank if a word follows. An automaton cannot look
//! ahead, so the tail becomes a second pattern `\s+`, and the code gives the last blank back. The
//! rest of each expression runs unchanged on `regex-automata`, whose time is linear for any input.

use std::ops::Range;

use regex_automata::{Anchored, Input, meta::Regex};

use crate::pretokenizers::PreTokenizer;

const BLANK_TAIL: &str = r"|\s+(?!\S)|\s+";
/// Index of the pattern that replaces [`BLANK_TAIL`].
const BLANKS: usize = 1;

#[derive(Debug)]
pub(crate) struct Splitter {
    steps: Vec<SplitStep>,
}

#[derive(Debug)]
struct SplitStep {
    /// Pattern 0 is the expression without [`BLANK_TAIL`]. Pattern 1 ([`BLANKS`]) replaces that
    /// tail, if the expression has it.
    regex: Regex,
}

impl Splitter {
    pub(crate) fn new(pre: &PreTokenizer) -> Result<Self, Box<regex_automata::meta::BuildError>> {
        let step = |expression: &&str| -> Result<SplitStep, Box<regex_automata::meta::BuildError>> {
            let regex = match expression.strip_suffix(BLANK_TAIL) {
                Some(head) => Regex::new_many(&[head, r"\s+"])?,
                None => Regex::new(expression)?,
            };
            Ok(SplitStep { regex })
        };
        Ok(Self { steps: pre.expressions.iter().map(step).collect::<Result<_, _>>()? })
    }

    /// Calls `emit` for every piece of `text`, in order. The pieces together are the whole text.
    pub(crate) fn split(&self, text: &str, mut emit: impl FnMut(Range<usize>)) {
        let Some((last, former)) = self.steps.split_last() else { return emit(0..text.len()) };
        let mut pieces: Vec<Range<usize>> = std::iter::once(0..text.len()).collect();
        for step in former {
            let mut finer = Vec::new();
            pieces.into_iter().for_each(|piece| step.split(text, piece, |p| finer.push(p)));
            pieces = finer;
        }
        pieces.into_iter().for_each(|piece| last.split(text, piece, &mut emit));
    }
}

impl SplitStep {
    /// Splits one piece further. Both matches and the gaps between them become pieces.
    fn split(&self, text: &str, piece: Range<usize>, mut emit: impl FnMut(Range<usize>)) {
        // Only the piece is searched: the expression must not see what follows it.
        let (base, text) = (piece.start, &text[piece]);
        let mut at = 0;
        while at < text.len() {
            // Most expressions match at every position. An anchored search then needs no second
            // pass to find the start.
            let here = Input::new(text).range(at..);
            let found =
                self.regex.search(&here.clone().anchored(Anchored::Yes)).or_else(|| self.regex.search(&here));
            let Some(found) = found else { break };
            let mut end = found.end();
            if found.pattern().as_usize() == BLANKS && end < text.len() {
                let last = text[found.range()].chars().next_back().map_or(0, char::len_utf8);
                if last < found.len() {
                    end -= last;
                }
            }
            if found.start() > at {
                emit(base + at..base + found.start());
            }
            emit(base + found.start()..base + end);
            at = end;
        }
        if at < text.len() {
            emit(base + at..base + text.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pretokenizers::{PRE_TOKENIZERS, find};

    fn splitter(pre: &str) -> Splitter {
        Splitter::new(find(pre).unwrap()).unwrap()
    }

    fn pieces<'t>(splitter: &Splitter, text: &'t str) -> Vec<&'t str> {
        let mut pieces = vec![];
        splitter.split(text, |piece| pieces.push(&text[piece]));
        pieces
    }

    fn split<'t>(pre: &str, text: &'t str) -> Vec<&'t str> {
        pieces(&splitter(pre), text)
    }

    #[test]
    fn every_row_compiles_and_no_expression_matches_nothing() {
        for row in PRE_TOKENIZERS {
            for step in Splitter::new(row).unwrap().steps {
                assert!(!step.regex.is_match(""), "{:?} would not advance", row.names);
            }
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = PRE_TOKENIZERS.iter().flat_map(|row| row.names).collect();
        let total = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), total);
    }

    /// A line with the expressions of a pre-tokenizer, or a line behind it with the expected pieces
    /// of a text.
    #[derive(serde::Deserialize)]
    struct GoldenSplit {
        pre: Option<String>,
        regex: Option<Vec<String>>,
        pieces: Option<Vec<String>>,
    }

    fn check(file: &std::path::Path) -> usize {
        let mut checked = 0;
        let (mut pre, mut current) = ("gpt-2".to_owned(), splitter("gpt-2"));
        for line in std::fs::read_to_string(file).unwrap().lines() {
            let golden: GoldenSplit = serde_json::from_str(line).unwrap();
            if let Some(expressions) = golden.regex {
                pre = golden.pre.unwrap();
                assert_eq!(find(&pre).unwrap().expressions, expressions, "{pre}");
                current = splitter(&pre);
                continue;
            }
            let expected = golden.pieces.unwrap();
            let text = expected.concat();
            assert_eq!(pieces(&current, &text), expected, "{pre}: {text:?}");
            checked += 1;
        }
        checked
    }

    #[test]
    fn splits_are_those_of_the_original_engines() {
        let tree = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/splits.jsonl");
        assert!(check(&tree) > 1000);
        match std::env::var_os("BALLAST_TEST_DATA") {
            Some(root) => {
                assert_eq!(check(&std::path::Path::new(&root).join("data/vocab/pretok.jsonl")), 1976)
            }
            None => println!("SKIPPED: BALLAST_TEST_DATA is not set, only short texts are tested"),
        }
    }

    #[test]
    fn last_blank_goes_to_the_next_word() {
        assert_eq!(split("qwen2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(split("qwen2", "a   "), ["a", "   "]);
        assert_eq!(split("gpt-2", "a \u{3000}!"), ["a", " ", "\u{3000}", "!"]);
        assert_eq!(split("gpt-2", "a\n\nb"), ["a", "\n", "\n", "b"]);
    }

    #[test]
    fn later_steps_do_not_see_past_their_piece() {
        assert_eq!(split("smollm", "x  1"), ["x", "  ", "1"]);
    }
}
