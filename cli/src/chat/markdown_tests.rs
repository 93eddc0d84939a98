// SPDX-License-Identifier: Apache-2.0

use super::*;
use proptest::prelude::*;

/// What a terminal shows: text and styles, `{1;36|text}` for styled text. Fails on any escape
/// sequence that is no style.
fn shown(output: &str) -> String {
    let mut shown = String::new();
    let mut runs: Vec<(String, String)> = Vec::new();
    let (mut rest, mut style) = (output, String::new());
    while let Some(character) = rest.chars().next() {
        if let Some(sequence) = rest.strip_prefix("\u{1b}[0") {
            let end = sequence.find('m').unwrap();
            style = sequence[..end].trim_start_matches(';').to_owned();
            assert!(style.chars().all(|c| c.is_ascii_digit() || c == ';'), "{output:?}");
            rest = &sequence[end + 1..];
            continue;
        }
        assert!(!character.is_control() || matches!(character, '\n' | '\t'), "{output:?}");
        match runs.last_mut() {
            Some((of, text)) if *of == style => text.push(character),
            _ => runs.push((style.clone(), character.to_string())),
        }
        rest = &rest[character.len_utf8()..];
    }
    assert_eq!(style, "", "the style ends: {output:?}");
    for (style, text) in runs {
        shown += &if style.is_empty() { text } else { format!("{{{style}|{text}}}") };
    }
    shown
}

fn render(text: &str) -> String {
    let mut stream = MarkdownStream::default();
    let whole = stream.push(text) + &stream.finish();
    for size in [1, 2, 3, 5] {
        let characters: Vec<char> = text.chars().collect();
        let mut out = String::new();
        for piece in characters.chunks(size) {
            out += &stream.push(&piece.iter().collect::<String>());
        }
        out += &stream.finish();
        assert_eq!(shown(&out), shown(&whole), "{text:?} in pieces of {size}");
    }
    shown(&whole)
}

#[test]
fn spans_have_their_styles() {
    for (text, expected) in [
        ("a **b** c", "a {1|b} c"),
        ("*i* and `code`", "{3|i} and {36|code}"),
        ("**b `c` *i***.", "{1|b }{1;36|c}{1| }{1;3|i}."),
        ("~~no~~ yes", "{9|no} yes"),
        ("[text](http://a.b) after", "{4|text}{2| (http://a.b)} after"),
        ("``a ` b``", "{36|a ` b}"),
        (r"\*plain\* \n", r"*plain* \n"),
    ] {
        assert_eq!(render(text), expected, "{text:?}");
    }
}

#[test]
fn what_only_looks_like_a_marker_is_printed() {
    for text in [
        "2 * 3 * 4",
        "snake_case_name",
        "an *open one",
        "**",
        "a[0] = b[1]; [note] x",
        "~5 minutes, ~6",
        "`open",
        "#hashtag",
        "--flag",
        "1.5 and 2) x",
        "[x](open",
        "<b>tag</b> &amp;",
        "-",
        ">",
    ] {
        let expected = if text == ">" { "{2|│ }" } else { text };
        assert_eq!(render(text), expected, "{text:?}");
    }
}

#[test]
fn blocks_have_their_styles() {
    let text = "# Title *x*\n## Sub\n- a **b**\n  * c\n1. one\n> q\n\n---\n| a | b |\n";
    let rule = "─".repeat(RULE_COLUMNS);
    let expected = format!(
        "{{1;4|Title }}{{1;3;4|x}}\n{{1|Sub}}\n• a {{1|b}}\n  • c\n1. one\n{{2|│ }}q\n\n{{2|{rule}}}\n| a | b |\n"
    );
    assert_eq!(render(text), expected);
}

#[test]
fn code_blocks_are_code_to_their_fence() {
    let text = "```python\n# *no heading*\n  ``\n```\n*i*\n~~~~\n```\n~~~~ \nx";
    let expected =
        "{2|```python}\n{36|# *no heading*}\n{36|  ``}\n{2|```}\n{3|i}\n{2|~~~~}\n{36|```}\n{2|~~~~ }\nx";
    assert_eq!(render(text), expected);
}

#[test]
fn text_comes_at_once_and_a_long_open_marker_does_not_hold_it() {
    let mut stream = MarkdownStream::default();
    assert_eq!(stream.push("Plain te"), "Plain te");
    assert_eq!(stream.push("xt **bo"), "xt ");
    assert_eq!(shown(&stream.push("ld** x")), "{1|bold} x");
    assert_eq!(stream.push(" *"), " ");
    let long = stream.push(&"y".repeat(2000));
    assert!(long.len() > 900, "{}", long.len());
}

#[test]
fn control_characters_are_harmless_everywhere() {
    let hostile = "\u{1b}[2Ja **\u{1b}]0;t\u{7}** `\u{1b}c`\n```\u{9b}1m\n\u{1b}[31m\n";
    let shown = render(hostile);
    assert!(shown.contains("\\u{1b}[2Ja") && shown.contains("\\u{9b}1m"), "{shown}");
}

proptest! {
    #[test]
    fn no_letter_is_ever_lost_however_the_text_is_cut(text in r"[ab*_~`\[\]()#>.\- \n\\]{0,60}") {
        let letters = |text: &str| text.chars().filter(|c| matches!(c, 'a' | 'b')).collect::<String>();
        prop_assert_eq!(letters(&render(&text)), letters(&text));
    }
}
