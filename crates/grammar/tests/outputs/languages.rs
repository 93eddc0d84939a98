// SPDX-License-Identifier: Apache-2.0

//! Regular expressions, Lark, GBNF and choices: the whole output belongs to the language of the
//! source.

use grammar::{CompiledGrammar, GrammarSource};
use proptest::prelude::*;
use regex_automata::meta::Regex;
use serde_json::json;

use crate::cases;
use crate::schemas::strict;
use crate::token_chooser::{GeneratedOutput, TOKEN_CHOOSERS, TokenChooser, accepts_text, generate};
use crate::vocabularies::{DEMO, compile};

/// The text of a finished output, or `None` if the output was truncated.
fn output(grammar: &CompiledGrammar, model: TokenChooser, seed: u64) -> Option<String> {
    match generate(&DEMO, model, grammar.matcher(), seed, 600).unwrap() {
        GeneratedOutput::Finished(tokens) => Some(String::from_utf8(DEMO.text(&tokens)).unwrap()),
        GeneratedOutput::Truncated(_) => None,
    }
}

/// A language that every notation can express.
#[derive(Clone, Debug)]
enum SyntaxNode {
    Text(String),
    Range { from: char, to: char, others: bool },
    Digit,
    Sequence(Vec<SyntaxNode>),
    Either(Vec<SyntaxNode>),
    Repeat { piece: Box<SyntaxNode>, least: u8, more: u8 },
}

impl SyntaxNode {
    fn list(pieces: &[SyntaxNode], between: &str, write: fn(&SyntaxNode) -> String) -> String {
        let pieces: Vec<String> = pieces.iter().map(write).collect();
        pieces.join(between)
    }

    fn regex(&self) -> String {
        match self {
            SyntaxNode::Text(text) => text
                .chars()
                .map(|c| if c.is_ascii_punctuation() { format!("\\{c}") } else { c.to_string() })
                .collect(),
            SyntaxNode::Range { from, to, others } => {
                format!("[{}{from}-{to}]", if *others { "^" } else { "" })
            }
            SyntaxNode::Digit => "\\d".to_owned(),
            SyntaxNode::Sequence(pieces) => Self::list(pieces, "", Self::regex),
            SyntaxNode::Either(pieces) => format!("({})", Self::list(pieces, "|", Self::regex)),
            SyntaxNode::Repeat { piece, least, more } => {
                format!("(?:{}){{{least},{}}}", piece.regex(), least + more)
            }
        }
    }

    fn gbnf(&self) -> String {
        match self {
            // For these texts, GBNF's escapes equal Rust's.
            SyntaxNode::Text(text) => format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")),
            SyntaxNode::Range { from, to, others } => {
                format!("[{}{from}-{to}]", if *others { "^" } else { "" })
            }
            SyntaxNode::Digit => "[0-9]".to_owned(),
            SyntaxNode::Sequence(pieces) => format!("({})", Self::list(pieces, " ", Self::gbnf)),
            SyntaxNode::Either(pieces) => format!("({})", Self::list(pieces, " | ", Self::gbnf)),
            SyntaxNode::Repeat { piece, least, more } => {
                format!("({}){{{least},{}}}", piece.gbnf(), least + more)
            }
        }
    }

    /// Written as one terminal. Separate terminals in a Lark rule would each match as much as
    /// possible.
    fn lark(&self) -> String {
        match self {
            SyntaxNode::Text(text) => json!(text).to_string(),
            SyntaxNode::Range { .. } => format!("/{}/", self.regex()),
            SyntaxNode::Digit => "/[0-9]/".to_owned(),
            SyntaxNode::Sequence(pieces) => format!("({})", Self::list(pieces, " ", Self::lark)),
            SyntaxNode::Either(pieces) => format!("({})", Self::list(pieces, " | ", Self::lark)),
            SyntaxNode::Repeat { piece, least, more } => {
                format!("({})~{least}..{}", piece.lark(), least + more)
            }
        }
    }
}

fn pieces() -> impl Strategy<Value = SyntaxNode> {
    let range = prop::sample::select(vec![('a', 'f'), ('A', 'Z'), ('0', '4'), ('à', 'ö'), (' ', '.')]);
    let leaf = prop_oneof![
        "[a-z\"\\\\.+*()\\[\\]{}é ]{1,5}".prop_map(SyntaxNode::Text),
        (range, prop::bool::weighted(0.2)).prop_map(|((from, to), others)| SyntaxNode::Range {
            from,
            to,
            others
        }),
        Just(SyntaxNode::Digit),
    ];
    leaf.prop_recursive(4, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..4).prop_map(SyntaxNode::Sequence),
            prop::collection::vec(inner.clone(), 1..4).prop_map(SyntaxNode::Either),
            (inner, 0..3_u8, 0..4_u8).prop_map(|(piece, least, more)| SyntaxNode::Repeat {
                piece: Box::new(piece),
                least,
                more: more + u8::from(least == 0 && more == 0),
            }),
        ]
    })
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn outputs_match_as_a_whole_in_every_notation(piece in pieces(), seed in any::<u64>()) {
        let regex = piece.regex();
        let whole = Regex::new(&format!("^(?s:{})$", regex.replace("\\d", "[0-9]"))).unwrap();
        for source in [
            GrammarSource::Regex(regex),
            GrammarSource::Gbnf(format!("root ::= {}", piece.gbnf())),
            GrammarSource::Lark(format!("start: ALL\nALL: {}", piece.lark())),
        ] {
            let grammar = compile(&source).map_err(|error| TestCaseError::fail(format!("{source:?}: {error}")))?;
            for model in TOKEN_CHOOSERS {
                let output = output(&grammar, model, seed);
                let output = output.ok_or_else(|| TestCaseError::fail(format!("{model:?} does not end: {source:?}")))?;
                prop_assert!(whole.is_match(&output), "{:?} wrote {:?} under {:?}", model, output, source);
            }
        }
    }
}

#[test]
fn outputs_belong_to_the_language_of_their_source() {
    type Holds = fn(&str) -> bool;
    let cases: [(GrammarSource, Holds); 6] = [
        (GrammarSource::Regex(r"(\d{3}-){2}\d{4}".into()), |text| {
            text.len() == 12 && text.chars().enumerate().all(|(at, c)| if at == 3 || at == 7 { c == '-' } else { c.is_ascii_digit() })
        }),
        (GrammarSource::Choice(vec!["yes".into(), "no \"never\"".into(), "ünter\n".into()]), |text| {
            ["yes", "no \"never\"", "ünter\n"].contains(&text)
        }),
        (GrammarSource::Lark("start: \"<\" (NAME \",\")~1..3 \">\"\nNAME: /[a-c]{2}/".into()), |text| {
            text.starts_with('<') && text.ends_with(",>") && text.len() <= 12
        }),
        (GrammarSource::Gbnf("root ::= pair (\",\" ws pair){0,3}\npair ::= [a-f]+ \"=\" num\nnum ::= \"-\"? [0-9]{1,3}\nws ::= [ \\t]{0,2}".into()), |text| {
            text.split(',').all(|pair| pair.trim_start_matches([' ', '\t']).split_once('=').is_some_and(|(name, number)| {
                !name.is_empty() && name.chars().all(|c| ('a'..='f').contains(&c)) && number.parse::<i32>().is_ok()
            }))
        }),
        // A recursive grammar: balanced brackets.
        (GrammarSource::Gbnf("root ::= list\nlist ::= \"[\" (item (\",\" item){0,2})? \"]\"\nitem ::= [0-9]{1,2} | list".into()), |text| {
            let mut depth = 0_i32;
            text.chars().all(|c| {
                depth += i32::from(c == '[') - i32::from(c == ']');
                depth >= 0 && "[],0123456789".contains(c)
            }) && depth == 0
        }),
        (GrammarSource::Gbnf("root ::= \"a\" opt \"b\"\nopt ::= (\"x\" | )".into()), |text| text == "ab" || text == "axb"),
    ];
    for (source, holds) in cases {
        let grammar = compile(&source).map_err(|error| format!("{source:?}: {error}")).unwrap();
        let mut ended = 0;
        for seed in 0..20 {
            if let Some(output) = output(&grammar, TokenChooser::Indifferent, seed) {
                assert!(holds(&output), "{source:?} gave {output:?}");
                ended += 1;
            }
        }
        assert!(ended >= 10, "{source:?}: {ended} of 20 outputs came to an end");
    }
}

/// A text of the language is allowed token by token, as the tokenizer encodes it, and may end at
/// its end.
#[test]
fn texts_of_the_language_are_accepted_and_others_are_not() {
    let object = strict(&json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
        "required": ["name"],
        "$defs": {"age": {"type": "integer"}},
    }));
    let format = |format| strict(&json!({"type": "string", "format": format}));
    for (source, good, bad) in [
        (format("date"), "\"2024-02-29\"", "\"2023-02-29\""),
        (format("date"), "\"2000-02-29\"", "\"1900-02-29\""),
        (format("date-time"), "\"2024-02-29T23:59:59.5Z\"", "\"2023-02-29T23:59:59.5Z\""),
        (format("date-time"), "\"1999-12-31t00:00:00+01:30\"", "\"1999-12-31T23:59:60Z\""),
        (format("time"), "\"00:00:00-02:00\"", "\"23:59:60Z\""),
        (object, r#"{"name": "Ann \"A\" é", "age": 41}"#, r#"{"age": 41}"#),
        (GrammarSource::JsonSchema { schema: "true".into(), lenient: false }, "[1, {\"a\": null}]", "[1, }"),
        (GrammarSource::Gbnf("root ::= [a-z]* \"end\"".into()), "the end".trim_start_matches("the "), "en"),
        (GrammarSource::Regex("(ab|c)*d".into()), "ababcd", "abad"),
    ] {
        let accepts = |text| accepts_text(&DEMO, compile(&source).unwrap().matcher(), text);
        assert!(accepts(good), "{source:?} {good:?}");
        assert!(!accepts(bad), "{source:?} {bad:?}");
    }
}
